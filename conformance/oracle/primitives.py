"""The oracle's primitives: the ops that every other op is decomposed into, each with the bound on its error (NUM-04).

A primitive has, for each operand, the steepest slope L of its result within the whole error E of all operands: the
chord, so that a result is off by at most Σ L·E, and each cause by Σ L·e. It adds what its own evaluation in float32 may
round, in any order and fused with what is around it: of a function that is not correctly rounded four ulp, 8u·|y|, and
of exponentials twenty, as fast ones of vector libraries are off by. What a comparison decides is in jumps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds import error_bounds_arithmetic as arithmetic
from fx_quant_conformance.conformance.bounds.error_bounds import (
    MOVES,
    U64,
    Bounds,
    Errors,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    as_operand,
    bound_by_slopes,
    bound_clamps,
    bound_matrix_products,
    bound_moves,
    error_of,
    gamma,
    make_aten_rule,
    propagate_product,
    widen,
)
from fx_quant_conformance.conformance.bounds.extremes import NEGLIGIBLE, errors_of_leaders, may_lead, sign_of
from fx_quant_conformance.conformance.ops.activations import EXP, FUNCTIONS, bound_softmax
from fx_quant_conformance.conformance.ops.data_movement import view_in_any_layout
from fx_quant_conformance.conformance.ops.normalisations import NATIVE_BATCH_NORM
from fx_quant_conformance.conformance.oracle.complex_numbers import COMPLEX
from fx_quant_conformance.conformance.oracle.linear_algebra import LINEAR_ALGEBRA
from fx_quant_conformance.conformance.oracle.unary import FUNCTION, TINY, UNARY, Unary, bound_unary, find_reach_at

# -- arithmetic of two ------------------------------------------------------------------------------------------------


def _round_once(call: OpCall, values: Sequence[Value]) -> Tensor:
    """What one rounding makes; nothing of an exact result that float32 has, of operands without an error."""
    result: Tensor = call.result
    if result.is_complex():
        return 3 * U * result.abs()
    is_exact = result.float().double() == result
    for value in values:
        is_exact = is_exact & (value.error() == 0)
    return torch.where(is_exact, 0.0, U * result.abs())


def _bound_sum(call: OpCall) -> Errors:
    """A sum x ± alpha·y: errors add up; alpha, its product and the sum round once each."""
    alpha = abs(call.kwargs.get("alpha", 1))
    return bound_by_slopes(
        2,
        lambda call, values: (1.0, float(alpha)),
        lambda call, values: _round_once(call, values) + (0.0 if alpha == 1 else 2 * U * alpha * values[1].real.abs()),
        call,
    )


def _bound_product(call: OpCall) -> Errors:
    """x·y: |y| + e_y times the error of x, |x| times that of y; the product rounds once."""
    return bound_by_slopes(
        2, lambda call, values: (values[1].real.abs() + values[1].error(), values[0].real.abs()), _round_once, call
    )


def _bound_quotient(call: OpCall) -> Errors:
    """A quotient x / y: (e_x + |x / y|·e_y) / (|y| − e_y), no bound where y may be zero; γ₃ by way of 1 / y."""

    def slopes(call: OpCall, values: Sequence[Value]) -> Sequence[Bounds]:
        least = values[1].real.abs() - values[1].error()
        inverse = torch.where(least > 0, 1 / least, math.inf)
        return inverse, call.result.abs() * inverse

    roundings = 8 if call.result.is_complex() else 3
    return bound_by_slopes(2, slopes, lambda call, values: gamma(roundings) * call.result.abs(), call)


def _bound_power(call: OpCall) -> Errors:
    """xᵃ = e^(a·log x): the chord to the farthest corner of both errors.

    The exponent rounds by 4u of a·log x, which moves the power by as much of itself; or |a| products round once each.
    Of x below zero only whole powers are numbers, which turn at zero, or have a pole there.
    """

    def slopes(call: OpCall, values: Sequence[Value]) -> Sequence[Bounds]:
        x, a = values
        is_whole = (a.real == a.real.round()) & (a.error() == 0)
        error = x.error()
        poles = (x.real.abs() <= error) & (error > 0) & (a.real < 0)
        whole = find_reach_at(lambda end: end**a.real, x, call.result, Unary(turns=(0.0,)), poles)
        if bool(is_whole.all()):
            return whole, 0.0
        ends = [
            (x.real + way * error).clamp(min=0) ** (a.real + other * a.error()) for way in (-1, 1) for other in (-1, 1)
        ]
        moved = torch.stack([(end - call.result).abs() for end in ends]).nan_to_num(math.inf, math.inf).amax(0)
        both = error + a.error()
        slope = torch.where(both > 0, (moved + 8 * U64 * call.result.abs()) / both, 0.0)
        return torch.where(is_whole, whole, slope), slope

    def rounding(call: OpCall, values: Sequence[Value]) -> Bounds:
        exponent = (values[1].real * values[0].real.abs().clamp(min=TINY).log()).abs()
        own: Tensor = (EXP + 4 * U * exponent + 2 * U * values[1].real.abs()) * call.result.abs() + TINY
        return own

    return bound_by_slopes(2, slopes, rounding, call)


def _bound_angle(call: OpCall) -> Errors:
    """atan2(y, x): slopes of at most 1 / (r − e), r the distance from zero; 2π where the angle may jump."""

    def slopes(call: OpCall, values: Sequence[Value]) -> Sequence[Bounds]:
        y, x = values
        error = torch.hypot(y.error(), x.error())
        least = torch.hypot(y.real, x.real) - error
        jumps = (y.real.abs() <= y.error()) & (x.real - x.error() < 0) & (error > 0)
        both = torch.where(jumps | (least <= 0), 2 * math.pi / error, 1 / least)
        return both, both

    return bound_by_slopes(2, slopes, lambda call, values: FUNCTION * call.result.abs(), call)


def _bound_length(call: OpCall) -> Errors:
    """√(x² + y²): slopes of at most 1."""
    return bound_by_slopes(2, lambda call, values: (1.0, 1.0), lambda call, values: FUNCTION * call.result.abs(), call)


def _bound_larger(call: OpCall) -> Errors:
    """The larger or the smaller one: off by at most the larger error of those that may be it; of a clamp, of all."""
    values = [as_operand(each) for each in (*call.args, *call.kwargs.values()) if each is not None]
    causes = dict.fromkeys(cause for value in values for cause in value.errors)
    errors = {
        cause: torch.stack([error_of(cause)(value).expand_as(call.result) for value in values]) for cause in causes
    }
    real = torch.stack([value.real.expand_as(call.result) for value in values])
    counted = errors_of_leaders(Value(real=real, errors=errors), 0, sign_of(call))
    return {cause: error.amax(0) for cause, error in counted.items()}


# -- reductions and products of matrices ------------------------------------------------------------------------------


def _count_terms(call: OpCall) -> int:
    return as_operand(call.args[0]).real.numel() // max(1, int(call.result.numel()))


def _bound_total(call: OpCall) -> Errors:
    """A sum of n: errors add up, and n additions in any order make γₙ of Σ|x|."""
    call = replace(call, kwargs={name: value for name, value in call.kwargs.items() if name != "dtype"})
    errors = bound_moves(call)
    terms = call.evaluate(lambda value: widen(value.real).abs(), Tensor.abs)
    return add_error(errors, "accumulation", gamma(_count_terms(call)) * terms)


def _bound_running(call: OpCall) -> Errors:
    """Running sums: as a sum of as many as there are along the axis."""
    errors, x = bound_moves(call), as_operand(call.args[0]).real
    terms = call.evaluate(lambda value: value.real.abs(), Tensor.abs)
    return add_error(errors, "accumulation", gamma(x.shape[int(call.args[1])] if x.dim() else 1) * terms)


def _bound_multiplied(call: OpCall) -> Errors:
    """A product of n: at most Π(|x| + e) − Π|x| off, in equal shares of what causes it; γₙ of it in rounding."""
    x = as_operand(call.args[0])
    error = x.error()
    most = call.function(x.real.abs() + error, *call.args[1:])
    moved, causes = most - call.result.abs(), [cause for cause in x.errors if bool(x.errors[cause].any())]
    errors = {cause: moved / len(causes) for cause in causes}
    return add_error(errors, "function", gamma(_count_terms(call)) * call.result.abs())


def _bound_largest(call: OpCall) -> Errors:
    """The largest or the smallest of several: off by at most the largest error of those that may be it.

    A median is off by at most the largest error of all.
    """
    errors = errors_of_leaders(as_operand(call.args[0]), (*call.args[1:2], ())[0], sign_of(call))
    return {cause: torch.ops.aten.amax(error, *call.args[1:]).expand_as(call.result) for cause, error in errors.items()}


def _bound_variance(gives_mean: bool, call: OpCall) -> Any:
    """The variance v = Σ(x − μ)² / (n − c): with x off by E at most, σ = √v moves by E, and v by E·(2σ + E).

    Evaluated as mean x² − μ² (two passes are better) it has γₙ₊₁·A² from the squares, 2γₙ·A² from μ² and two roundings,
    A² the mean of x²: γ₃ₙ₊₃·A². A mean has γₙ₊₁ of the mean of |x|.
    """
    x = as_operand(call.args[0])
    axes = call.args[1] if len(call.args) > 1 and call.args[1] else tuple(range(x.real.dim()))
    keeps = bool(call.kwargs.get("keepdim", False))
    variance, mean = call.result if gives_mean else (call.result, None)
    terms = int(torch.Size(x.real.shape[axis] for axis in axes).numel())
    given = call.kwargs.get("correction")
    scaled = terms / max(terms - (1 if given is None else float(given)), TINY)
    sigma = (variance / scaled).sqrt()
    total = x.error().amax(axes, keepdim=keeps)
    own = gamma(3 * terms + 3) * x.real.square().mean(axes, keepdim=keeps)
    of_variance = {
        cause: scaled * error_of(cause)(x).amax(axes, keepdim=keeps) * (2 * sigma + total) for cause in x.errors
    }
    add_error(of_variance, "function", scaled * own)
    if not gives_mean:
        return of_variance
    of_mean = {cause: error_of(cause)(x).mean(axes, keepdim=keeps) for cause in x.errors}
    add_error(of_mean, "accumulation", gamma(terms + 1) * x.real.abs().mean(axes, keepdim=keeps))
    assert mean is not None
    return of_variance, of_mean


def _bound_logarithm(x: Value, axes: int | tuple[int, ...]) -> tuple[Errors, Tensor]:
    """Of log Σ eˣʲ along axes, which stay: the largest errors that count, as in a softmax, and what evaluating adds.

    The sum of exponentials of differences, which round, is off by a factor of twenty ulp, γₙ and e to the u times the
    range of those that count, and its logarithm by as much.
    """
    counts, top = may_lead(x, axes, margin=NEGLIGIBLE), x.real.amax(axes, keepdim=True)
    errors = {cause: torch.where(counts, error, 0.0).amax(axes, keepdim=True) for cause, error in x.errors.items()}
    below = torch.where(counts, top - x.real, 0.0).nan_to_num(0.0, 0.0).amax(axes, keepdim=True)
    return errors, EXP + gamma(x.real.numel() // max(1, top.numel())) + 5 * U * below


def _bound_log_softmax(call: OpCall) -> Errors:
    """xᵢ − log Σ eˣʲ: both errors; the rest rounds by 4u of what is summed."""
    x, axis = as_operand(call.args[0]), int(call.args[1])
    shared, own = _bound_logarithm(x, axis)
    errors = {cause: error + shared[cause] for cause, error in x.errors.items()}
    below = (x.real - x.real.amax(axis, keepdim=True)).abs().nan_to_num(posinf=0.0)
    return add_error(errors, "function", own + 4 * U * (below + call.result.abs()))


def _bound_logarithm_of_sum(call: OpCall) -> Errors:
    """The logarithm; the largest is added, which rounds."""
    errors, own = _bound_logarithm(as_operand(call.args[0]), tuple(call.args[1]))
    shape = call.result.shape
    moved = {cause: error.reshape(shape) for cause, error in errors.items()}
    return add_error(moved, "function", own.reshape(shape) + 4 * U * call.result.abs())


def _bound_running_logarithm(call: OpCall) -> Errors:
    """A running log Σ eˣʲ: off by the largest error so far; its own evaluation as that of a logarithm of softmax."""
    x, axis = as_operand(call.args[0]), int(call.args[1])
    errors = {cause: error_of(cause)(x).cummax(axis).values for cause in x.errors}
    below = x.real.cummax(axis).values - x.real.cummin(axis).values
    own = EXP + gamma(x.real.shape[axis] if x.real.dim() else 1) + U * below + 4 * U * (below + call.result.abs())
    return add_error(errors, "function", own)


def _bound_distances(call: OpCall) -> Errors:
    """Distances r of rows of n elements, by the norm p ≥ 1: off by the norms of the errors of both rows.

    For p = 2 evaluated as √(x² + y² − 2x·y), which rounds by δ = γ₂ₙ₊₄·(|x| + |y|)²: the root by at most √δ, and by
    δ / r. Else differences round once, and their powers and the root by γₙ and what a power rounds (_bound_power), of
    which the root leaves the p-th part: p is 1 and largest where nothing is raised.
    """
    x, y = map(as_operand, call.args[:2])
    p, terms = float((*call.args[2:3], 2.0)[0]), x.real.shape[-1]
    errors: Errors = {}
    for cause in call.causes():
        moved = [error_of(cause)(each).norm(p, dim=-1) for each in (x, y)]
        errors[cause] = moved[0].unsqueeze(-1) + moved[1].unsqueeze(-2)
    if p < 1:  # it is no norm
        return add_error(errors, "accumulation", torch.full_like(call.result, math.inf))
    lengths = [each.real.norm(dim=-1) for each in (x, y)]
    spread = gamma(2 * terms + 4) * (lengths[0].unsqueeze(-1) + lengths[1].unsqueeze(-2)).square()
    if p == 2:
        own = torch.minimum(spread.sqrt(), spread / call.result.clamp(min=TINY)) + FUNCTION * call.result
        return add_error(errors, "accumulation", own)
    exponents = 0.0 if p in (1, math.inf) else 2 * EXP + 4 * U * (p + 1) * call.result.clamp(min=TINY).log().abs()
    return add_error(errors, "accumulation", (gamma(terms + 2) + exponents) * call.result)


def _bound_convolution(call: OpCall) -> Errors:
    """Σ x·w + b over n products: as ``bound_products`` of error_bounds.py, summed in floating point."""
    x, weight, bias, *options = call.args
    a, b = as_operand(x), as_operand(weight)

    def run(left: Tensor, right: Tensor) -> Tensor:
        return call.function(left, right, None, *options)  # type: ignore[no-any-return]

    is_transposed, groups = bool(options[3]), int(options[5])
    terms = (b.real[:, 0].numel() // groups) if is_transposed else b.real[0].numel()
    errors = {cause: propagate_product(run, a, b, cause) for cause in dict.fromkeys((*a.errors, *b.errors))}
    add_error(errors, "accumulation", gamma(terms + 3) * run(a.real.abs(), b.real.abs()))
    if bias is not None:
        shape, added = (-1, *[1] * (a.real.dim() - 2)), as_operand(bias)
        for cause in added.errors:
            add_error(errors, cause, error_of(cause)(added).reshape(shape).expand_as(call.result))
        add_error(errors, "accumulation", (gamma(terms + 3) * added.real.abs().reshape(shape)).expand_as(call.result))
    return errors


def _scatter_errors(call: OpCall) -> Errors:
    def evaluate(pick: Callable[[Value], Tensor]) -> Tensor:
        moved: Tensor = call.evaluate(lambda value: pick(value).contiguous())
        return moved

    return {cause: evaluate(error_of(cause)) for cause in call.causes()}


def _bound_scattered_by(call: OpCall) -> Errors:
    """Values that meet where they are put: the largest or smallest is off by the largest error, a sum by all of them.

    A mean is a sum and a division. Of a product there is no bound.
    """
    reduce = call.args[4]
    if reduce in ("amax", "amin"):
        return _scatter_errors(replace(call, args=(*call.args[:4], "amax")))
    if reduce not in ("sum", "mean"):
        return {"accumulation": torch.full_like(call.result, math.inf)}
    terms = call.evaluate(lambda value: value.real.abs(), Tensor.abs)
    return add_error(_scatter_errors(call), "accumulation", _gamma_of(_count_meeting(call) + 2) * terms)


def _bound_scattered(call: OpCall) -> Errors:
    """Values that are added where they are put: errors add up, and as many additions round as there are values."""
    errors = _scatter_errors(call)
    terms = call.evaluate(lambda value: value.real.abs(), Tensor.abs)
    return add_error(errors, "accumulation", _gamma_of(_count_meeting(call) + 1) * terms)


def _count_meeting(call: OpCall) -> Tensor:
    """How many values meet at each place, as their sum where all are one; what is there from the start is one too."""
    kwargs = {name: value for name, value in call.kwargs.items() if name != "alpha"}
    is_reducing = call.function.overloadpacket.__name__ in _REDUCING  # type: ignore[attr-defined]
    args = (*call.args[:4], "sum", *call.args[5:]) if is_reducing else call.args
    sums = replace(call, args=args, kwargs=kwargs)
    counted: Tensor = sums.evaluate(lambda value: torch.ones_like(value.real), torch.ones_like)
    return counted


def _gamma_of(counts: Tensor) -> Tensor:
    """γₙ for each n of a tensor."""
    product = counts.double() * U
    return torch.where(product < 1, product / (1 - product), math.inf)


# -- the table --------------------------------------------------------------------------------------------------------

_MOVING = (
    "alias",
    "as_strided",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy",
    "detach",
    "diagonal",
    "expand",
    "flip",
    "im2col",
    "lift_fresh",
    "lift_fresh_copy",
    "permute",
    "pixel_shuffle",
    "pixel_unshuffle",
    "repeat",
    "roll",
    "scatter",
    "select",
    "select_scatter",
    "slice",
    "slice_scatter",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "t",
    "transpose",
    "tril",
    "triu",
    "unbind",
    "unfold",
    "unsqueeze",
    "as_strided_scatter",
    "diagonal_scatter",
    "broadcast_to",
    "movedim",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
)
_SCATTERING = ("scatter_add", "index_add", "col2im")
_REDUCING = ("scatter_reduce", "index_reduce")
PUT_BY_INDEX = frozenset({"scatter_add", "index_add", *_REDUCING})
"""Primitives whose third operand says where values are put."""
_INTERPOLATING = {
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "bilinear",
    "upsample_trilinear3d": "trilinear",
    "upsample_bicubic2d": "bicubic",
    "_upsample_bilinear2d_aa": "bilinear",
    "_upsample_bicubic2d_aa": "bicubic",
}

PRIMITIVES: Mapping[str, OpRule] = {
    **COMPLEX,
    **{name: make_aten_rule(partial(bound_unary, name)) for name in UNARY},
    **LINEAR_ALGEBRA,
    **dict.fromkeys(("add", "sub"), make_aten_rule(_bound_sum)),
    "mul": make_aten_rule(_bound_product),
    "div": make_aten_rule(_bound_quotient),
    "pow": make_aten_rule(_bound_power),
    "atan2": make_aten_rule(_bound_angle),
    "hypot": make_aten_rule(_bound_length),
    "logsumexp": make_aten_rule(_bound_logarithm_of_sum),
    "logcumsumexp": make_aten_rule(_bound_running_logarithm),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), make_aten_rule(_bound_distances)),
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin", "clamp"), make_aten_rule(_bound_larger)),
    "sum": make_aten_rule(_bound_total),
    "mean": make_aten_rule(arithmetic.bound_means),
    "cumsum": make_aten_rule(_bound_running),
    "prod": make_aten_rule(_bound_multiplied),
    **dict.fromkeys(("amax", "amin", "max", "min", "median.default"), make_aten_rule(_bound_largest)),
    "var": make_aten_rule(partial(_bound_variance, False)),
    "var_mean": make_aten_rule(partial(_bound_variance, True)),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training"), NATIVE_BATCH_NORM),
    "_softmax": make_aten_rule(bound_softmax),
    "_log_softmax": make_aten_rule(_bound_log_softmax),
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), make_aten_rule(bound_matrix_products)),
    **dict.fromkeys(("addmm", "baddbmm"), make_aten_rule(arithmetic.bound_affine_products)),
    "convolution": make_aten_rule(_bound_convolution),
    **dict.fromkeys(_REDUCING, make_aten_rule(_bound_scattered_by)),
    **dict.fromkeys(_SCATTERING, make_aten_rule(_bound_scattered)),
    **{f"avg_pool{rank}d": make_aten_rule(partial(arithmetic.bound_windows, rank)) for rank in (1, 2, 3)},
    **{f"_adaptive_avg_pool{rank}d": make_aten_rule(partial(arithmetic.bound_windows, rank)) for rank in (2, 3)},
    **dict.fromkeys(_MOVING, make_aten_rule(arithmetic.bound_padding, MOVES)),
    **dict.fromkeys(("view", "_unsafe_view"), make_aten_rule(bound_moves, MOVES, view_in_any_layout)),
    "_reshape_alias": make_aten_rule(bound_moves, MOVES, lambda x, shape, strides: x.reshape(shape)),
    **{
        name: make_aten_rule(partial(arithmetic.bound_interpolation, mode=mode, is_filtered=name.endswith("_aa")))
        for name, mode in _INTERPOLATING.items()
    },
    **FUNCTIONS,
    **dict.fromkeys(("relu", "hardtanh"), make_aten_rule(bound_clamps)),
}
"""By the name of the aten op, whatever its overload."""
