"""Requantizing: how far a declared machine's integer may be from the exact result, in steps (rules NUM-03, NUM-04).

A machine multiplies an integer sum A by a factor M = s_A / s_y, rounds, adds the zero point z and clamps. Here v is the
exact result in steps of the output's grid, r = v − z = A·M, and u = 2⁻²⁴. ``Capabilities.requantize`` says which of
these machines it is:

* M is a float32 (the default): the factor rounds twice, A·M once, together 3u·|r|; the sum with z once, u·|v|.
* M is a mantissa of n bits in [1/2, 1) and a power of two: the mantissa is rounded by at most 2⁻ⁿ⁻¹, which is 2⁻ⁿ of
  it, so r is off by 2⁻ⁿ·|r|. The factor that it is made of may come from float32: 2u·|r|. Integers add nothing more.
* M has n bits behind the point: it is off by at most 2⁻ⁿ⁻¹, and r by 2⁻ⁿ⁻¹·|A| = 2⁻ⁿ⁻¹·|r| / M; 2u·|r| as before.
* Rounded twice: with M = m·2⁻ᵉ, e ≥ 1, the product A·m is rounded to an integer before the shift by e. That is off by
  at most 1/2, which the shift makes 2⁻ᵉ⁻¹ of a step: at most 1/4, and less than M. With M ≥ 1/2 nothing is shifted. A
  multiplier that may be k bits smaller, in [2⁻ᵏ⁻¹, 1), has a shift that may be k shorter: 2ᵏ⁻ᵉ⁻¹, at most 1/4.

Then the integer q is: of a rounding to nearest, from v − 1/2 to v + 1/2; of one down (floor), from v − 1 to v; of one
towards zero, from v − 1 to v for r > 0 and from v to v + 1 for r < 0; and as far beyond these ends as the above says.

Where nothing is in doubt, q is one integer, at a tie the one that the declared rounding gives: no error comes before, A
is an integer below 2²⁴, M a power of two (and no smaller than the last bit behind the point), so that float32 and any
mantissa hold M and A·M exactly; and twice rounded, A is even or M ≥ 1, so that the first rounding does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.conformance.bounds.error_bounds import (
    DOT_PRODUCT,
    FUNCTION,
    MOVES,
    Accumulator,
    OpCall,
    OpRule,
    U,
    Value,
    bound_clamps,
)
from fx_quant_conformance.conformance.oracle.grids import Grid

TIE = 2.0**-30
"""Distance from halfway, in steps, that counts as halfway. Scales that make ties are powers of two, or in such a ratio;
the exact result is then exact in float64 too. Elsewhere its own error, 2^-53 of each term, is far below this."""
_LARGEST = 2.0**24
_UNKNOWN = 0.25
_NEAR = 2.0**-22


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The integers that are right but for the slack, elementwise (float64, in steps)."""

    centre: Tensor
    half: Tensor | float
    """How far from ``centre`` they may lie."""

    def clamp(self, grid: Grid) -> Target:
        """Return the same of results that are clamped to a grid after they are rounded."""
        low, high = ((self.centre + end * self.half).clamp(grid.low, grid.high) for end in (-1, 1))
        centre = (low + high) / 2  # is rounded itself: an end that is an integer is as far from it as it is measured
        return Target(centre=centre, half=torch.maximum(high - centre, centre - low))

    def measure_excess(self, integers: Tensor, slack: Tensor) -> Tensor:
        """Return by how much integers are beyond what is right; at most 0 where they are right."""
        return (integers - self.centre).abs() - self.half - slack


# -- accumulators -----------------------------------------------------------------------------------------------------


def find_accumulator(rule: OpRule, call: OpCall, step: Tensor | None) -> Accumulator | None:
    """Return the accumulator of an op's result; None: it is not made of integers alone. ``step``: the result's.

    Integers are made of it as the op's Capabilities say, of what moves as of what has made the values.
    """
    values, requantize = call.values(), call.capabilities.requantize
    if rule.arithmetic == FUNCTION or not values or values[0].accumulator is None:
        return None
    if rule.arithmetic == DOT_PRODUCT:
        return Accumulator(step=step, requantize=requantize)
    if any(value.accumulator is None for value in values):
        return None
    if rule.arithmetic == MOVES:
        return replace(_move(rule, call, values), requantize=values[0].accumulator.requantize or requantize)
    step = None if rule.accumulator_step is None else rule.accumulator_step(call)
    return Accumulator(step=step, requantize=requantize)


def _move(rule: OpRule, call: OpCall, values: list[Value]) -> Accumulator:
    """Return the accumulator of values that move: its step is known if all have the same one, or none changes place."""
    accumulators = [value.accumulator for value in values if value.accumulator is not None]
    first, x = accumulators[0], values[0]
    is_in_place = len(values) == 1 and isinstance(call.result, Tensor) and call.result.shape == x.real.shape
    steps: list[Any] = [each.step for each in accumulators]
    is_one = all(step is not None and step.numel() == 1 for step in steps) and len({float(each) for each in steps}) == 1
    if not is_in_place or rule.bound is not bound_clamps:
        return Accumulator(step=first.step if is_one else None)
    ends = call.result != x.real
    return Accumulator(step=first.step, ends=ends if first.ends is None else ends | first.ends)


# -- bounds -----------------------------------------------------------------------------------------------------------


def bound_requantizing(
    requantize: Requantize, v: Tensor, grid: Grid, accumulator: Accumulator | None
) -> dict[str, Tensor]:
    """How far requantizing may be off by cause, in steps (derived above), for results v."""
    bounds = {"final": bound_factor(requantize, v, grid, accumulator)}
    if requantize.rounds_twice and accumulator is not None:
        bounds["first rounding"] = bound_first_rounding(requantize, accumulator, grid.scale).expand_as(v)
    return bounds


def bound_factor(requantize: Requantize, v: Tensor, grid: Grid, accumulator: Accumulator | None) -> Tensor:
    """How far the factor and what follows it may be off, in steps (derived above), for results v."""
    r, bits = (v - grid.zero_point).abs(), requantize.multiplier_bits
    if requantize.fraction_bits is not None:
        step = None if accumulator is None else accumulator.step
        is_known = step is not None and bool((step > 0).all())
        total = torch.zeros_like(r) if step is None or not is_known else r * grid.scale / step
        return 2 * U * r + 2.0 ** -(requantize.fraction_bits + 1) * total
    return (3 * r + v.abs()) * U if bits is None else (2 * U + 2.0**-bits) * r


def bound_first_rounding(requantize: Requantize, accumulator: Accumulator, output_step: float) -> Tensor:
    """How far the rounding before the shift may be off, in steps of the output (derived above).

    A factor just below a power of two may be held as that power, with a shift that is shorter by one.
    """
    if not requantize.rounds_twice:
        return torch.zeros((), dtype=torch.float64)
    if accumulator.step is None:
        return torch.tensor(_UNKNOWN, dtype=torch.float64)
    mantissa, exponent = torch.frexp(accumulator.step.double() / output_step)
    is_near = mantissa >= 1 - max(_NEAR, 2.0 ** -(requantize.multiplier_bits or 0))
    shifts = [_bound_at(exponent + more) for more in range(requantize.spare_bits + 2)]
    longer, shorter = (torch.stack(each).amax(0) for each in (shifts[:-1], shifts))
    return torch.where(is_near, shorter, longer)


def _bound_at(exponent: Tensor) -> Tensor:
    shift = -exponent
    return torch.where(shift >= 1, 0.5 * 2.0 ** -shift.clamp(min=0).double(), 0.0)


# -- which integers are right -----------------------------------------------------------------------------------------


def find_target(
    requantize: Requantize, real: Tensor, grid: Grid, accumulator: Accumulator | None, error: Tensor
) -> Target:
    """Return the integers that are right for an exact real result, which has an error before it is requantized.

    They are not clamped to the grid. What is not made of integers alone is rounded to nearest, a tie to either side.
    """
    mode = requantize.rounding
    if mode is RoundingMode.NEAREST or accumulator is None:
        return Target(centre=grid.integers(real), half=0.5)
    v = grid.integers(_round_sum(real, accumulator, error))
    r = v - grid.zero_point
    centre = v
    if mode.is_directed:
        centre = v - 0.5 * (1.0 if mode is RoundingMode.DOWN else r.sign())
    half = torch.full_like(v, 0.5)
    if accumulator.ends is not None and mode.is_directed:  # a compiler rounds an end to nearest, or as all else
        end = torch.where((r - r.round()).abs() <= TIE, r.round(), r)
        ends = torch.stack([round_by(mode, end), round_by(RoundingMode.HALF_UP, end)]) + grid.zero_point
        centre = torch.where(accumulator.ends, ends.mean(0), centre)
        half = torch.where(accumulator.ends, (ends[0] - ends[1]).abs() / 2, half)
    return _decide_certain(requantize, real, grid, accumulator, error, Target(centre=centre, half=half))


def _round_sum(real: Tensor, accumulator: Accumulator, error: Tensor) -> Tensor:
    """Return the result without what float64 has added to an integer sum: r is 0, and not below it, where A is 0."""
    if accumulator.step is None or not bool((accumulator.step > 0).all()):
        return real
    total = real / accumulator.step
    is_whole = (error == 0) & ((total - total.round()).abs() <= TIE)
    return torch.where(is_whole, total.round() * accumulator.step, real)


def _decide_certain(
    requantize: Requantize, real: Tensor, grid: Grid, accumulator: Accumulator, error: Tensor, target: Target
) -> Target:
    """Leave one integer where nothing is in doubt (derived above)."""
    if accumulator.step is None or not bool((accumulator.step > 0).all()):
        return target
    total = real / accumulator.step
    whole, (mantissa, exponent) = total.round(), torch.frexp(accumulator.step.double() / grid.scale)
    is_certain = (error == 0) & (mantissa == 0.5) & ((total - whole).abs() <= TIE) & (whole.abs() < _LARGEST)
    if requantize.fraction_bits is not None:
        is_certain &= exponent > -requantize.fraction_bits
    if requantize.rounds_twice:
        is_certain &= (whole.remainder(2) == 0) | (exponent >= 1)
    if accumulator.ends is not None:
        is_certain &= ~accumulator.ends
    exact = round_by(requantize.rounding, whole * 2.0 ** (exponent.double() - 1)) + grid.zero_point
    return Target(centre=torch.where(is_certain, exact, target.centre), half=torch.where(is_certain, 0.0, target.half))


def round_by(mode: RoundingMode, r: Tensor) -> Tensor:
    """Round scaled results; NEAREST as HALF_EVEN."""
    if mode is RoundingMode.HALF_AWAY:
        return r.sign() * (r.abs() + 0.5).floor()
    if mode is RoundingMode.HALF_UP:
        return (r + 0.5).floor()
    if mode is RoundingMode.DOWN:
        return r.floor()
    return r.trunc() if mode is RoundingMode.TOWARDS_ZERO else r.round()
