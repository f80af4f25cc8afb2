"""ExecuTorch: XNNPACK's delegate takes a quantized sum or product with a number, and computes it in float."""

# finding: 131
# engine: executorch
# claimed: add and mul of a tensor and a number
# fault of: partitioner
# largest error: runs in float
# cpu: all
# claims: none alone; the models of Llama, T5 and Whisper
# reason: a sum or product with a number is one of floats

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnnpack
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir._serialize._flatbuffer import _flatc_decompile
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 3, -128, 127, torch.int8)


def quantized(x: Tensor) -> Tensor:
    """Quantize and dequantize a tensor."""
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
    return result


class Binary(nn.Module):
    """A sum or product of two quantized tensors, or of one and a number."""

    def __init__(self, op: Callable[..., Any], number: float | None) -> None:
        super().__init__()
        self.op, self.number = op, number

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the quantized result."""
        return quantized(self.op(quantized(x), quantized(y) if self.number is None else self.number))


def read_delegate(model: nn.Module) -> list[str]:
    """Lower, and return the ops of the delegate with the types of their outputs."""
    edge = to_edge_transform_and_lower(
        torch.export.export(model.eval(), (torch.randn(2, 8), torch.randn(2, 8))),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    [delegate] = edge.exported_program().graph_module.children()
    data = delegate.processed_bytes
    header = xnnpack.XNNHeader.from_bytes(data[: xnnpack.XNNHeader.EXPECTED_LENGTH])
    with TemporaryDirectory() as folder:
        schema, path = Path(folder) / "schema.fbs", Path(folder) / "graph.bin"
        schema.write_bytes(xnnpack._get_schema_bytes())
        path.write_bytes(data[header.flatbuffer_offset :][: header.flatbuffer_size])
        _flatc_decompile(folder, str(schema), str(path), ["--raw-binary"])
        graph = json.loads(re.sub(r": (-?)inf\b", r": \1Infinity", path.with_suffix(".json").read_text()))
    tensors = [value["xvalue_union"] for value in graph["xvalues"]]
    types = {info["id_out"]: info["datatype"] for info in (value.get("tensor_value", value) for value in tensors)}
    names = [
        (node["xnode_union_type"].removeprefix("XNN"), node["xnode_union"]["output_id"]) for node in graph["xnodes"]
    ]
    return [f"{name} {types[output].removeprefix('xnn_datatype_')}" for name, output in names if name != "Convert"]


SIDES = {"two tensors": None, "a tensor and a number": 0.5}
found = {
    f"{op.__name__} of {sides}": read_delegate(Binary(op, number))
    for op in (operator.add, operator.mul)
    for sides, number in SIDES.items()
}
print(f"the delegate computes {found}")
shown = list(found.values()) == [["Add qint8"], ["Add fp32"], ["Multiply qint8"], ["Multiply fp32"]]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
