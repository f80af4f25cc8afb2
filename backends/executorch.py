"""ExecuTorch on the CPU: an exported reference model, of which the XNNPACK delegate takes groups between q and dq."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._sympy.value_ranges import ValueRanges

from backends._export import LIMITS, NOTHING_LEFT, Compiled, ExportingBackend, Tensors, exported, owner_of, sparing
from backends.base import Capabilities, Execution, Taken, UnsupportedPattern
from refimpl.decomposed import OPS
from refimpl.dtype_config import DTypeConfig
from refimpl.native import Table

S8 = DTypeConfig(torch.qint8, torch.qint8)
S8_S8 = DTypeConfig(torch.qint8, torch.qint8, torch.qint8, torch.float32)
DYNAMIC_S8_S8 = DTypeConfig(torch.qint8, torch.float32, torch.qint8, torch.float32, is_dynamic=True)
TABLE: Table = {
    "conv": (S8_S8,),
    "linear": (S8_S8, DYNAMIC_S8_S8),
    **dict.fromkeys(("binary", "cat", "share qparams"), (S8,)),
}
PATTERNS = (
    "nn.Conv[12]d*", "torch.conv[12]d*", "nni.ConvReLU[12]d", "nnqat.Conv[12]d", "nniqat.ConvReLU[12]d",
    "nn.ConvTranspose[12]d*", "torch.conv_transpose[12]d*",
    "nn.Linear*", "nni.LinearReLU", "nnqat.Linear", "nniqat.LinearReLU", "F.linear*",
    "operator.add*", "operator.mul", "torch.add*", "torch.mul", "torch.cat",
    "nn.ReLU", "nn.ReLU6", "nn.Hardtanh", "F.relu*", "F.hardtanh*", ".relu*", "torch.clamp", ".clamp",
    "nn.MaxPool2d", "F.max_pool2d", ".permute", "*.transpose",
)  # fmt: skip
_WHOLE_WINDOWS: dict[str, Taken] = {"ceil_mode": (False,)}
LIMITS_HERE = LIMITS | dict.fromkeys(("nn.MaxPool2d", "F.max_pool2d"), _WHOLE_WINDOWS)
"""A last window that goes beyond the end is taken where no axis is dynamic alone."""
ROWS = 64


def _refuse_unsigned(model: GraphModule) -> None:
    """Decline a model with unsigned integers: the delegate has none. (DTY-02)"""
    for node in model.graph.nodes:
        if torch.uint8 in node.args or torch.quint8 in node.args:
            raise UnsupportedPattern(f"{node.name} is of unsigned integers (quint8): XNNPACK takes qint8 alone")


def _with_numbers(program: ExportedProgram) -> ExportedProgram:
    """Write one scale for all of a weight as a number, in place of a tensor of one: so the partitioner reads it."""
    held = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    for node in program.graph.nodes:
        if node.target not in _OF_WEIGHTS or node.args[1].name not in names:
            continue
        integers, scale, zero_point, *rest = node.args
        values = [held[names[each.name]] for each in (scale, zero_point)]
        if node.target == OPS.dequantize_per_channel.default:
            axis, *rest = rest
            if values[0].numel() == held[names[integers.name]].shape[axis]:
                continue
        node.target = OPS.dequantize_per_tensor.default
        node.args = (integers, *(value.item() for value in values), *rest)
    program.graph_module.recompile()
    return program


_OF_WEIGHTS = (OPS.dequantize_per_tensor.tensor, OPS.dequantize_per_channel.default)


def _each_its_own(program: ExportedProgram) -> ExportedProgram:
    """Give each reader of a dequantized tensor a dequantize of its own.

    The partitioner would join them to one group, which may depend on itself (docs/findings.md, 66).
    """
    for node in list(program.graph.nodes):
        if node.op == "call_function" and _is(node, "dequantize"):
            for reader in list(node.users)[1:]:
                with program.graph.inserting_before(reader):
                    reader.replace_input_with(node, program.graph.node_copy(node))
    program.graph_module.recompile()
    return program


@contextmanager
def _any_rows(program: ExportedProgram) -> Iterator[None]:
    """Say of each axis whose size is dynamic how long it gets at most: memory is planned for that.

    That is not narrowed on the way: torch's choice of a float convolution's kernel does, by the rows of the example.
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
    """Lower a program to XNNPACK, what this takes of it; return what it becomes, and that as bytes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    config = EdgeCompileConfig(_check_ir_validity=False)
    with _any_rows(program), sparing(), _tracing_once(), _compiling_late():
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
        return edge, edge.to_executorch().buffer


@contextmanager
def _tracing_once() -> Iterator[None]:
    """Spare a pass that would trace a graph again as it was traced last.

    Most passes find nothing to edit and trace all the same, which takes half of the time of lowering.
    """
    from executorch.exir.pass_base import ExportPass

    traced, values, trace = dict[Graph, list[tuple[Any, ...]]](), list[Any](), ExportPass.call

    def call(self: Any, model: GraphModule) -> PassResult:
        if _only_traces(type(self), ExportPass) and traced.get(model.graph) == _written(model.graph):
            return PassResult(model, True)
        result: PassResult = trace(self, model)
        traced[result.graph_module.graph] = _written(result.graph_module.graph)
        values.extend(node.meta.get("val") for node in result.graph_module.graph.nodes)  # or their ids are given anew
        return result

    with patch.object(ExportPass, "call", call):
        yield


def _only_traces(kind: type, base: type) -> bool:
    """Tell whether a pass edits the graph by itself, and has nothing to say while that is traced."""
    own = {name for each in kind.__mro__[: kind.__mro__.index(base)] for name in vars(each) if not name.startswith("_")}
    return own.isdisjoint(set(dir(base)) - {"call", "requires", "ensures"})


def _written(graph: Graph) -> list[tuple[Any, ...]]:
    return [(node, node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in graph.nodes]


@contextmanager
def _compiling_late() -> Iterator[None]:
    """Compile the code of a graph when it is run: of some two hundred on the way to a program, hardly one is."""
    recompile = GraphModule.recompile

    def late(self: Any) -> None:
        codegen = self._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        self._code = "(not compiled)"  # which is printed alone
        type(self).forward = run  # of this module alone: each has a class of its own

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recompile(self)
        return self.forward(*args, **kwargs)

    with patch.object(GraphModule, "recompile", late):
        yield


class Method(Compiled):
    """A program, loaded; ``edge`` is what it was before it became bytes."""

    def __init__(self, program: ExportedProgram, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> None:
        import executorch.kernels.quantized  # noqa: F401  # registers the q/dq ops outside of delegates
        from executorch.extension.pybindings import _C as runtime
        from executorch.runtime import Runtime

        super().__init__(reference_model, example_inputs, self._run)
        runtime._unsafe_reset_threadpool(1)
        self.sources = _sources(program, self.modules)
        self.edge, written = _lower(program)
        self._program = Runtime.get().load_program(written)
        self._method = self._program.load_method("forward")

    def _run(self, inputs: Tensors) -> Any:
        if not all(value.numel() for value in inputs):
            raise ValueError("an empty tensor: the runtime ends the process, or gives any shape")
        return self._method.execute([value.contiguous() for value in inputs])


class ExecuTorchBackend(ExportingBackend):
    """ExecuTorch's runtime, with what its XNNPACK delegate takes in there, and the rest in portable kernels."""

    name = "executorch"
    packages = ("executorch", "torchao")
    table, patterns = TABLE, PATTERNS
    settings = f"XNNPACK delegate, one thread, memory for {ROWS} rows"
    waivers = Path(__file__).with_name("executorch.waivers.toml")

    def unavailable_reason(self) -> str | None:
        """Say how to install: plain pip brings some fifty packages more."""
        if not [each for each in self.packages if find_spec(each) is None]:
            return None
        return (
            "executorch not installed: pip install -c constraints.txt -e '.[executorch]', "
            "then pip install --no-deps -c constraints.txt executorch torchao"
        )

    def capabilities(self) -> Capabilities:
        """A bias becomes int32 of scale s_x·s_w; choose_qparams outside of the delegate has a smallest scale."""
        schemes = ("per_tensor_symmetric", "per_channel_symmetric")
        floor = float(torch.tensor(6.1e-5))
        return Capabilities(weight_schemes=schemes, int32_bias=True, dynamic_scale_floor=floor, limits=LIMITS_HERE)

    def warm_up(self) -> None:
        """Lower something: not the runtime, which has threads."""
        model, x = symbolic_trace(nn.Sequential(nn.Linear(2, 2))), torch.zeros(2, 2)
        _lower(exported(model, (x,)))

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Export, delegate and load."""
        _refuse_unsigned(reference_model)
        inputs = tuple(each.contiguous() if isinstance(each, Tensor) else each for each in example_inputs)
        program = _each_its_own(_with_numbers(exported(reference_model, inputs)))  # it takes the layout of its examples
        return Method(program, reference_model, example_inputs)

    def execution(self, lowered: Callable[..., Any]) -> Execution | None:
        """Read the types of tensors off the delegates' bytes."""
        return read_execution(lowered) if isinstance(lowered, Method) else None


def _sources(program: ExportedProgram, modules: Mapping[str, str]) -> dict[str, str]:
    """Name the nodes of the reference model between dequantize and quantize, by the exported nodes."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    behind, ahead = set[Node](), set[Node]()  # what comes from integers, and what becomes integers
    for node in nodes:
        if _is(node, "dequantize") or (not _is(node, "quantize") and behind.intersection(node.all_input_nodes)):
            behind.add(node)
    for node in reversed(nodes):
        if _is(node, "quantize") or (not _is(node, "dequantize") and ahead.intersection(node.users)):
            ahead.add(node)
    dynamic = {user for node in nodes if node.target == OPS.dequantize_per_tensor.tensor for user in node.users}
    inner = [node for node in nodes if node in (behind & ahead) | dynamic and not _is(node, "dequantize", "quantize")]
    return {node.name: owner_of(node, modules) for node in inner}


def _is(node: Node, *ops: str) -> bool:
    return str(node.target).removeprefix("quantized_decomposed.").startswith(ops)


def read_execution(lowered: Method) -> Execution:
    """Tell ops on integers from those on floats, inside of delegates and outside, by the reference model's nodes."""
    model, found = lowered.edge.exported_program().graph_module, dict[str, list[tuple[str, bool]]]()
    left = set(lowered.sources.values())
    for node in model.graph.nodes:
        owner = lowered.sources.get(_origin(node))
        if owner and node.op == "call_function" and node.target.__name__.startswith("alias_copy"):
            left.discard(owner)
        elif owner and node.op == "call_function" and node.target is not operator.getitem:
            found.setdefault(owner, []).append((f"{node.target.__name__} outside of the delegate", False))
    for delegate in model.children():
        owners = {node.meta.get("debug_handle"): _origin(node) for node in delegate.original_module.graph.nodes}
        for handle, kind, datatype in _layers(delegate.processed_bytes):
            is_quantized = datatype != _FLOAT
            owner = lowered.sources.get(owners.get(handle, ""))
            if owner or (is_quantized and handle in owners):
                found.setdefault(owner or owners[handle], []).append((f"{kind} {datatype}", is_quantized))
    lines = {
        f"{owner} ({', '.join(part for part, _ in parts)})": all(is_quantized for _, is_quantized in parts)
        for owner, parts in found.items()
    }
    quantized = tuple(line for line, is_quantized in lines.items() if is_quantized)
    floating = tuple(line for line, is_quantized in lines.items() if not is_quantized)
    return Execution(quantized_ops=quantized if left else (NOTHING_LEFT,), float_fallbacks=floating)


_FLOAT = "fp32"


def _origin(node: Node) -> str:
    """The name of the exported node that a node was made of."""
    made_of, name = node.meta.get("from_node"), node.name
    while made_of:
        name, made_of = made_of[-1].name, made_of[-1].from_node
    return name


def _layers(delegate: bytes) -> Iterator[tuple[int, str, str]]:
    """What XNNPACK is given: of each node but conversions the handle, its kind, and the type that it computes on."""
    graph = _decoded(delegate)
    tensors = [value["xvalue_union"] for value in graph["xvalues"]]
    types = {each["id_out"]: each["datatype"] for each in (value.get("tensor_value", value) for value in tensors)}
    for node in graph["xnodes"]:
        kind, ends = node["xnode_union_type"].removeprefix("XNN"), node["xnode_union"]
        first = types[ends.get("input_id", ends.get("input1_id"))]
        datatype = first if first == _DYNAMIC else types[ends["output_id"]]
        if kind != "Convert":
            yield node["debug_handle"], kind, datatype.removeprefix("xnn_datatype_")


_DYNAMIC = "xnn_datatype_qdint8"


def _decoded(delegate: bytes) -> Any:
    """A delegate's graph as JSON, by the compiler of flatbuffers that is in the package."""
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize as xnnpack
    from executorch.exir._serialize._flatbuffer import _flatc_decompile

    header = xnnpack.XNNHeader.from_bytes(delegate[: xnnpack.XNNHeader.EXPECTED_LENGTH])
    with TemporaryDirectory() as folder:
        schema, path = Path(folder) / "schema.fbs", Path(folder) / "graph.bin"
        schema.write_bytes(xnnpack._get_schema_bytes())
        path.write_bytes(delegate[header.flatbuffer_offset :][: header.flatbuffer_size])
        _flatc_decompile(folder, str(schema), str(path), ["--raw-binary"])
        return json.loads(re.sub(r": (-?)inf\b", r": \1Infinity", path.with_suffix(".json").read_text()))
