"""OpenVINO: an EmbeddingBag as torch's exporter writes it is not read: a subgraph in it leaves types to be inferred."""

# finding: 53
# engine: openvino
# claimed: a model with an EmbeddingBag in float
# fault of: ONNX front end
# largest error: raises
# cpu: all
# claims: none; the model dlrm
# reason: an EmbeddingBag as it is exported is not read

import logging

import openvino
import torch
from torch import nn

logging.disable(logging.ERROR)
bag, indices = nn.EmbeddingBag(10, 3, mode="sum").eval(), torch.tensor([[1, 2], [3, 4]])
program = torch.onnx.export(torch.export.export(bag, (indices,)), dynamo=True, verbose=False)
assert program is not None
try:
    openvino.Core().read_model(program.model_proto.SerializeToString())
    told = ""
except RuntimeError as error:
    told = next(line for line in str(error).splitlines() if "Unsupported" in line or "not supported" in line)
print(f"read_model: {told or 'no error'}")
shown = bool(told)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
