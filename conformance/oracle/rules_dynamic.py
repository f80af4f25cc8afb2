"""Rows of the oracle for dynamic quantization, half precision, and weights that alone are quantized (CVT-03, -04, -11).

``NODES`` are what the oracle's walk asks first, by a node's target, ``MODULES`` by a module's class: they return the
value of the node, with its bounds. Embeddings: values are looked up in the dequantized weight and, in bags, summed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from backends.base import Capabilities
from conformance.oracle.dynamic import EPS, dynamic_quantize, halve, linear_products, real_of
from conformance.oracle.error_bounds import DOT_PRODUCT, FUNCTION, MOVES, Errors, OpCall, OpRule, Value, gamma, moves
from conformance.oracle.grids import NoOracleError
from conformance.oracle.recurrent import KINDS, recurrent
from refimpl.decomposed import OPS
from refimpl.observers import dtype_range


class Walker(Protocol):
    """What the handlers need of the oracle's walk.

    With ``counts_weights`` it compares with the float model: then all that quantization itself changes is an error, of
    cause ``weights``, and states stay as they are.
    """

    capabilities: Capabilities
    counts_weights: bool
    dynamic_range: tuple[int, int] | None
    values: dict[Node, Any]


def float_bags(call: OpCall) -> Errors:
    """A float module sums at most n rows in float32, n indices in all: γₙ₊₂·n·max|w|. Rows themselves are exact."""
    n = max(1, call.args[0].numel())
    largest = call.function.weight.detach().abs().max()  # type: ignore[attr-defined]
    return {"accumulation": (gamma(n + 2) * n * largest).expand_as(call.result)}


OP_RULES: dict[Any, OpRule] = {
    nn.EmbeddingBag: OpRule(verifier=FUNCTION, bound=float_bags, source="torch.nn.EmbeddingBag, left in float"),
    nn.Embedding: OpRule(verifier=FUNCTION, bound=float_bags, source="torch.nn.Embedding, left in float"),
    F.linear: OpRule(verifier=DOT_PRODUCT, bound=linear_products, source="torch.nn.functional.linear; NUM-03, CVT-03"),
    F.embedding: OpRule(verifier=MOVES, bound=moves, source="torch.nn.functional.embedding; CVT-11"),
}

# -- nodes: quantizing at run time -------------------------------------------------------------------------------------

NodeHandler: TypeAlias = Callable[[Walker, Node], Any]


def _quantize_dynamic(walk: Walker, node: Node) -> Value:
    """``quantize_per_tensor_dynamic(x, dtype, reduce_range)``: to the walk's range, else to the node's. (CVT-03)"""
    value, dtype, *rest = node.args
    assert isinstance(value, Node) and isinstance(dtype, torch.dtype)
    x = walk.values[value]
    if dtype is torch.float16:
        return _counted(walk, x, halve(x))
    low, high = dtype_range(dtype)
    if any(rest):  # reduce_range: one bit less
        low, high = int(low / 2), high // 2
    return _quantized(walk, x, low, high, EPS)


def _quantized(walk: Walker, x: Value, low: int, high: int, eps: float) -> Value:
    floor = walk.capabilities.dynamic_scale_floor
    return _counted(walk, x, dynamic_quantize(x, *(walk.dynamic_range or (low, high)), max(eps, floor)))


def _counted(walk: Walker, x: Value | Tensor, quantized: Value) -> Value:
    """The quantized value; where the walk compares with the float model, what that changed is an error."""
    if not walk.counts_weights:
        return quantized
    return replace(quantized, errors={**quantized.errors, "weights": (quantized.real - real_of(x)).abs()})


def _choose_qparams(walk: Walker, node: Node) -> tuple[None, None]:
    """What quantizes by the chosen qparams derives them itself."""
    return (None, None)


def _quantize_chosen(walk: Walker, node: Node) -> Value:
    """``quantize_per_tensor.tensor(x, scale, zero_point, low, high, dtype)`` with qparams that were chosen. (CVT-03)

    Their smallest scale is an argument of ``choose_qparams(x, low, high, eps, dtype)``.
    """
    value, scale, _, low, high, _ = cast(tuple[Node, Node, Node, int, int, Any], node.args)
    eps = float(scale.all_input_nodes[0].args[3])  # type: ignore[arg-type]
    return _quantized(walk, walk.values[value], low, high, eps)


def _cast(walk: Walker, node: Node) -> Any:
    """A cast to half precision and back. (CVT-04)"""
    value, dtype = node.args
    assert isinstance(value, Node)
    if dtype is torch.float16:
        return _counted(walk, walk.values[value], halve(walk.values[value]))
    if dtype is torch.float32:
        return walk.values[value]
    raise NoOracleError(f"no row in the oracle's table for a cast to {dtype}")


def _get_item(walk: Walker, node: Node) -> Any:
    """Pick one of several results."""
    value, index = cast(tuple[Node, Any], node.args)
    if not isinstance(walk.values[value], (tuple, list)):
        raise NoOracleError(f"no row in the oracle's table for {node}: it picks from a tensor")
    return walk.values[value][index]


NODES: Mapping[Any, NodeHandler] = {
    torch.quantize_per_tensor_dynamic: _quantize_dynamic,
    OPS.choose_qparams.tensor: _choose_qparams,
    OPS.quantize_per_tensor.tensor: _quantize_chosen,
    OPS.convert_element_type.no_fuse: _cast,
    "to": _cast,
    operator.getitem: _get_item,
}

# -- modules: embeddings, recurrent modules ----------------------------------------------------------------------------

ModuleHandler: TypeAlias = Callable[[Walker, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def rows_of(module: Any, walk: Walker) -> Value:
    """Return the dequantized weight of an embedding, a scale for each row. (CVT-11)

    A row holds s·(q − z). In float32 it is computed so, or as s·q + b with b = −s·z: at most three roundings of s·|q| +
    s·|z|. With ``half_row_qparams`` 4-bit rows may hold s and b rounded to half precision: what that changes, exactly
    |q·(half(s) − s) + (half(b) − b)|, is their error.
    """
    weight = module.get_quantized_weight()
    scale, zero = (each.double().reshape(-1, 1) for each in (module.weight_scale, module.weight_zero_point))
    if weight.dtype is torch.quint4x2:  # two to a byte: its integers are read off its values
        q = (weight.dequantize().double() / scale + zero).round()
    else:
        q = (weight.int_repr() if weight.is_quantized else weight).double()
    errors = {"function": gamma(3) * scale * (q.abs() + zero.abs())}
    if walk.counts_weights:
        errors["weights"] = (scale / 2).expand_as(q)
    if weight.dtype is torch.quint4x2 and walk.capabilities.half_row_qparams:
        bias = -scale * zero
        errors["half qparams"] = (q * (scale.half().double() - scale) + (bias.half().double() - bias)).abs()
    return Value(real=scale * (q - zero), errors=errors, step=scale)


def _embedding(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Rows of the table. Padding and gradients do not matter; renormalized rows would have other values."""
    if module.max_norm is not None:
        raise NoOracleError("no oracle for rows renormalized while they are looked up (max_norm)")
    table = rows_of(module, walk)
    (indices,) = (*args, *kwargs.values())

    def look_up(values: Tensor) -> Tensor:
        return F.embedding(indices, values.expand_as(table.real))

    assert table.step is not None
    errors = {cause: look_up(error) for cause, error in table.errors.items()}
    return Value(real=look_up(table.real), errors=errors, step=look_up(table.step))


def _embedding_bag(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Sums, means or maxima of rows: Σ|p|·e + |v|·e_p, or the largest error of a bag.

    n summands and their weights in float32: γₙ₊₂·Σ|p|·|v|. Distances are measured in the smallest step of all rows.
    """
    if module.max_norm is not None:
        raise NoOracleError("no oracle for rows renormalized while they are looked up (max_norm)")
    names = ("input", "offsets", "per_sample_weights")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    indices, weights = given["input"], given.get("per_sample_weights")
    table = rows_of(module, walk)

    def bags(rows: Tensor, by: Tensor | None) -> Tensor:
        return F.embedding_bag(
            indices, rows.expand_as(table.real), given.get("offsets"), mode=module.mode, per_sample_weights=by,
            include_last_offset=module.include_last_offset, padding_idx=module.padding_idx,
        )  # fmt: skip

    p = None if weights is None else real_of(weights)
    absolute = None if p is None else p.abs()
    errors = {cause: bags(error, absolute) for cause, error in table.errors.items()}
    if isinstance(weights, Value) and weights.errors:
        errors["upstream"] = bags(table.real.abs(), weights.error())
    if module.mode != "max":
        errors["accumulation"] = gamma(indices.numel() + 2) * bags(table.real.abs(), absolute)
    assert table.step is not None
    return Value(real=bags(table.real, p), errors=errors, step=table.step.min())


def _recurrent(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    given = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
    is_dynamic = walk.capabilities.dynamic_states and not walk.counts_weights
    return recurrent(
        module, given["input"], given.get("hx"), walk.capabilities,
        has_dynamic_states=is_dynamic, counts_weights=walk.counts_weights,
    )  # fmt: skip


MODULES: Mapping[type[nn.Module], ModuleHandler] = {
    nnqr.Embedding: _embedding,
    nnqr.EmbeddingBag: _embedding_bag,
    **dict.fromkeys(KINDS, _recurrent),
}
