"""torch's ONNX exporter drops avg_pool's divisor_override, without a word: the mean is over the window instead."""

import logging

import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn

logging.getLogger("torch.onnx").setLevel(logging.ERROR)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2, divisor_override=8)


x = torch.ones(1, 1, 4, 4)
program = torch.onnx.export(Pooled().eval(), (x,), dynamo=True, verbose=False)
assert program is not None
session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
found = float(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0].flatten()[0])
right = float(Pooled()(x).flatten()[0])
print(f"a sum of 4 ones over 8: found {found} right {right}")
print("the fault shows" if found != right else "the fault does not show with this torch on this machine")
raise SystemExit(found == right)
