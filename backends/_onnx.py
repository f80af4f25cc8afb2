"""A reference model as ONNX bytes: QuantizeLinear and DequantizeLinear around float ops (QDQ).

torch's exporter translates all but some ops of ``quantized_decomposed``, which are here. (CVT-07, CVT-09)
"""

from __future__ import annotations

import functools
import logging
import warnings
from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import onnx
import torch
from onnxscript import opset18 as op
from onnxscript.function_libs.torch_lib.ops.common import constant
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node, symbolic_trace
from torch.onnx._internal.exporter import _decomp, _fx_passes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from backends._export import decomposed, exported, owner
from refimpl.decomposed import OPS

_WHOLE = {onnx.TensorProto.UINT8: (0, 255), onnx.TensorProto.INT8: (-128, 127)}


def onnx_bytes(reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> bytes:
    """Export a decomposed reference model to ONNX. Raises what torch's exporters raise."""
    program = exported(reference_model, example_inputs)
    _join_dynamic(program.graph_module)
    with (
        _quiet(),
        patch.object(ONNXRegistry, "from_torchlib", staticmethod(_translations)),
        patch.object(_fx_passes, "decompose_with_registry", _decomposed),
    ):
        found = torch.onnx.export(program, dynamo=True, verbose=False)
    assert found is not None
    model: bytes = found.model_proto.SerializeToString()
    return model


def warm_up() -> None:
    """Export something: the first time in a process takes some two seconds, most of it imports."""
    onnx_bytes(symbolic_trace(nn.Identity()), (torch.zeros(2, 2),))


class _quiet(warnings.catch_warnings):
    """Without what the exporter logs of other packages."""

    def __enter__(self) -> Any:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        super().__enter__()
        warnings.simplefilter("ignore")


@functools.cache
def _translations(opset_version: int = 18) -> ONNXRegistry:
    """The exporter's table with ours in it: made once, for to make it takes as long as a small export."""
    registry = _MAKE(opset_version)
    for target, function in TABLE.items():
        registry.register_op(target, function)
    return registry


def _decomposed(program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
    return decomposed(program, _without_translation(registry))


@functools.cache
def _without_translation(registry: ONNXRegistry) -> dict[Any, Any]:
    """What is made of ops that have no translation."""
    return _decomp.create_onnx_friendly_decomposition_table(set(_decomp.get_onnx_implemented_overloads(registry)))


_MAKE: Callable[[int], ONNXRegistry] = ONNXRegistry.from_torchlib


def sources(model: bytes, modules: Mapping[str, str]) -> dict[str, str]:
    """Name the nodes of the reference model between dequantize and quantize, by nodes here and what these make.

    ``modules``: of each module by its path, the node that calls it.
    """
    nodes = onnx.load_from_string(model).graph.node
    behind, ahead = set[str](), set[str]()  # of floats that come from integers, and that become integers
    for node in nodes:
        if node.op_type == "DequantizeLinear" or (node.op_type != "QuantizeLinear" and behind.intersection(node.input)):
            behind.update(node.output)
    for node in reversed(nodes):
        if node.op_type == "QuantizeLinear" or (node.op_type != "DequantizeLinear" and ahead.intersection(node.output)):
            ahead.update(node.input)
    found = dict[str, str]()
    for node in nodes:
        if node.op_type not in _EDGES and behind.intersection(node.output) and ahead.intersection(node.output):
            found.update(dict.fromkeys((node.name, *node.output), _source(node, modules)))
    return found


_EDGES = ("QuantizeLinear", "DequantizeLinear")


def _source(node: onnx.NodeProto, modules: Mapping[str, str]) -> str:
    scopes = next((each.value for each in node.metadata_props if each.key == "pkg.torch.onnx.name_scopes"), "['']")
    *paths, name = literal_eval(scopes)
    return owner(paths, modules, str(name))


# -- dynamic quantization ---------------------------------------------------------------------------------------------

torch.library.define(
    "fx_quant_onnx::dynamic_linear",
    "(Tensor x, Tensor scale, Tensor zero, Tensor weight, Tensor? scales, float step, Tensor? bias=None) -> Tensor",
)
DYNAMIC_LINEAR = torch.ops.fx_quant_onnx.dynamic_linear.default
"""A linear layer of integers with qparams that were chosen while running; it is there to be translated."""


def _shape(x: Tensor, scale: Tensor, zero_point: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


torch.library.register_fake("fx_quant_onnx::dynamic_linear", _shape)


def _join_dynamic(model: GraphModule) -> None:
    """Put an op on integers in the place of a linear layer between dynamic quantization and a symmetric weight.

    A runtime does not find it by itself: DequantizeLinear is in its way. (CVT-03)
    """
    for node in model.graph.nodes:
        if node.target != torch.ops.aten.linear.default:
            continue
        x, weight, *bias = node.args
        if x.target != OPS.dequantize_per_tensor.tensor or weight.target not in _WEIGHTS:
            continue
        node.target = DYNAMIC_LINEAR  # in its place: the program knows its output by name
        integers, scale, *_ = weight.args
        scales, step = (scale, 1.0) if isinstance(scale, Node) else (None, scale)
        node.args = (*x.args[:3], integers, scales, step, *bias)
    model.graph.eliminate_dead_code()


_WEIGHTS = (
    OPS.dequantize_per_tensor.tensor,
    OPS.dequantize_per_tensor.default,
    OPS.dequantize_per_channel.default,
)


# -- translations -----------------------------------------------------------------------------------------------------


def _quantize_per_tensor(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
    whole = op.QuantizeLinear(input, _scale(scale), _zero_point(zero_point, dtype))
    return _clipped(whole, quant_min, quant_max, dtype)


def _dequantize_per_tensor(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
    return op.DequantizeLinear(input, _scale(scale), _zero_point(zero_point, dtype))


def _scale(scale: Any) -> Any:
    return (
        constant(scale, dtype=onnx.TensorProto.FLOAT)
        if isinstance(scale, float)
        else op.Cast(scale, to=onnx.TensorProto.FLOAT)
    )


def _zero_point(zero_point: Any, dtype: int) -> Any:
    return constant(zero_point, dtype=dtype) if isinstance(zero_point, int) else op.Cast(zero_point, to=dtype)


def _clipped(whole: Any, low: int, high: int, dtype: int) -> Any:
    """QuantizeLinear saturates at the ends of the dtype: narrower ones are to be said. (CVT-09)"""
    if (low, high) == _WHOLE[dtype]:
        return whole
    return op.Clip(whole, constant(low, dtype=dtype), constant(high, dtype=dtype))


def _choose_qparams(input: Any, quant_min: int, quant_max: int, eps: float, dtype: int) -> Any:
    """The operator has no smallest scale, which is put right, nor other ends, for which ValueError is raised."""
    if (quant_min, quant_max) != (0, 255):
        raise ValueError(f"DynamicQuantizeLinear quantizes to 0..255, not to {quant_min}..{quant_max}")
    _, chosen, at_zero = op.DynamicQuantizeLinear(input)
    zero, high, least = (constant(each, dtype=onnx.TensorProto.FLOAT) for each in (0.0, 255.0, eps))
    scale = op.Max(chosen, least)
    steps = op.Clip(op.Round(op.Div(op.Neg(op.Min(op.ReduceMin(input, keepdims=0), zero)), scale)), zero, high)
    zero_point = op.Where(op.Less(chosen, least), steps, op.Cast(at_zero, to=onnx.TensorProto.FLOAT))
    return op.Cast(scale, to=onnx.TensorProto.DOUBLE), op.Cast(zero_point, to=onnx.TensorProto.INT64)  # torch's dtypes


def _dynamic_linear(
    x: Any, scale: Any, zero_point: Any, weight: Any, scales: Any, step: float, bias: Any = None
) -> Any:
    total = op.MatMulInteger(x, op.Transpose(weight, perm=[1, 0]), op.Cast(zero_point, to=onnx.TensorProto.UINT8))
    of_both = op.Mul(_scale(scale), _scale(step) if scales is None else scales)
    real = op.Mul(op.Cast(total, to=onnx.TensorProto.FLOAT), of_both)
    return real if bias is None else op.Add(real, bias)


TABLE: dict[Any, Callable[..., Any]] = {
    OPS.quantize_per_tensor.default: _quantize_per_tensor,
    OPS.quantize_per_tensor.tensor: _quantize_per_tensor,
    OPS.dequantize_per_tensor.default: _dequantize_per_tensor,
    OPS.dequantize_per_tensor.tensor: _dequantize_per_tensor,
    OPS.choose_qparams.tensor: _choose_qparams,
    DYNAMIC_LINEAR: _dynamic_linear,
}
