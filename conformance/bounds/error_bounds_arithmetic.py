"""Error bounds of ops that pad, average, multiply or interpolate values (rules NUM-04, NUM-05); see error_bounds.py."""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fx_quant_conformance.conformance.bounds.error_bounds import (
    Errors,
    NoOracleError,
    OpCall,
    U,
    add_error,
    as_value,
    bound_dequantizing,
    bound_moves,
    error_of,
    gamma,
    propagate_product,
)


def bound_padding(call: OpCall) -> Errors:
    """Values move and a constant is put next to them, which has no error: f(e) − f(0), in which it cancels."""
    constant = call.evaluate(lambda value: torch.zeros(value.real.shape, dtype=torch.float64))
    return {cause: tree_map(operator.sub, call.evaluate(error_of(cause)), constant) for cause in call.causes()}


def bound_products(call: OpCall) -> Errors:
    """x·y: |x|·e_y + |y|·e_x + e_x·e_y for each cause.

    A rescale has one product and a factor of two scales (NUM-04). Here the factor is of three, one rounding more:
    2u·|x·y|; or x and y are dequantized.
    """
    x, y = map(as_value, call.args[:2])
    errors = {cause: propagate_product(torch.mul, x, y, cause) for cause in dict.fromkeys((*x.errors, *y.errors))}
    rescaled = x.real.abs() * bound_dequantizing(y) + y.real.abs() * bound_dequantizing(x)
    return add_error(errors, "rescale", rescaled)


def bound_quotients(call: OpCall) -> Errors:
    """A quotient x / d by a number d: errors of x are divided by |d|.

    d rounds to float32, and the quotient once; or 1 / d, one rounding more, and a product: γ₃ of |x / d|. x is
    dequantized before, or its scale is divided. Raises NoOracleError for a tensor d, whose grid holds zero.
    """
    x, divisor = call.args[0], call.args[1]
    if not isinstance(divisor, (int, float)):
        raise NoOracleError("no oracle for a division by a tensor: quantized, it may be zero")
    errors = {cause: error_of(cause)(x) / abs(divisor) for cause in x.errors}
    return add_error(errors, "rescale", bound_dequantizing(x) / abs(divisor) + gamma(3) * call.result.abs())


def bound_affine_products(call: OpCall) -> Errors:
    """β·C + α·A·B: errors of C grow by |β|; those of A and B as in A·B, by |α|.

    Summing in floating point makes n products, n additions, one rounding for α, one for β, and one for each dequantized
    operand: γₙ₊₄ of the absolute terms. A C held as int32 in steps of α·s_A·s_B is off by half of one. Otherwise C and
    the product are rescaled separately in float32, 2u of each, or by multipliers of n bits, 2⁻ⁿ of each more.
    """
    beta, alpha = abs(call.kwargs.get("beta", 1)), abs(call.kwargs.get("alpha", 1))
    added, a, b = map(as_value, call.args)
    errors = {
        cause: beta * error_of(cause)(added) + alpha * propagate_product(torch.matmul, a, b, cause)
        for cause in dict.fromkeys((*added.errors, *a.errors, *b.errors))
    }
    terms = beta * added.real.abs() + alpha * torch.matmul(a.real.abs(), b.real.abs())
    if call.capabilities.float_accumulation:
        return add_error(errors, "accumulation", gamma(a.real.shape[-1] + 4) * terms)
    if call.capabilities.int32_bias and a.step is not None and b.step is not None:
        add_error(errors, "bias", (0.5 * alpha * a.step * b.step).expand_as(call.result))
    bits = call.capabilities.requantize.multiplier_bits
    return add_error(errors, "rescale", (2 * U + (0.0 if bits is None else 2.0**-bits)) * terms)


def find_step_of_product(call: OpCall) -> Tensor | None:
    """Return the step of the accumulator of x·y, s_x·s_y; None: a factor is on no grid."""
    first, second = (as_value(operand).step for operand in call.args[:2])
    return None if first is None or second is None else first * second


def find_step_of_mean(call: OpCall) -> Tensor | None:
    """Return the step of the accumulator of a mean of n, s_x / n; None: x is on no grid, or in steps of its own."""
    x = call.values()[0]
    count = x.real.numel() // max(1, int(call.result.numel()))
    return None if x.step is None or x.step.numel() > 1 else x.step / count


def bound_windows(rank: int, call: OpCall) -> Errors:
    """A mean over windows of the last `rank` axes, with weights that are not negative: errors are averaged.

    Summing n terms in floating point makes n additions, one division and one rounding for each dequantized term: γₙ₊₂
    of the mean of |x|. n is at most the number of elements of those axes.
    """
    return _bound_mean_of(call.values()[0].real.shape[-rank:].numel(), call)


def bound_means(call: OpCall) -> Errors:
    """A mean over axes: as ``bound_windows``, with as many terms as elements go into one result."""
    return _bound_mean_of(call.values()[0].real.numel() // max(1, call.result.numel()), call)


def _bound_mean_of(terms: int, call: OpCall) -> Errors:
    errors = bound_moves(call)
    if call.capabilities.float_accumulation:
        add_error(errors, "accumulation", gamma(terms + 2) * call.evaluate(lambda value: value.real.abs()))
    return errors


# Σ|w| of the weights along one axis at most, and Σ|w'|, their change by one step of the source coordinate.
_LINEAR, _CUBIC = (1.0, 2.0), (1.375, 4.0)
_KERNELS = {"linear": _LINEAR, "bilinear": _LINEAR, "trilinear": _LINEAR, "bicubic": _CUBIC}


def bound_interpolation(call: OpCall, mode: str | None = None, *, is_filtered: bool = False) -> Errors:
    """Interpolation, by its mode, which an aten op has in its name.

    The nearest modes select; area averages over all axes but two.

    The linear and cubic modes form Σ w·x with weights that every backend computes in float32 from a source coordinate
    c = scale·(i + ½) − ½ or scale·i. With N + 1 ≥ |c| + ½, N the largest extent of input or output: the scale, the
    product and the difference round once each, the fraction of c and 1 − it once each: c is off by 5u·(N + 1) at most.
    With antialias the support, its ends and the distances from c, scaled, round as often again, and the weights are
    divided by the sum of N of them: (10 + N)·u·(N + 1). A weight is a continuous function of c, Σ|w'| ≤ 2 (linear:
    slopes of −1 and 1) or 4 (Keys' cubic with a = −¾: −¾ and 1.35 twice each at most), and Σ|w| ≤ 1 or 1 + 2·¾·¼
    along an axis. So with k axes and X the largest |x| the result is off by k·Σ|w'|·(Σ|w|)ᵏ⁻¹·δc·X, and, as four
    terms per axis are multiplied and added, by γ₅ₖ₊₁·(Σ|w|)ᵏ·X more (with antialias N terms).
    """
    if mode is None:
        mode = call.option("mode", 3, "nearest")
        is_filtered = bool(call.option("antialias", 6, False))
    x = call.values()[0].real
    axes, extent = x.dim() - 2, max((*x.shape[2:], *call.result.shape[2:]))
    if mode not in _KERNELS:
        return bound_windows(axes, call) if mode == "area" else bound_moves(call)
    total, slope = _KERNELS[mode]
    coordinate = (10 + extent if is_filtered else 5) * U * (extent + 1)
    sums = gamma(axes * (extent if is_filtered else 5) + 1) * total**axes
    weights = axes * slope * total ** (axes - 1) * coordinate
    largest = {cause: error_of(cause)(call.values()[0]).max() for cause in call.causes()}
    errors = {cause: (total**axes * error).expand_as(call.result) for cause, error in largest.items()}
    return add_error(errors, "function", ((weights + sums) * x.abs().max()).expand_as(call.result))


def bound_floors(call: OpCall) -> Errors:
    """⌊x / d⌋ with x off by e: any integer from ⌊(x − e) / d⌋ to ⌊(x + e) / d⌋.

    x itself is dequantized in float32; the quotient rounds by u, and so does d as a float32: 2u·|x|.
    """
    x, divisor = call.args[0], call.args[1]
    error = x.error() + bound_dequantizing(x) + gamma(2) * x.real.abs()
    low, high = (torch.floor((x.real + end) / divisor) for end in (-error, error))
    return {"function": (high - low).abs()}
