"""Values that are quantized while the model runs: dynamically to integers, or to half precision (CVT-03, CVT-04).

The oracle derives scale and zero point exactly from the input, and counts what a float32 evaluation of them may change.
All bounds are in terms of u and γₙ of error_bounds.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import (
    U64,
    Errors,
    OpCall,
    U,
    Value,
    bound_dot_products,
    bound_products,
    gamma,
    read_operands,
)

EPS = torch.finfo(torch.float32).eps  # the smallest scale of an observer that was given none (NUM-02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic(Value):
    """A value quantized with its own qparams, dequantized; ``step`` is its scale."""

    bounds: tuple[int, int]
    """The ends of its integers."""
    eps: float
    """The smallest scale that it could have had."""
    scale_error: float
    """A bound on the relative error of the scale, one for all elements: a right backend's values are (1 + δ) times
    these, |δ| ≤ ``scale_error``, in addition to ``errors``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floating(Value):
    """A value in half precision, or left in float32 before a quantized weight: its products are summed in float32."""


def dynamic_quantize(x: Value, low: int, high: int, eps: float = EPS) -> Dynamic:
    """Quantize to low … high with the qparams of x's own range, and dequantize. (NUM-02, CVT-03)

    Exactly: T = max(x, 0) and B = max(−x, 0) over all elements, s = max((T + B) / (high − low), eps), z = low +
    round(B / s), and x becomes s·k with k = clamp(round(x / s), low − z, high − z). A right backend computes s in
    float32, one rounding for the sum and one for the quotient: |δ| ≤ γ₂. It divides x by it, or multiplies by its
    reciprocal: γ₂ of |x / s| more. It may add z before it rounds: u·(|x / s| + |z|) more. B / s takes the roundings of
    s and one more: γ₃ of at most high − low. Where these, or the error of x, let x / s or B / s fall on either side of
    a tie, k may be one of several: the result is the middle of them, half of their distance its error. Other k are
    certain. Where all values are zeros there is no step: whatever the scale is, they stay zeros.
    """
    error = x.error()
    tops, bottoms = ([_find_largest(way * x.real + sign * error) for sign in (-1, 1)] for way in (1, -1))
    scales = [max((top + bottom) / (high - low), eps) for top, bottom in zip(tops, bottoms, strict=True)]
    least, most = scales[0] * (1 - gamma(2)), scales[1] * (1 + gamma(2))
    slack = (high - low) * gamma(3)
    zeros = (
        _clamp(low + _ceil(bottoms[0] / most - slack - 0.5), low, high),
        _clamp(low - _ceil(-bottoms[1] / least - slack - 0.5), low, high),
    )
    first, last = _find_ends(x.real - error, x.real + error, (least, most), zeros, (low, high))
    scale, ambiguity = (scales[0] + scales[1]) / 2, (last - first) / 2
    scale_error = max(most / scale, scale / least) - 1
    return Dynamic(
        real=(first + last) / 2 * scale,
        errors={"upstream": ambiguity * scale * (1 + scale_error)} if bool(ambiguity.any()) else {},
        step=torch.tensor(scale, dtype=torch.float64) if tops[1] + bottoms[1] > 0 else None,
        bounds=(low, high),
        eps=eps,
        scale_error=scale_error,
    )


def _find_ends(
    below: Tensor, above: Tensor, scales: tuple[float, float], zeros: tuple[int, int], bounds: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The smallest and the largest k of values between two, for every scale and zero point between two."""
    low, high = bounds
    first = torch.minimum(below / scales[0], below / scales[1])
    last = torch.maximum(above / scales[0], above / scales[1])
    largest = torch.maximum(first.abs(), last.abs())
    slack = gamma(2) * largest + U * (largest + max(abs(low), abs(high)))
    return (
        (first - slack).round().clamp(low - zeros[1], high - zeros[1]),
        (last + slack).round().clamp(low - zeros[0], high - zeros[0]),
    )


def _find_largest(values: Tensor) -> float:
    """The largest value, or 0: a quantized range holds 0. (NUM-02)"""
    return max(0.0, float(values.max())) if values.numel() else 0.0


def _ceil(value: float) -> int:
    return -int(-value // 1)


def _clamp(value: int, low: int, high: int) -> int:
    return min(high, max(low, value))


def halve(value: Value | Tensor) -> Floating:
    """Round to half precision, to nearest. (CVT-04)

    A weight (a tensor) is rounded. An activation may be rounded by a backend, or kept in float32: the result is the
    middle of the two, half of their difference its error. A value that half precision holds is exact.
    """
    if isinstance(value, Tensor):
        return Floating(real=value.double().half().double())
    ends = torch.stack([value.real - value.error(), value.real + value.error()])
    ends = torch.cat([ends, ends.half().double()])
    low, high = ends.amin(0), ends.amax(0)
    error = (high - low) / 2
    return Floating(real=(low + high) / 2, errors={"half": error} if bool(error.any()) else {})


def leave_in_float(value: Value) -> Floating:
    """Return a value whose products are summed in float32."""
    return Floating(real=value.real, errors=value.errors)


def half_steps_of(real: Tensor) -> Tensor:
    """Return the distance of neighbours in half precision at each value: 2⁻¹⁰ of its power of two, at least 2⁻²⁴."""
    exponent = torch.where(real == 0, -14, torch.frexp(real).exponent - 1)
    return torch.ldexp(torch.ones_like(real), exponent.clamp(min=-14) - 10)


def dequantize(integers: Tensor, scale: Tensor, zero_point: Tensor, *, counts_weights: bool) -> Value:
    """Return (q − z)·s, as a weight folded to integers has it; where its rounding counts, s / 2 is its error."""
    real = (integers - zero_point) * scale
    errors = {"weights": (scale / 2).expand_as(real)} if counts_weights else {}
    return Value(real=real, errors=errors, step=scale)


def read_half_weight(weight: Tensor, *, counts_weights: bool) -> Value:
    """Return a weight in half precision, which has no step; where its rounding counts, half a step is its error."""
    real = weight.double()
    return Value(real=real, errors={"weights": half_steps_of(real) / 2} if counts_weights else {})


def bound_linear_products(call: OpCall) -> Errors:
    """Σ x·w + b with x of any kind: in addition to the errors of a dot product those of what x was quantized by.

    Dynamic x: the result is s_x·s_w·(an integer) + b. The error of s_x is one factor of the whole product, and the
    product s_x·s_w, the integer in float32 and the two multiplied make one rounding each: (scale_error + γ₃)·|y − b|;
    the sum with b is the last rounding, which every float output is allowed. Products whose integers cancel to 0 cancel
    in this oracle's float64 sums but for their own roundings: one for x, for w, for the product, and n for the sum and
    b, so γₙ₊₃·(Σ|x|·|w| + |b|) in the unit roundoff of float64, cause *oracle*. The bias is float: a scale that is
    known only at run time leaves nothing to round it to beforehand. Floating x: products are summed in float32,
    whatever the backend does with integers.
    """
    x, weight, given, _ = read_operands(call)
    if not isinstance(x, (Dynamic, Floating)):
        return bound_dot_products(call)
    is_float = call.capabilities.float_accumulation or isinstance(x, Floating)
    capabilities = replace(call.capabilities, int32_bias=False, float_accumulation=is_float)
    errors = bound_products(replace(call, capabilities=capabilities))
    if isinstance(x, Dynamic):
        bias = None if given is None else given.real
        products = call.result if bias is None else call.result - bias
        errors["rescale"] = (x.scale_error + gamma(3)) * products.abs()
        terms = F.linear(x.real.abs(), weight.real.abs(), None if bias is None else bias.abs())
        errors["oracle"] = gamma(weight.real.shape[-1] + 3, U64) * terms
    return errors
