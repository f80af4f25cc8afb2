"""Rules of the oracle's table: activation functions and normalisations (rules NUM-03, NUM-04).

Every backend may evaluate them in float32 (u, γₙ: error_bounds.py). An error before the function is called grows by its
steepest slope at most; the evaluation adds its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.oracle.error_bounds import (
    FUNCTION,
    RESCALE,
    ErrorBound,
    Errors,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    bound_dequantizing,
    error_of,
    gamma,
)


def _read_option(call: OpCall, name: str, position: int, default: Any = None) -> Any:
    """An argument of the op: an attribute of a module; of a function by name or position."""
    if isinstance(call.function, nn.Module):
        return getattr(call.function, name)
    return call.kwargs.get(name, call.args[position] if len(call.args) > position else default)


# -- elementwise functions --------------------------------------------------------------------------------------------


Slope: TypeAlias = Callable[[OpCall, Tensor], Tensor | float]
"""The steepest slope of a function within the whole error of its operand, for a call and that error."""
Step: TypeAlias = Callable[[OpCall], Tensor | None]
"""The step of the accumulator that a function's results are made of."""


class Elementwise(NamedTuple):
    """A function: its name in torch.nn.functional, the ops that compute it, and how far it may be off."""

    name: str
    ops: tuple[Any, ...]
    slope: Slope
    evaluation: Callable[[OpCall], Tensor | float]
    """How far the function of the dequantized value is off, in real units."""
    arithmetic: str = FUNCTION
    """RESCALE for a function that is one factor or another, which integers compute as they compute a product."""
    step: Step | None = None


def bound_elementwise(function: Elementwise, call: OpCall) -> Errors:
    """An elementwise function: errors grow by the steepest slope within them."""
    x = call.values()[0]
    dequantized = bound_dequantizing(x)
    steepest = function.slope(call, x.error() + dequantized)
    errors = {cause: steepest * error for cause, error in x.errors.items()}
    return add_error(errors, "function", steepest * dequantized + function.evaluation(call))


def _find_sigmoid_slope(call: OpCall, error: Tensor) -> Tensor:
    """σ' = σ(1 − σ) falls with |x|."""
    nearest = (call.values()[0].real.abs() - error).clamp(min=0).sigmoid()
    return nearest * (1 - nearest)


def _find_tanh_slope(call: OpCall, error: Tensor) -> Tensor:
    """The slope tanh' = 1 − tanh² falls with |x|."""
    return 1 - (call.values()[0].real.abs() - error).clamp(min=0).tanh().square()


def _find_leaky_slope(call: OpCall, error: Tensor) -> float:
    return max(1.0, abs(float(_read_option(call, "negative_slope", 1, 0.01))))


def _find_step_of_leaky(call: OpCall) -> Tensor | None:
    """The integers of x are the accumulator, in steps of s_x, or of a·s_x where they are negative."""
    x, slope = call.values()[0], abs(float(_read_option(call, "negative_slope", 1, 0.01)))
    if x.step is None or x.step.numel() > 1 or not slope:
        return None
    return torch.where(x.real < 0, slope * x.step, x.step)


def _find_softplus_slope(call: OpCall, error: Tensor) -> Tensor:
    """The slope is σ(βx) ≤ 1. Above the threshold T the function is x, lower by J = log(1 + e⁻ᵀ) / β.

    Where βx, twice rounded, is within the error of T, the result moves by the slope's part or by J, which are opposed:
    by at most the larger one.
    """
    x = call.values()[0].real
    beta, threshold = _read_softplus(call)
    step = math.log1p(math.exp(-threshold)) / beta
    is_near = (beta * x - threshold).abs() <= beta * error + gamma(2) * (beta * x).abs()
    slope: Tensor = torch.where(is_near, step / error.clamp(min=torch.finfo(torch.float64).tiny), 0.0).clamp(min=1.0)
    return slope


def _read_softplus(call: OpCall) -> tuple[float, float]:
    return float(_read_option(call, "beta", 1, 1.0)), float(_read_option(call, "threshold", 2, 20.0))


def _bound_softplus(call: OpCall) -> Tensor:
    """log(1 + eᵇˣ) / β: the product rounds, u·|βx|·σ(βx) ≤ u·(L + 0.3), L the logarithm.

    An exponential off by 2u moves L by 2u·σ ≤ 2u, the sum by u; the logarithm is within one ulp, 2u·L, and a quotient
    by β or a product with a rounded 1/β rounds twice. In all γ₅·|y| + γ₄ / β.
    """
    bound: Tensor = gamma(5) * call.result.abs() + gamma(4) / _read_softplus(call)[0]
    return bound


def _read_alpha(call: OpCall) -> float:
    return abs(float(_read_option(call, "alpha", 1, 1.0)))


_ELEMENTWISE = (
    # x, or a·x: a is rounded to float32, and the product.
    Elementwise(
        "leaky_relu",
        (nn.LeakyReLU, F.leaky_relu, F.leaky_relu_),
        _find_leaky_slope,
        lambda call: gamma(2) * call.result.abs(),
        RESCALE,
        _find_step_of_leaky,
    ),
    # x, or a·(eˣ − 1), eˣ ≤ 1: the exponential within one ulp (2u), the difference, a, and the product; |eˣ − 1| ≤ 1.
    # The slope is 1 or a·eˣ.
    Elementwise(
        "elu",
        (nn.ELU, F.elu),
        lambda call, error: max(1.0, _read_alpha(call)),
        lambda call: gamma(5) * _read_alpha(call),
    ),
    # x·min(max(x + 3, 0), 6) / 6: where the sum is not clamped, |x| ≤ 3, it rounds by 6u and moves the result by u·|x|;
    # then a product, and a quotient or a product with a rounded 1/6. Slopes lie between −1/2 and 3/2.
    Elementwise(
        "hardswish",
        (nn.Hardswish, F.hardswish),
        lambda call, error: 1.5,
        lambda call: gamma(4) * call.values()[0].real.abs(),
    ),
    # min(max(x + 3, 0), 6) / 6: the sum, a rounded 1/6, the product; all of at most 1.
    Elementwise("hardsigmoid", (nn.Hardsigmoid, F.hardsigmoid), lambda call, error: 1 / 6, lambda call: gamma(3)),
    # 1 / (1 + e⁻ˣ): an exponential off by 2u moves σ by σ(1 − σ)·2u ≤ u/2; the sum and the quotient round, σ ≤ 1.
    Elementwise(
        "sigmoid", (nn.Sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), _find_sigmoid_slope, lambda call: gamma(3)
    ),
    # Within one ulp directly; or as 2σ(2x) − 1, twice as far off as σ, and one rounding more.
    Elementwise("tanh", (nn.Tanh, torch.tanh, "tanh", "tanh_"), _find_tanh_slope, lambda call: gamma(7)),
    # x·σ(x): σ within γ₃, and a product. Slopes lie between −0.1 and 1.1.
    Elementwise(
        "silu", (nn.SiLU, F.silu), lambda call, error: 1.1, lambda call: gamma(4) * call.values()[0].real.abs()
    ),
    # x·tanh(s), s = log(1 + eˣ): an exponential off by 2u moves s by at most 2u, the sum by u, the logarithm by 2u·s;
    # tanh moves by sech²(s) ≤ 1 of it, and s·sech²(s) < 1/2; it is within γ₇, and the product rounds. Slopes lie
    # between −0.12 and 1.09.
    Elementwise(
        "mish", (nn.Mish, F.mish), lambda call, error: 1.09, lambda call: gamma(12) * call.values()[0].real.abs()
    ),
    Elementwise("softplus", (nn.Softplus, F.softplus), _find_softplus_slope, _bound_softplus),
    # x·Φ(x), or with the tangent's approximation of Φ: that within four ulp (8u), and two products. Slopes reach 1.13.
    Elementwise(
        "gelu", (nn.GELU, F.gelu), lambda call, error: 1.13, lambda call: gamma(10) * call.values()[0].real.abs()
    ),
)


def bound_prelu(call: OpCall) -> Errors:
    """x, or a·x where it is negative, a by channel: errors of x grow by 1, or by |a| below zero, those of a by |x|.

    A config may have a quantized, as fx observes each tensor that a function is given: it is then dequantized, with two
    roundings, before the product: γ₃.
    """
    x, a = call.values()[0], _read_slopes(call)
    reach = a.real.abs() + a.error()
    dequantized = bound_dequantizing(x)
    steepest = torch.where(x.real + x.error() + dequantized < 0, reach, reach.clamp(min=1.0))
    negative = (x.error() - x.real).clamp(min=0.0)
    errors = {
        cause: steepest * error_of(cause)(x) + negative * error_of(cause)(a)
        for cause in dict.fromkeys((*x.errors, *a.errors))
    }
    return add_error(errors, "function", steepest * dequantized + gamma(3) * call.result.abs())


def _read_slopes(call: OpCall) -> Value:
    """The slopes of a PReLU, broadcast to the channels of its operand."""
    slopes, rank = _read_option(call, "weight", 1), call.values()[0].real.dim()
    value = slopes if isinstance(slopes, Value) else Value(real=slopes.detach().double())
    shape = (1, -1, *[1] * (rank - 2)) if value.real.numel() > 1 else (1,) * rank
    errors = {cause: error_of(cause)(value).reshape(shape) for cause in value.errors}
    return Value(real=value.real.reshape(shape), errors=errors)


# -- softmax ----------------------------------------------------------------------------------------------------------

EXP = 40 * U  # twenty ulp: fast exponentials of vector libraries are as far off
_NEGLIGIBLE = 104.0  # of exponents: e to minus this is less than any float32
_BEYOND = 500.0  # an exponent whose error is this large has no digit right; float64 still holds its exponential


def bound_softmax(call: OpCall) -> Errors:
    """eˣⁱ / Σ eˣʲ over n elements: with eˣ off by factors of 1 + ρ, yᵢ is off by yᵢ(ρᵢ + S) / (1 − S), S = Σ yⱼρⱼ.

    ρ: x and the largest x are dequantized, their difference rounds, the exponential is within twenty ulp. The sum and
    the quotient add γₙ₊₁·yᵢ; exponentials below 2⁻¹²⁶ may be flushed to zero, n of them be missing. Errors of the
    operands grow by at most 1/2: Σⱼ |∂yᵢ/∂xⱼ| = 2yᵢ(1 − yᵢ) ≤ 1/2; those of an xⱼ that is 104 below another for all
    errors do not count, as under a mask: e⁻¹⁰⁴ < 2⁻¹⁵⁰. The bound is at most 1, as y is: it is 1 where x is so large
    that S reaches 1, and nothing is known of y.
    """
    x, y, dim = call.values()[0], call.result, _read_option(call, "dim", 1)
    axis = int(dim) if dim is not None else 0 if y.dim() in (0, 1, 3) else 1  # torch's choice
    counts = x.real + x.error() > (x.real - x.error()).amax(axis, keepdim=True) - _NEGLIGIBLE
    largest = {cause: torch.where(counts, error, 0.0).amax(axis, keepdim=True) for cause, error in x.errors.items()}
    errors = {cause: 0.5 * error.expand_as(x.real) for cause, error in largest.items()}
    dequantized = bound_dequantizing(x).nan_to_num(posinf=0.0)
    below = (x.real.amax(axis, keepdim=True) - x.real).abs().nan_to_num(0.0, 0.0)  # e to minus infinity is zero
    exponent = dequantized + torch.where(counts, dequantized, 0.0).amax(axis, keepdim=True) + U * below
    factor = torch.expm1(exponent.clamp(max=_BEYOND)) + EXP
    total = (y * factor).sum(axis, keepdim=True)
    off = y * ((factor + total) / (1 - total) + gamma(y.shape[axis] + 1))
    return add_error(errors, "function", torch.where(total < 1, off, 1.0).clamp(max=1.0) + y.shape[axis] * 2.0**-126)


# -- normalisations ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation of x, then times a weight, plus a bias."""

    view: tuple[int, ...]
    """The shape in which x is normalised."""
    axes: tuple[int, ...]
    """The axes along which x is normalised."""
    eps: float
    weight: Value
    """It is broadcast to x's own shape."""
    bias: Value
    """It is broadcast to x's own shape."""
    statistics: tuple[Value, Value] | None = None
    """A mean and a variance that are given, broadcast to x's own shape; None: those of x."""


Deviation: TypeAlias = tuple[Tensor, Tensor]
"""How far (x − μ)·r is off, and that result itself."""


def bound_norm(read: Callable[[OpCall], Norm], call: OpCall) -> Errors:
    """z·w + b, z = (x − μ)·r, r = 1 / √(v + eps); `read` says what is normalized in a call.

    For each cause, errors of x, μ, v, w and b: with z off by δ, δ·(|w| + e_w) + |z|·e_w + e_b.
    """
    norm, x = read(call), call.values()[0]
    deviate = _deviate_from_own if norm.statistics is None else _deviate_from_given
    errors = {}
    for cause in call.causes():
        moved, result = deviate(norm, x, error_of(cause)(x), cause)
        e_w, e_b = error_of(cause)(norm.weight), error_of(cause)(norm.bias)
        errors[cause] = moved * (norm.weight.real.abs() + e_w) + result.abs() * e_w + e_b
    evaluated, _ = deviate(norm, x, bound_dequantizing(x).expand_as(x.real), None)
    return add_error(errors, "function", norm.weight.real.abs() * evaluated + gamma(2) * norm.bias.real.abs())


def _deviate_from_given(norm: Norm, x: Value, error: Tensor, cause: str | None) -> Deviation:
    """With given μ ± e_μ and v ± e_v: (|x − μ|)·δr + (e + e_μ)·r⁺, r⁺ the largest r and δr the largest distance from r.

    An evaluation (no ``cause``) of a·x + (b − μ·a), a = r·w, makes seven roundings of (|x| + |μ|)·r: eps, v + eps, √,
    the quotient, w, the product, the last sum; b is in two of them.
    """
    assert norm.statistics is not None
    mean, variance = norm.statistics
    e_mean, e_variance = (error_of(cause or "")(statistic) for statistic in norm.statistics)
    exact, least, most = _bound_factors(norm.eps, variance.real, e_variance, e_variance)
    away = x.real - mean.real
    moved = away.abs() * torch.maximum(most - exact, exact - least) + (error + e_mean) * most
    rounding = 0.0 if cause else gamma(7)
    return moved + rounding * (x.real.abs() + mean.real.abs()) * exact, away * exact


def _deviate_from_own(norm: Norm, x: Value, error: Tensor, cause: str | None) -> Deviation:
    """With the μ and v of x itself, n elements each of which is off by its own e ≤ E.

    Let σ = √v, and A = √(mean x²) + E, which bounds mean |x| and √(mean x²) of what is summed. σ moves by that of the
    errors, at most E. In an evaluation (no ``cause``) the mean is off by E and by δμ = γₙ·A: n − 1 additions, one
    division; and a variance as mean x² − μ² (two passes are better) has γₙ₊₁·A² from the squares, 2γₙ·A² from μ², two
    roundings more: δv = γ₃ₙ₊₃·A². So r lies between 1 / √((σ + E)² + δv + eps) and 1 / √((σ − E)² − δv + eps), nothing
    below zero in it; eps, the sum, the root and the quotient round: γ₄. With r⁺ the largest r and δr the largest
    distance from r, z is off by |x − μ|·δr + (e + E + δμ)·r⁺, and for x·a + (b − μ·a) by γ₃·(|x| + |μ|)·r⁺ more.
    """
    values, error = x.real.reshape(norm.view), error.reshape(norm.view)
    n = int(torch.Size(values.shape[axis] for axis in norm.axes).numel())
    roundings = (n, 3 * n + 3, 4, 3)
    of_mean, of_variance, of_root, of_sums = (0.0 if cause else gamma(count) for count in roundings)
    mean = values.mean(norm.axes, keepdim=True)
    variance = (values - mean).square().mean(norm.axes, keepdim=True)
    largest = error.amax(norm.axes, keepdim=True)
    size = values.square().mean(norm.axes, keepdim=True).sqrt() + largest
    down = variance - (variance.sqrt() - largest).clamp(min=0).square() + of_variance * size.square()
    up = (variance.sqrt() + largest).square() - variance + of_variance * size.square()
    exact, least, most = _bound_factors(norm.eps, variance, down, up)
    least, most = least * (1 - of_root), most * (1 + of_root)
    moved = (values - mean).abs() * torch.maximum(most - exact, exact - least)
    moved = moved + (error + largest + of_mean * size + of_sums * (values.abs() + mean.abs())) * most
    return moved.reshape(x.real.shape), ((values - mean) * exact).reshape(x.real.shape)


def _bound_factors(eps: float, variance: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 / √(v + eps), the least and the largest it is for variances from v − down (not below 0) to v + up."""
    low = (variance - down).clamp(min=0)
    return (variance + eps).rsqrt(), (variance + up + eps).rsqrt(), (low + eps).rsqrt()


def _read_parameter(call: OpCall, name: str, position: int, default: float, shape: tuple[int, ...]) -> Value:
    """A tensor argument or a module's parameter, in a shape that broadcasts to x; the default, where it is None."""
    parameter = _read_option(call, name, position)
    if parameter is None:
        return Value(real=torch.tensor(default, dtype=torch.float64))
    if not isinstance(parameter, Value):
        return Value(real=parameter.detach().double().reshape(shape))
    errors = {cause: error.expand_as(parameter.real).reshape(shape) for cause, error in parameter.errors.items()}
    return Value(real=parameter.real.reshape(shape), errors=errors)


def _read_layer_norm(call: OpCall) -> Norm:
    x, shape = call.values()[0].real, tuple(_read_option(call, "normalized_shape", 1))
    return _read_affine_norm(call, tuple(x.shape), tuple(range(x.dim() - len(shape), x.dim())), shape)


def _read_group_norm(call: OpCall) -> Norm:
    x, groups = call.values()[0].real, _read_option(call, "num_groups", 1)
    return _read_affine_norm(call, (x.shape[0], groups, x[0].numel() // groups), (2,), (-1, *[1] * (x.dim() - 2)))


def _read_affine_norm(
    call: OpCall, view: tuple[int, ...], axes: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Norm:
    weight = _read_parameter(call, "weight", 2, 1.0, parameter_shape)
    bias = _read_parameter(call, "bias", 3, 0.0, parameter_shape)
    return Norm(view=view, axes=axes, eps=_read_option(call, "eps", 4, 1e-5), weight=weight, bias=bias)


def _read_instance_norm(call: OpCall) -> Norm:
    """Each channel of each instance; a module also takes one instance without a batch, and may use what it tracked."""
    x = call.values()[0].real
    function: Any = call.function
    is_module = isinstance(function, nn.Module)
    axis = x.dim() - 1 - int(type(function).__name__[-2]) if is_module else 1
    uses_input = not function.track_running_stats if is_module else _read_option(call, "use_input_stats", 5, True)
    return _read_channel_norm(call, axis, tuple(range(axis + 1, x.dim())), uses_input)


def _read_batch_norm(call: OpCall) -> Norm:
    """Each channel, with the statistics that training kept; a module that keeps none takes those of the batch."""
    x = call.values()[0].real
    uses_input = _read_option(call, "running_mean", 1) is None or bool(_read_option(call, "training", 5, False))
    return _read_channel_norm(call, 1, (0, *range(2, x.dim())), uses_input)


def _read_channel_norm(call: OpCall, axis: int, axes: tuple[int, ...], uses_input: bool) -> Norm:
    """The arguments of a function stand as in ``torch.nn.functional.instance_norm``."""
    x = call.values()[0].real
    names = (("running_mean", 0.0), ("running_var", 1.0), ("weight", 1.0), ("bias", 0.0))
    mean, variance, weight, bias = (
        _read_parameter(call, name, position, default, (-1, *[1] * (x.dim() - 1 - axis)))
        for position, (name, default) in enumerate(names, start=1)
    )
    statistics, eps = None if uses_input else (mean, variance), _read_option(call, "eps", 7, 1e-5)
    return Norm(view=tuple(x.shape), axes=axes, eps=eps, weight=weight, bias=bias, statistics=statistics)


# -- the table --------------------------------------------------------------------------------------------------------


def _make_rules(
    bound: ErrorBound, source: str, *ops: Any, arithmetic: str = FUNCTION, step: Step | None = None
) -> dict[Any, OpRule]:
    source = f"torch.nn.{source}; NUM-04"
    return dict.fromkeys(ops, OpRule(arithmetic=arithmetic, bound=bound, source=source, accumulator_step=step))


OP_RULES: dict[Any, OpRule] = {
    op: rule
    for each in _ELEMENTWISE
    for op, rule in _make_rules(
        partial(bound_elementwise, each),
        f"functional.{each.name}",
        *each.ops,
        arithmetic=each.arithmetic,
        step=each.step,
    ).items()
} | {
    **_make_rules(bound_prelu, "functional.prelu", nn.PReLU, F.prelu, arithmetic=RESCALE),
    **_make_rules(bound_softmax, "Softmax", nn.Softmax, F.softmax, torch.softmax, "softmax"),
    **_make_rules(partial(bound_norm, _read_layer_norm), "LayerNorm", nn.LayerNorm, F.layer_norm),
    **_make_rules(partial(bound_norm, _read_group_norm), "GroupNorm", nn.GroupNorm, F.group_norm),
    **_make_rules(
        partial(bound_norm, _read_instance_norm),
        "InstanceNorm2d",
        nn.InstanceNorm1d,
        nn.InstanceNorm2d,
        nn.InstanceNorm3d,
        F.instance_norm,
    ),
    **_make_rules(
        partial(bound_norm, _read_batch_norm),
        "BatchNorm2d",
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        F.batch_norm,
    ),
}
