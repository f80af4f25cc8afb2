"""torch's ONNX exporter writes a squeeze of an axis of several elements, which does nothing, as an error."""

import logging

import onnxruntime
import torch
from torch import Tensor, nn

logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(0)


x = torch.ones(4, 1)
program = torch.onnx.export(Squeezed().eval(), (x,), dynamo=True, verbose=False)
assert program is not None
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
try:
    model = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    found = str(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0].shape)
except Exception as error:
    found = f"raises {type(error).__name__}: {str(error).strip()[-80:]}"
right = str(tuple(Squeezed()(x).shape))
print(f"four rows, squeezed along the rows: {found}; right is {right}")
print("the fault shows" if found != right else "the fault does not show with this torch on this machine")
raise SystemExit(found == right)
