"""torch's ONNX exporter drops avg_pool's divisor_override, without a word: the mean is over the window instead.

ONNX Runtime and the ONNX package's own evaluator give the same wrong mean: the bytes are wrong.
"""

# finding: 40
# engine: onnxruntime, openvino, onnx-reference
# claimed: avg_pool2d, avg_pool3d with `divisor_override`
# fault of: exporter (onnxscript)
# largest error: 28 LSB
# cpu: all
# claims: `nn.AvgPool[23]d/*`, `F.avg_pool[23]d/*`
# reason: the exporter drops divisor_override

import logging

import onnxruntime
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2, divisor_override=8)


x = torch.ones(1, 1, 4, 4)
program = torch.onnx.export(Pooled().eval(), (x,), dynamo=True, verbose=False)
assert program is not None
model = program.model_proto.SerializeToString()
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
feed = {session.get_inputs()[0].name: x.numpy()}
found, again = (float(each.run(None, feed)[0].flatten()[0]) for each in (session, ReferenceEvaluator(model)))
right = float(Pooled()(x).flatten()[0])
print(f"a sum of 4 ones over 8: found {found}, by onnx.reference {again}; right is {right}")
print("the fault shows" if found == again != right else "the fault does not show with this torch on this machine")
raise SystemExit(not found == again != right)
