"""torch's ONNX exporter writes a squeeze of an axis of several elements, which does nothing, as an error.

ONNX Runtime and the ONNX package's own evaluator both refuse it, as ONNX has it.
"""

# finding: 41
# engine: onnxruntime, openvino, onnx-reference
# claimed: squeeze along an axis of several elements
# fault of: exporter (onnxscript)
# largest error: raises
# cpu: all
# claims: `*squeeze*/*`
# reason: the exporter squeezes an axis of several elements

import logging
from typing import Any

import onnxruntime
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0)


x = torch.ones(4, 1)
program = torch.onnx.export(Squeezed().eval(), (x,), dynamo=True, verbose=False)
assert program is not None
model = program.model_proto.SerializeToString()


def run_onnxruntime() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def run_reference() -> Any:
    evaluator = ReferenceEvaluator(model)
    return evaluator.run(None, {evaluator.input_names[0]: x.numpy()})[0]


right, refused = str(tuple(Squeezed()(x).shape)), []
for name, evaluate in {"onnxruntime": run_onnxruntime, "onnx.reference": run_reference}.items():
    try:
        found = str(evaluate().shape)
    except Exception as error:
        found = f"raises {type(error).__name__}: {str(error).strip()[-80:]}"
    print(f"four rows, squeezed along the rows, by {name}: {found}; right is {right}")
    refused.append(found != right)
print("the fault shows" if all(refused) else "the fault does not show with this torch on this machine")
raise SystemExit(not all(refused))
