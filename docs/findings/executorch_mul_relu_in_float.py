"""ExecuTorch: XNNPACK's delegate takes mul + relu, which XNNPACKQuantizer annotates as one, and multiplies floats."""

# finding: 90
# engine: executorch, XNNPACKQuantizer
# claimed: mul + relu
# fault of: partitioner
# largest error: runs in float
# cpu: all
# claims: `operator.mul+*/*`, `torch.mul+*/*`
# reason: a product and a relu are one op of floats

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnnpack
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir._serialize._flatbuffer import _flatc_decompile
from torch import Tensor, nn
from torch.export import export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


class Sum(nn.Module):
    """A sum and a relu."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add."""
        return torch.relu(x + y)


class Product(nn.Module):
    """A product and a relu."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply."""
        return torch.relu(x * y)


def read_delegate(model: nn.Module) -> list[str]:
    """Quantize, lower, and return the ops of the delegate with the types of their outputs."""
    inputs = (torch.randn(2, 8), torch.randn(2, 8))
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(export(model, inputs).module(), quantizer)
    prepared(*inputs)
    edge = to_edge_transform_and_lower(
        export(convert_pt2e(prepared), inputs),
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


found = {type(model).__name__: read_delegate(model) for model in (Sum(), Product())}
print(f"the delegate computes {found}")
shown = found == {"Sum": ["Add qint8"], "Product": ["Multiply fp32"]}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
