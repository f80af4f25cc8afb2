"""An exported program as ONNX bytes: QuantizeLinear and DequantizeLinear around float ops (QDQ).

torch's exporter translates all but some ops of ``quantized_decomposed``; those are translated here. (CVT-07, CVT-09)
"""

from __future__ import annotations

import functools
import logging
import warnings
from ast import literal_eval
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import onnx
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.common import constant
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, symbolic_trace
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable

from fx_quant_conformance.backends.exporting import decompose, owner
from fx_quant_conformance.refimpl import export_reference
from fx_quant_conformance.refimpl.observers.decomposed import OPS

_FLOAT = onnx.TensorProto.FLOAT
_WHOLE = {onnx.TensorProto.UINT8: (0, 255), onnx.TensorProto.INT8: (-128, 127)}
_QDQ = ("QuantizeLinear", "DequantizeLinear")
_WEIGHTS = (
    OPS.dequantize_per_tensor.tensor,
    OPS.dequantize_per_tensor.default,
    OPS.dequantize_per_channel.default,
)
_MAKE: Callable[[int], ONNXRegistry] = ONNXRegistry.from_torchlib
_PROMOTE: Callable[[GraphModule], None] = _fx_passes.insert_type_promotion_nodes


def onnx_bytes(program: ExportedProgram) -> bytes:
    """Export a program to ONNX; the program is changed. Raises what torch's exporter raises."""
    _join_dynamic(program.graph_module)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it logs warnings about other packages
    with (
        warnings.catch_warnings(),
        patch.object(ONNXRegistry, "from_torchlib", staticmethod(_make_registry)),
        patch.object(_fx_passes, "decompose_with_registry", _decompose),
        patch.object(_fx_passes, "insert_type_promotion_nodes", _promote),
    ):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
    assert exported is not None
    model: bytes = exported.model_proto.SerializeToString()
    return model


def _decompose(program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
    return decompose(program, _decompositions(registry))


def _promote(model: GraphModule) -> None:
    """Insert casts as torch does, where an op may need one: torch runs the whole program to find that none does."""
    parts = (part for part in model.modules() if isinstance(part, GraphModule))
    if any(_may_cast(node) for part in parts for node in part.graph.nodes):
        _PROMOTE(model)


def _may_cast(node: Node) -> bool:
    """Tell whether torch has a rule for the dtypes of an op's operands, and they are not all float32."""
    if not isinstance(node.target, OpOverload) or _promotions().get_rule(node.target.overloadpacket) is None:
        return False
    return any(getattr(operand.meta.get("val"), "dtype", None) != torch.float32 for operand in node.all_input_nodes)


@functools.cache
def _promotions() -> TypePromotionTable:
    return TypePromotionTable()


def warm_up() -> None:
    """Export a model: the first export in a process takes about two seconds, mostly for imports."""
    onnx_bytes(export_reference(symbolic_trace(nn.Identity()), (torch.zeros(2, 2),)))


@functools.cache
def _make_registry(opset_version: int = 18) -> ONNXRegistry:
    """Return the exporter's table with ours in it; cached, because making it takes as long as a small export."""
    registry = _MAKE(opset_version)
    for target, function in TABLE.items():
        registry.register_op(target, function)
    return registry


@functools.cache
def _decompositions(registry: ONNXRegistry) -> dict[Any, Any]:
    """Return the decompositions of ops that have no translation."""
    return _decomp.create_onnx_friendly_decomposition_table(set(_decomp.get_onnx_implemented_overloads(registry)))


def sources(model: bytes) -> dict[str, str]:
    """Map ONNX nodes and their outputs to the reference model's nodes between dequantize and quantize."""
    nodes = onnx.load_from_string(model).graph.node
    after, before = set[str](), set[str]()  # names of floats that come from integers, and that become integers
    for node in nodes:
        if node.op_type == "DequantizeLinear" or (node.op_type != "QuantizeLinear" and after.intersection(node.input)):
            after.update(node.output)
    for node in reversed(nodes):
        if node.op_type == "QuantizeLinear" or (
            node.op_type != "DequantizeLinear" and before.intersection(node.output)
        ):
            before.update(node.input)
    names = dict[str, str]()
    for node in nodes:
        if node.op_type not in _QDQ and after.intersection(node.output) and before.intersection(node.output):
            names.update(dict.fromkeys((node.name, *node.output), _source(node)))
    return names


def results(model: bytes) -> dict[str, str]:
    """Map ONNX nodes that quantize a result to the reference model's node that gives it."""
    nodes, names = onnx.load_from_string(model).graph.node, sources(model)
    quantizes = [node for node in nodes if node.op_type == "QuantizeLinear"]
    return {node.name: names[node.input[0]] for node in quantizes if node.input[0] in names}


def origins(model: bytes) -> dict[str, str]:
    """Map all ONNX nodes and their outputs to the nodes that they come from."""
    nodes = onnx.load_from_string(model).graph.node
    return {name: _source(node) for node in nodes for name in (node.name, *node.output)}


def _source(node: onnx.NodeProto) -> str:
    scopes = next((prop.value for prop in node.metadata_props if prop.key == "pkg.torch.onnx.name_scopes"), "['']")
    *paths, name = literal_eval(scopes)
    return owner(paths, str(name))


# -- dynamic quantization ---------------------------------------------------------------------------------------------

torch.library.define(
    "fx_quant_onnx::dynamic_linear",
    "(Tensor x, Tensor scale, Tensor zero, Tensor weight, Tensor? scales, float step, Tensor? bias=None) -> Tensor",
)
DYNAMIC_LINEAR = torch.ops.fx_quant_onnx.dynamic_linear.default
"""A linear layer on integers with qparams chosen at run time; it exists only to be translated."""


torch.library.register_fake(
    "fx_quant_onnx::dynamic_linear",
    lambda x, _scale, _zero_point, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32),
)


def _join_dynamic(model: GraphModule) -> None:
    """Replace a linear layer between dynamic quantization and a symmetric weight by an op on integers.

    A runtime does not find it: DequantizeLinear is in the way. (CVT-03)
    """
    for node in model.graph.nodes:
        if node.target != torch.ops.aten.linear.default:
            continue
        x, weight, *bias = node.args
        if x.target != OPS.dequantize_per_tensor.tensor or weight.target not in _WEIGHTS:
            continue
        node.target = DYNAMIC_LINEAR  # in place: the program knows its output by name
        integers, scale, *_ = weight.args
        scales, step = (scale, 1.0) if isinstance(scale, Node) else (None, scale)
        node.args = (*x.args[:3], integers, scales, step, *bias)
    model.graph.eliminate_dead_code()


# -- translations -----------------------------------------------------------------------------------------------------


def _quantize_per_tensor(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
    integers = op.QuantizeLinear(input, _scale(scale), _zero_point(zero_point, dtype))
    if (quant_min, quant_max) == _WHOLE[dtype]:
        return integers
    # QuantizeLinear saturates at the ends of the dtype; narrower ones need a Clip. (CVT-09)
    return op.Clip(integers, constant(quant_min, dtype=dtype), constant(quant_max, dtype=dtype))


def _dequantize_per_tensor(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
    return op.DequantizeLinear(input, _scale(scale), _zero_point(zero_point, dtype))


def _scale(scale: Any) -> Any:
    return constant(scale, dtype=_FLOAT) if isinstance(scale, float) else op.Cast(scale, to=_FLOAT)


def _zero_point(zero_point: Any, dtype: int) -> Any:
    return constant(zero_point, dtype=dtype) if isinstance(zero_point, int) else op.Cast(zero_point, to=dtype)


def _choose_qparams(input: Any, quant_min: int, quant_max: int, eps: float, dtype: int) -> Any:
    """Add the smallest scale that the operator lacks. Raises ValueError for other ends than its 0 and 255."""
    if (quant_min, quant_max) != (0, 255):
        raise ValueError(f"DynamicQuantizeLinear quantizes to 0..255, not to {quant_min}..{quant_max}")
    _, chosen, at_zero = op.DynamicQuantizeLinear(input)
    zero, high, least = (constant(value, dtype=_FLOAT) for value in (0.0, 255.0, eps))
    scale = op.Max(chosen, least)
    steps = op.Clip(op.Round(op.Div(op.Neg(op.Min(op.ReduceMin(input, keepdims=0), zero)), scale)), zero, high)
    zero_point = op.Where(op.Less(chosen, least), steps, op.Cast(at_zero, to=_FLOAT))
    return op.Cast(scale, to=onnx.TensorProto.DOUBLE), op.Cast(zero_point, to=onnx.TensorProto.INT64)  # torch's dtypes


def _dynamic_linear(
    x: Any, scale: Any, zero_point: Any, weight: Any, scales: Any, step: float, bias: Any = None
) -> Any:
    total = op.MatMulInteger(x, op.Transpose(weight, perm=[1, 0]), op.Cast(zero_point, to=onnx.TensorProto.UINT8))
    steps = op.Mul(_scale(scale), _scale(step) if scales is None else scales)
    real = op.Mul(op.Cast(total, to=_FLOAT), steps)
    return real if bias is None else op.Add(real, bias)


TABLE: dict[Any, Callable[..., Any]] = {
    OPS.quantize_per_tensor.default: _quantize_per_tensor,
    OPS.quantize_per_tensor.tensor: _quantize_per_tensor,
    OPS.dequantize_per_tensor.default: _dequantize_per_tensor,
    OPS.dequantize_per_tensor.tensor: _dequantize_per_tensor,
    OPS.choose_qparams.tensor: _choose_qparams,
    DYNAMIC_LINEAR: _dynamic_linear,
}
