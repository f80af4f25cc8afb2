"""What the oracle makes of dynamic quantization, of half precision and of quantized weights (CVT-03, -04, -11).

The oracle's walk asks ``NODES`` first, by a node's target, and ``MODULES`` by a module's class: they return the value
of the node, with its bounds. Embeddings: values are looked up in the dequantized weight and, in bags, summed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.dynamic import dequantize, dynamic_quantize, halve
from fx_quant_conformance.conformance.bounds.error_bounds import (
    JUMP,
    NoOracleError,
    Value,
    add_error,
    as_value,
    gamma,
)
from fx_quant_conformance.conformance.oracle.marks import real_of, undecided_of
from fx_quant_conformance.conformance.oracle.recurrent import KINDS, run_recurrent
from fx_quant_conformance.refimpl.legacy import nnqr, quint4x2
from fx_quant_conformance.refimpl.legacy.weights import read_integers
from fx_quant_conformance.refimpl.observers.decomposed import OPS


class Walker(Protocol):
    """What the handlers need of the oracle's walk."""

    capabilities: Capabilities
    counts_weights: bool
    """Whether it compares with the float model: every change by quantization is then an error, of cause ``weights``,
    and states stay as they are."""
    values: dict[Node, Any]


# -- nodes: quantizing at run time -------------------------------------------------------------------------------------

NodeHandler: TypeAlias = Callable[[Walker, Node], Any]


def _count_change(walk: Walker, x: Value | Tensor, quantized: Value) -> Value:
    """The quantized value; where the walk compares with the float model, its change is an error."""
    if not walk.counts_weights:
        return quantized
    return replace(quantized, errors={**quantized.errors, "weights": (quantized.real - as_value(x).real).abs()})


def _quantize_chosen(walk: Walker, node: Node) -> Value:
    """``quantize_per_tensor.tensor(x, scale, zero_point, low, high, dtype)`` with qparams that were chosen. (CVT-03)

    Their smallest scale is an argument of ``choose_qparams(x, low, high, eps, dtype)``.
    """
    value, scale, _, low, high, _ = cast(tuple[Node, Node, Node, int, int, Any], node.args)
    eps = max(float(scale.all_input_nodes[0].args[3]), walk.capabilities.dynamic_scale_floor)  # type: ignore[arg-type]
    return _count_change(walk, walk.values[value], dynamic_quantize(walk.values[value], low, high, eps))


def _cast(walk: Walker, node: Node) -> Any:
    """A cast to half precision and back. (CVT-04)"""
    value, dtype = node.args
    assert isinstance(value, Node)
    if dtype is torch.float16:
        return _count_change(walk, walk.values[value], halve(walk.values[value]))
    if dtype is torch.float32:
        return walk.values[value]
    raise NoOracleError(f"no rule in the oracle's table for a cast to {dtype}")


def _get_item(walk: Walker, node: Node) -> Any:
    """Pick one of several results."""
    value, index = cast(tuple[Any, Any], node.args)
    picked: Any = torch.fx.node.map_arg(value, walk.values.__getitem__)  # of one node, or of a list of them
    if not isinstance(picked, (tuple, list)):
        raise NoOracleError(f"no rule in the oracle's table for {node}: it picks from {type(picked).__name__}")
    return picked[index]


NODES: Mapping[Any, NodeHandler] = {
    OPS.choose_qparams.tensor: lambda walk, node: (None, None),  # quantize_per_tensor derives them itself
    OPS.quantize_per_tensor.tensor: _quantize_chosen,
    OPS.convert_element_type.no_fuse: _cast,
    operator.getitem: _get_item,
}

# -- modules: embeddings, recurrent modules ----------------------------------------------------------------------------

ModuleHandler: TypeAlias = Callable[[Walker, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def _read_table(module: Any, walk: Walker) -> Value:
    """The dequantized weight of an embedding, a scale for each row. (CVT-11)

    A row holds s·(q − z). In float32 it is computed so, or as s·q + b with b = −s·z: at most three roundings of s·|q| +
    s·|z|. With ``half_row_qparams`` 4-bit rows may hold s and b rounded to half precision: the change, exactly
    |q·(half(s) − s) + (half(b) − b)|, is their error. Raises NoOracleError for renormalized rows: they have other
    values.
    """
    if module.max_norm is not None:
        raise NoOracleError("no oracle for rows renormalized while they are looked up (max_norm)")
    q = read_integers(module).double()
    scale, zero = (each.double().reshape(-1, 1) for each in (module.weight_scale, module.weight_zero_point))
    table = dequantize(q, scale, zero, counts_weights=walk.counts_weights)
    errors = {"function": gamma(3) * scale * (q.abs() + zero.abs()), **table.errors}
    if module.weight_dtype is quint4x2 and walk.capabilities.half_row_qparams:
        bias = -scale * zero
        errors["half qparams"] = (q * (scale.half().double() - scale) + (bias.half().double() - bias)).abs()
    return replace(table, errors=errors)


def _look_up(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Rows of the table; of an undecided index any of them. Padding and gradients do not matter."""
    table = _read_table(module, walk)
    (indices,) = (*args, *kwargs.values())
    places = real_of(indices)

    def look_up(values: Tensor) -> Tensor:
        return F.embedding(places, values.expand_as(table.real))

    assert table.step is not None
    real = look_up(table.real)
    errors = {cause: look_up(error) for cause, error in table.errors.items()}
    undecided = undecided_of(indices).unsqueeze(-1)
    if bool(undecided.any()):
        spread = table.real.amax(0) - table.real.amin(0) + table.error().amax(0)
        errors = add_error(errors, JUMP, torch.where(undecided, spread, 0.0))
    return Value(real=real, errors=errors, step=look_up(table.step))


def _sum_bags(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Sums, means or maxima of rows: Σ|p|·e + |v|·e_p, or the largest error of a bag.

    n summands and their weights in float32: γₙ₊₂·Σ|p|·|v|. Distances are measured in the smallest step of all rows.
    """
    inputs = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | dict(kwargs)
    indices, weights = inputs["input"], inputs.get("per_sample_weights")
    table = _read_table(module, walk)

    def reduce(rows: Tensor, by: Tensor | None) -> Tensor:
        return F.embedding_bag(
            indices,
            rows.expand_as(table.real),
            inputs.get("offsets"),
            mode=module.mode,
            per_sample_weights=by,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )

    p = None if weights is None else as_value(weights).real
    absolute = None if p is None else p.abs()
    errors = {cause: reduce(error, absolute) for cause, error in table.errors.items()}
    if isinstance(weights, Value) and weights.errors:
        errors["upstream"] = reduce(table.real.abs(), weights.error())
    if module.mode != "max":
        errors["accumulation"] = gamma(indices.numel() + 2) * reduce(table.real.abs(), absolute)
    assert table.step is not None
    return Value(real=reduce(table.real, p), errors=errors, step=table.step.min())


def _run_recurrent(walk: Walker, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    inputs = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
    is_dynamic = walk.capabilities.dynamic_states and not walk.counts_weights
    return run_recurrent(
        module,
        inputs["input"],
        inputs.get("hx"),
        walk.capabilities,
        has_dynamic_states=is_dynamic,
        counts_weights=walk.counts_weights,
    )


MODULES: Mapping[type[nn.Module], ModuleHandler] = {
    nnqr.Embedding: _look_up,
    nnqr.EmbeddingBag: _sum_bags,
    **dict.fromkeys(KINDS, _run_recurrent),
}
