"""ExecuTorch on the CPU: an exported reference model; its XNNPACK delegate takes groups of ops between dq and q."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._sympy.value_ranges import ValueRanges

from fx_quant_conformance.backends.base import Capabilities, Execution, UnsupportedPattern
from fx_quant_conformance.backends.exporting import LIMITS as SHARED_LIMITS
from fx_quant_conformance.backends.exporting import (
    Compiled,
    ExportingBackend,
    Tensors,
    decompose_sparingly,
    leave_nothing,
    owner_of,
    separate,
)
from fx_quant_conformance.refimpl import export_reference
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.config.native import Table
from fx_quant_conformance.refimpl.legacy import qint8
from fx_quant_conformance.refimpl.observers.decomposed import OPS

S8 = DTypeConfig(qint8, qint8)
S8_S8 = DTypeConfig(qint8, qint8, qint8, torch.float32)
DYNAMIC_S8_S8 = DTypeConfig(qint8, torch.float32, qint8, torch.float32, is_dynamic=True)
TABLE: Table = {
    "conv": (S8_S8,),
    "linear": (S8_S8, DYNAMIC_S8_S8),
    **dict.fromkeys(("binary", "cat", "share qparams"), (S8,)),
}
PATTERNS = (
    "nn.Conv[12]d*",
    "torch.conv[12]d*",
    "nni.ConvReLU[12]d",
    "nnqat.Conv[12]d",
    "nniqat.ConvReLU[12]d",
    "nn.ConvTranspose[12]d*",
    "torch.conv_transpose[12]d*",
    "nn.Linear*",
    "nni.LinearReLU",
    "nnqat.Linear",
    "nniqat.LinearReLU",
    "F.linear*",
    "operator.add*",
    "operator.mul",
    "torch.add*",
    "torch.mul",
    "torch.cat",
    "nn.ReLU",
    "nn.ReLU6",
    "nn.Hardtanh",
    "F.relu*",
    "F.hardtanh*",
    ".relu*",
    "torch.clamp",
    ".clamp",
    "nn.MaxPool2d",
    "F.max_pool2d",
    ".permute",
    "*.transpose",
)
LIMITS = SHARED_LIMITS | {op: {"ceil_mode": (False,)} for op in ("nn.MaxPool2d", "F.max_pool2d")}
"""XNNPACK takes a last window that goes beyond the end only if no axis is dynamic."""
ROWS = 64
_FLOAT = "fp32"
_DYNAMIC = "xnn_datatype_qdint8"


def _refuse_unsigned(program: ExportedProgram) -> None:
    """Decline a program with unsigned integers: the delegate does not support them. (DTY-02)"""
    for node in program.graph.nodes:
        if torch.uint8 in node.args:
            raise UnsupportedPattern(f"{node.name} is of unsigned integers (quint8): XNNPACK takes qint8 alone")


def _copy_dequantizes(program: ExportedProgram) -> ExportedProgram:
    """Give each reader of a dequantized tensor its own dequantize.

    The partitioner would join the readers to one group, which may depend on itself (docs/findings.md, 66).
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function" and _is(node, "dequantize"):
            for reader in list(node.users)[1:]:
                with program.graph.inserting_before(reader):
                    reader.replace_input_with(node, program.graph.node_copy(node))
    program.graph_module.recompile()
    return program


@contextmanager
def _allow_rows(program: ExportedProgram) -> Iterator[None]:
    """Set the largest size of each dynamic axis, for which memory is planned.

    Guards may not narrow it: torch would, to the rows of the example, when it chooses a float convolution's kernel.
    """
    sizes = [size for node in program.graph.nodes for size in getattr(node.meta.get("val"), "shape", ())]
    with ExitStack() as stack:
        for size in sizes:
            ranges = size.node.shape_env.var_to_range if isinstance(size, torch.SymInt) else {}
            if ranges and size.node.expr in ranges:
                ranges[size.node.expr] = ValueRanges(0, max(ROWS, size.node.hint))
                stack.enter_context(size.node.shape_env.suppress_guards())
        yield


def _lower(program: ExportedProgram) -> tuple[Any, bytes]:
    """Lower a program, to XNNPACK where this takes it; return the lowered program, and the same as bytes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    config = EdgeCompileConfig(_check_ir_validity=False)
    with _allow_rows(program), decompose_sparingly(), _trace_once(), _compile_late():
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
        return edge, edge.to_executorch().buffer


@contextmanager
def _trace_once() -> Iterator[None]:
    """Skip passes that would only trace a graph again that has not changed since it was last traced.

    Most passes find nothing to edit and trace all the same, which takes half of the time of lowering.
    """
    from executorch.exir.pass_base import ExportPass

    traced, values, trace = dict[Graph, list[tuple[Any, ...]]](), list[Any](), ExportPass.call

    def call(self: Any, model: GraphModule) -> PassResult:
        if _only_traces(type(self), ExportPass) and traced.get(model.graph) == _contents(model.graph):
            return PassResult(model, True)
        result: PassResult = trace(self, model)
        traced[result.graph_module.graph] = _contents(result.graph_module.graph)
        values.extend(node.meta.get("val") for node in result.graph_module.graph.nodes)  # keeps their ids unique
        return result

    with patch.object(ExportPass, "call", call):
        yield


def _only_traces(kind: type, base: type) -> bool:
    """Tell whether a pass edits the graph outside of tracing, if at all: it overrides nothing that tracing calls."""
    classes = kind.__mro__[: kind.__mro__.index(base)]
    own = {name for cls in classes for name in vars(cls) if not name.startswith("_")}
    return own.isdisjoint(set(dir(base)) - {"call", "requires", "ensures"})


def _contents(graph: Graph) -> list[tuple[Any, ...]]:
    return [(node, node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in graph.nodes]


@contextmanager
def _compile_late() -> Iterator[None]:
    """Compile a graph's code only when it runs: hardly one of the 200 graphs on the way to a program does."""
    recompile = GraphModule.recompile

    def late(self: Any) -> None:
        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        self._code = "(not compiled)"  # only printed
        type(self).forward = run  # each module has its own class

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recompile(self)
        return self.forward(*args, **kwargs)

    with patch.object(GraphModule, "recompile", late):
        yield


class Method(Compiled):
    """A loaded program; ``edge`` is the program before it became bytes."""

    def __init__(self, program: ExportedProgram) -> None:
        import executorch.kernels.quantized  # noqa: F401  # registers the q/dq ops outside of delegates
        from executorch.extension.pybindings import _C as runtime
        from executorch.runtime import Runtime

        super().__init__(program, self._run)
        runtime._unsafe_reset_threadpool(1)
        self.sources = _map_sources(program)
        self.edge, data = _lower(program)
        self._program = Runtime.get().load_program(data)
        self._method = self._program.load_method("forward")

    def _run(self, inputs: Tensors) -> Any:
        if not all(value.numel() for value in inputs):
            raise ValueError("an empty tensor: the runtime ends the process, or gives any shape")
        return self._method.execute([value.contiguous() for value in inputs])


class ExecuTorchBackend(ExportingBackend):
    """ExecuTorch's runtime: XNNPACK kernels for what the delegate takes, portable kernels for everything else."""

    name = "executorch"
    packages = ("executorch", "torchao")
    table, patterns = TABLE, PATTERNS
    settings = f"XNNPACK delegate, one thread, memory for {ROWS} rows"
    waivers = Path(__file__).with_name("executorch.waivers.toml")

    def unavailable_reason(self) -> str | None:
        """Say how to install: plain pip would bring about fifty more packages."""
        if all(map(find_spec, self.packages)):
            return None
        return (
            f"executorch not installed: pip install -c constraints.txt 'fx-quant-conformance[{self.name}]', "
            "then pip install --no-deps -c constraints.txt executorch torchao"
        )

    def capabilities(self) -> Capabilities:
        """Both symmetric schemes; a bias becomes int32 of scale s_x·s_w, choose_qparams has a smallest scale."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        floor = float(torch.tensor(6.1e-5))
        return Capabilities(weight_schemes=schemes, int32_bias=True, dynamic_scale_floor=floor, limits=LIMITS)

    def warm_up(self) -> None:
        """Lower a model; do not load it: the runtime has threads."""
        _lower(export_reference(symbolic_trace(nn.Sequential(nn.Linear(2, 2))), (torch.zeros(2, 2),)))

    def lower(self, program: ExportedProgram, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Delegate and load."""
        _refuse_unsigned(program)
        return Method(_copy_dequantizes(program))

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read the types of tensors off the delegates' bytes."""
        return read_execution(lowered) if isinstance(lowered, Method) else None


def _map_sources(program: ExportedProgram) -> dict[str, str]:
    """Map exported nodes to the reference model's nodes between dequantize and quantize."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    after, before = set[Node](), set[Node]()  # nodes that come from integers, and nodes that become integers
    for node in nodes:
        if _is(node, "dequantize") or (not _is(node, "quantize") and after.intersection(node.all_input_nodes)):
            after.add(node)
    for node in reversed(nodes):
        if _is(node, "quantize") or (not _is(node, "dequantize") and before.intersection(node.users)):
            before.add(node)
    dynamic = {user for node in nodes if node.target == OPS.dequantize_per_tensor.tensor for user in node.users}
    inner = [node for node in nodes if node in (after & before) | dynamic and not _is(node, "dequantize", "quantize")]
    return {node.name: owner_of(node) for node in inner}


def _is(node: Node, *ops: str) -> bool:
    return str(node.target).removeprefix("quantized_decomposed.").startswith(ops)


def read_execution(lowered: Method) -> Execution:
    """Separate ops on integers from ops on floats, in and outside of delegates, by the reference model's nodes."""
    model, layers = lowered.edge.exported_program().graph_module, dict[str, list[tuple[str, bool]]]()
    left, has_layers = set(lowered.sources.values()), False
    for node in model.graph.nodes:
        owner = lowered.sources.get(_origin_of(node))
        if owner and node.op == "call_function" and node.target.__name__.startswith("alias_copy"):
            left.discard(owner)
        elif owner and node.op == "call_function" and node.target is not operator.getitem:
            layers.setdefault(owner, []).append((f"{node.target.__name__} outside of the delegate", False))
    for delegate in model.children():
        owners = {node.meta.get("debug_handle"): _origin_of(node) for node in delegate.original_module.graph.nodes}
        for handle, kind, datatype in _read_layers(delegate.processed_bytes):
            is_quantized, has_layers = datatype != _FLOAT, True
            owner = lowered.sources.get(owners.get(handle, ""))
            if owner or (is_quantized and handle in owners):
                layers.setdefault(owner or owners[handle], []).append((f"{kind} {datatype}", is_quantized))
    quantized, floating = separate(layers)
    is_empty = not left or not (layers or has_layers)
    return Execution(quantized_ops=leave_nothing(lowered.ops) if is_empty else quantized, float_fallbacks=floating)


def _origin_of(node: Node) -> str:
    """Return the name of the exported node from which a node was made."""
    sources, name = node.meta.get("from_node"), node.name
    while sources:
        name, sources = sources[-1].name, sources[-1].from_node
    return name


def _read_layers(delegate: bytes) -> Iterator[tuple[int, str, str]]:
    """Yield the handle, kind and compute type of each node that XNNPACK gets, except conversions."""
    graph = _decode(delegate)
    tensors = [value["xvalue_union"] for value in graph["xvalues"]]
    types = {info["id_out"]: info["datatype"] for info in (value.get("tensor_value", value) for value in tensors)}
    for node in graph["xnodes"]:
        kind, ends = node["xnode_union_type"].removeprefix("XNN"), node["xnode_union"]
        first = types[ends.get("input_id", ends.get("input1_id"))]
        datatype = first if first == _DYNAMIC else types[ends["output_id"]]
        if kind != "Convert":
            yield node["debug_handle"], kind, datatype.removeprefix("xnn_datatype_")


def _decode(delegate: bytes) -> Any:
    """Decode a delegate's graph by the flatbuffers compiler in the package."""
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnnpack
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    header = xnnpack.XNNHeader.from_bytes(delegate[: xnnpack.XNNHeader.EXPECTED_LENGTH])
    with TemporaryDirectory() as folder:
        schema, path = Path(folder) / "schema.fbs", Path(folder) / "graph.bin"
        schema.write_bytes(xnnpack._get_schema_bytes())
        path.write_bytes(delegate[header.flatbuffer_offset :][: header.flatbuffer_size])
        _flatc_decompile(folder, str(schema), str(path), ["--raw-binary"])
        return json.loads(re.sub(r": (-?)inf\b", r": \1Infinity", path.with_suffix(".json").read_text()))
