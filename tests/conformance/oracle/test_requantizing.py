"""What is declared about requantizing, against the integer arithmetic of such machines, spelled out (NUM-03, NUM-04).

gemmlowp's: https://github.com/google/gemmlowp/blob/master/fixedpoint/fixedpoint.h, SaturatingRoundingDoublingHighMul
and RoundingDivideByPOT; TFLite's MultiplyByQuantizedMultiplier puts them together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.conformance.bounds.error_bounds import Accumulator
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.oracle.requantizing import (
    bound_factor,
    bound_first_rounding,
    bound_requantizing,
    find_target,
)

GRID = Grid(scale=1.0, zero_point=3, low=-(2**20), high=2**20, dtype="qint8")
"""Steps of 1, so that the step of the accumulator is the factor M; so wide that nothing is clamped."""
TFLITE = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)
U = 2.0**-24

# -- the machines -----------------------------------------------------------------------------------------------------


def high_mul(a: int, b: int) -> int:
    """SaturatingRoundingDoublingHighMul: a·b·2 / 2³², a nudge added, divided as C++ does, towards zero."""
    nudged = a * b + (2**30 if a * b >= 0 else 1 - 2**30)
    return nudged // 2**31 if nudged >= 0 else -(-nudged // 2**31)


def divide_by_power(x: int, exponent: int) -> int:
    """RoundingDivideByPOT: a shift, rounded half away from zero."""
    mask = (1 << exponent) - 1
    threshold = (mask >> 1) + (x < 0)
    return (x >> exponent) + ((x & mask) > threshold)


def quantize_multiplier(factor: float, bits: int) -> tuple[int, int]:
    """TFLite's QuantizeMultiplier, for any number of bits: a mantissa in [1/2, 1) and the exponent."""
    mantissa, exponent = math.frexp(factor)
    held = math.floor(mantissa * 2**bits + 0.5)
    return (held // 2, exponent + 1) if held == 2**bits else (held, exponent)


def twice(total: int, factor: float) -> int:
    """MultiplyByQuantizedMultiplier, with both roundings."""
    held, exponent = quantize_multiplier(factor, 31)
    return divide_by_power(high_mul(total << max(exponent, 0), held), max(-exponent, 0))


def once(total: int, factor: float, bits: int, add_half: bool = True) -> int:
    """One shift of the product, rounded half up; or down."""
    held, exponent = quantize_multiplier(factor, bits)
    shift = bits - exponent
    return (total * held + (1 << (shift - 1)) * add_half) >> shift


def towards_zero(total: int, factor: float, bits: int) -> int:
    return once(total, factor, bits, False) if total >= 0 else -once(-total, factor, bits, False)


# -- the bound holds, and is not slack --------------------------------------------------------------------------------


def excesses(
    requantize: Requantize, machine: Callable[[int, float], int], factor: float, totals: list[int]
) -> tuple[Tensor, Tensor]:
    """How far a machine's results are beyond what is right without any slack, and the slack."""
    real = torch.tensor(totals, dtype=torch.float64) * factor
    accumulator = Accumulator(step=torch.tensor(factor, dtype=torch.float64))
    v = GRID.integers(real)
    target = find_target(requantize, real, GRID, accumulator, torch.zeros_like(real))
    found = torch.tensor([machine(total, factor) for total in totals], dtype=torch.float64) + GRID.zero_point
    slack = sum(bound_requantizing(requantize, v, GRID, accumulator).values(), torch.zeros_like(v))
    return target.measure_excess(found, torch.zeros_like(found)), slack


def draw_factors(count: int, low: int, high: int) -> Iterator[float]:
    """Factors s_x·s_w / s_y as float32 numbers make them, from 2^low to 2^high."""
    draw = random.Random(5)
    for _ in range(count):
        numbers = [float(torch.tensor(draw.uniform(0.5, 1.0))) for _ in range(3)]
        yield numbers[0] * numbers[1] / numbers[2] * 2.0 ** draw.randrange(low, high)


EVERY = list(range(-700, 700))
DRAWN = [random.Random(6).randrange(-(2**20), 2**20) for _ in range(400)]


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("factor", [*draw_factors(20, -12, 2), 0.25, 0.5, 1.0, 2.0, 3.0, 1 - 2.0**-33, 0.5 - 2.0**-34])
def test_tflites_two_roundings_are_within_the_bound(factor: float) -> None:
    totals = EVERY + [total for total in DRAWN if abs(total * factor) < 2**15]
    beyond, slack = excesses(TFLITE, twice, factor, totals)
    assert bool((beyond <= slack).all())


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("shift", range(1, 9))
def test_the_bound_on_the_first_rounding_is_met_to_a_half(shift: int) -> None:
    """M in [2⁻ᵉ⁻¹, 2⁻ᵉ): by hand 2⁻ᵉ⁻¹ of a step. Some result of some such factor is more than half as far off."""
    accumulator = Accumulator(step=torch.tensor(1.3 * 2.0 ** -(shift + 1), dtype=torch.float64))
    assert float(bound_first_rounding(TFLITE, accumulator, 1.0)) == 2.0 ** -(shift + 1)
    worst = -1.0
    for factor in (mantissa * 2.0**-shift for mantissa in (0.501, 0.6, 0.75 + 2.0**-9, 0.9)):
        beyond, _ = excesses(TFLITE, twice, factor, list(range(-6000, 6000)))
        worst = max(worst, float(beyond.max()))
    assert 0.5 * 2.0 ** -(shift + 1) < worst <= 2.0 ** -(shift + 1) + 1e-4


@pytest.mark.rule("NUM-04")
def test_a_factor_of_a_half_and_more_is_rounded_once() -> None:
    for factor in (0.5, 0.73, 1.0, 5.0):
        assert float(bound_first_rounding(TFLITE, Accumulator(step=torch.tensor(factor)), 1.0)) == 0.0
    assert float(bound_first_rounding(TFLITE, Accumulator(step=None), 1.0)) == 0.25
    assert float(bound_first_rounding(Requantize(multiplier_bits=31), Accumulator(step=None), 1.0)) == 0.0


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("bits", (8, 15, 31))
def test_a_multiplier_of_n_bits_is_within_the_bound(bits: int) -> None:
    up, down, zero = (
        Requantize(multiplier_bits=bits, rounding=mode)
        for mode in (RoundingMode.HALF_UP, RoundingMode.DOWN, RoundingMode.TOWARDS_ZERO)
    )
    for factor in draw_factors(15, -10, 0):
        totals = EVERY + [total for total in DRAWN if abs(total * factor) < 2**12]
        machines: list[tuple[Requantize, Callable[[int, float], int]]] = [
            (up, lambda total, factor: once(total, factor, bits)),
            (down, lambda total, factor: once(total, factor, bits, False)),
            (zero, lambda total, factor: towards_zero(total, factor, bits)),
        ]
        for requantize, machine in machines:
            beyond, slack = excesses(requantize, machine, factor, totals)
            assert bool((beyond <= slack).all()), (str(requantize), factor)


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("bits", (8, 10, 15))
def test_the_bound_on_a_multiplier_is_met_to_a_half(bits: int) -> None:
    """The mantissa half-way between two of n bits, near 1/2, is off by almost 2⁻ⁿ of itself."""
    factor = (2.0 ** (bits - 1) + 0.5) / 2**bits / 2**6
    held, exponent = quantize_multiplier(factor, bits)
    off = abs(Fraction(held, 2**bits) * Fraction(2) ** exponent / Fraction(factor) - 1)
    assert 0.5 * (2.0**-bits + 2 * U) < off <= 2.0**-bits + 2 * U


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(("declared", "bits"), ((31, 15), (12, 8), (15, 10)))
def test_fewer_bits_than_declared_show(declared: int, bits: int) -> None:
    requantize, found = Requantize(multiplier_bits=declared), False
    for factor in draw_factors(20, -6, -2):
        beyond, slack = excesses(requantize, lambda total, factor: once(total, factor, bits), factor, EVERY + DRAWN)
        found = found or bool((beyond > slack).any())
    assert found


@pytest.mark.rule("NUM-04")
def test_two_roundings_that_are_not_declared_show() -> None:
    beyond, slack = excesses(Requantize(multiplier_bits=31), twice, 0.375 + 2.0**-10, EVERY)
    assert bool((beyond > slack).any())


@pytest.mark.rule("NUM-04")
def test_by_hand() -> None:
    """v = 40.3, z = 3: r = 37.3."""
    v = torch.tensor([40.3]).double()
    assert float(bound_factor(Requantize(), v, GRID, None)) == pytest.approx((3 * 37.3 + 40.3) * U, rel=1e-6)
    multiplied = bound_factor(Requantize(multiplier_bits=10), v, GRID, None)
    assert float(multiplied) == pytest.approx(37.3 * (2.0**-10 + 2 * U))
    accumulator = Accumulator(step=torch.tensor(0.1).double())
    found = bound_factor(Requantize(fraction_bits=8), v, GRID, accumulator)
    assert float(found) == pytest.approx(373 * 2.0**-9 + 37.3 * 2 * U)
    assert float(bound_factor(Requantize(fraction_bits=8), v, GRID, None)) == pytest.approx(37.3 * 2 * U)


def by_fraction(total: int, factor: float, bits: int) -> int:
    """XNNPACK's leaky relu: a factor of so many bits behind the point, rounded half up after the product."""
    held: int = math.floor(factor * 2**bits + 0.5)
    return (total * held + (1 << (bits - 1))) >> bits


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("bits", (8, 12))
def test_a_factor_of_n_fraction_bits_is_within_the_bound_which_is_met_to_a_half(bits: int) -> None:
    declared, worst = Requantize(fraction_bits=bits, rounding=RoundingMode.HALF_UP), 0.0
    totals = list(range(-255, 256))
    for factor in [*draw_factors(40, -8, 3), 0.01, 0.5 + 2.0 ** -(bits + 1), 2.0**-bits, 2.0 ** -(bits + 1)]:
        beyond, slack = excesses(declared, lambda total, factor: by_fraction(total, factor, bits), factor, totals)
        assert bool((beyond <= slack).all()), factor
        worst = max(worst, float((beyond / slack.clamp(min=1e-9)).max()))
    assert worst > 0.5
    fewer = (excesses(declared, lambda t, f: by_fraction(t, f, bits - 2), f, totals) for f in draw_factors(40, -8, 3))
    assert any(bool((beyond > slack).any()) for beyond, slack in fewer), "fewer bits than declared show"


def mean_of(total: int, factor: float, count: int) -> int:
    """TFLite's mean of integers: the multiplier of the scales, divided by the count, and then both roundings."""
    held, exponent = quantize_multiplier(factor * count, 31)
    shift = count.bit_length() - 1
    held, exponent = (held << shift) // count, exponent - shift
    return divide_by_power(high_mul(total << max(exponent, 0), held), max(-exponent, 0))


@pytest.mark.rule("NUM-04")
def test_the_first_rounding_of_tflites_mean_counts_double() -> None:
    declared = Requantize(multiplier_bits=29, rounds_twice=True, spare_bits=1, rounding=RoundingMode.HALF_AWAY)
    is_missed = False
    for count in (1, 3, 5, 7, 48, 49, 63, 64):
        for factor in draw_factors(12, -9, -1):
            totals = list(range(-600, 600))
            beyond, slack = excesses(declared, lambda total, factor, n=count: mean_of(total, factor, n), factor, totals)  # type: ignore[misc]
            assert bool((beyond <= slack).all()), (count, factor)
            is_missed |= bool((beyond > excesses(TFLITE, twice, factor, totals)[1]).any())
    assert is_missed, "the bound of TFLite's other ops is passed"


# -- ties, and other results that leave no doubt ----------------------------------------------------------------------

TIES = {
    RoundingMode.HALF_EVEN: (2, 4, -2, -4),
    RoundingMode.HALF_AWAY: (3, 4, -3, -4),
    RoundingMode.HALF_UP: (3, 4, -2, -3),
    RoundingMode.DOWN: (2, 3, -3, -4),
    RoundingMode.TOWARDS_ZERO: (2, 3, -2, -3),
}
"""What 2.5, 3.5, −2.5 and −3.5 are rounded to."""


def rightness(
    requantize: Requantize, totals: list[float], step: float, found: Tensor, error: float = 0.0
) -> list[bool]:
    real = torch.tensor(totals, dtype=torch.float64) * step
    accumulator = Accumulator(step=torch.tensor(step, dtype=torch.float64))
    target = find_target(requantize, real, GRID, accumulator, torch.full_like(real, error))
    slack = sum(bound_requantizing(requantize, GRID.integers(real), GRID, accumulator).values(), torch.zeros_like(real))
    return [bool(each <= 0) for each in target.measure_excess(found + GRID.zero_point, slack)]


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize("mode", TIES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("bits", (None, 31))
def test_a_named_rounding_leaves_one_integer_at_a_tie(mode: RoundingMode, bits: int | None) -> None:
    """Sums of 5, 7, −5, −7 by a factor of 1/2, which float32 and any multiplier hold exactly."""
    requantize = Requantize(multiplier_bits=bits, rounding=mode)
    expected, totals = torch.tensor(TIES[mode]).double(), [5.0, 7.0, -5.0, -7.0]
    for other in TIES.values():
        given = torch.tensor(other).double()
        assert rightness(requantize, totals, 0.5, given) == (given == expected).tolist()
        assert all(rightness(Requantize(multiplier_bits=bits), totals, 0.5, given)), "NEAREST leaves ties open"


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize("mode", (RoundingMode.HALF_EVEN, RoundingMode.HALF_AWAY, RoundingMode.HALF_UP))
def test_a_tie_in_doubt_is_left_open(mode: RoundingMode) -> None:
    """An error before it; a sum that is no integer; a factor that is no power of two and may be held a little off."""
    both = [torch.tensor(TIES[each]).double() for each in (RoundingMode.DOWN, RoundingMode.HALF_AWAY)]
    for found in both:
        assert all(rightness(Requantize(rounding=mode), [5.0, 7.0, -5.0, -7.0], 0.5, found, error=2.0**-20))
    thirds = torch.tensor([2.0, 3.0]).double()
    assert all(rightness(Requantize(multiplier_bits=31, rounding=mode), [15.0, 15.0], 1 / 6, thirds))


@pytest.mark.rule("NUM-06")
def test_tflites_tie_is_certain_where_the_first_rounding_does_nothing() -> None:
    """10/4 and −10/4 are exactly half-way after a product that is whole; 5/2 is rounded by the product alone, up."""
    assert [twice(total, 0.25) for total in (10, -10)] == [3, -3]
    found = torch.tensor([3.0, -3.0]).double()
    assert rightness(TFLITE, [10.0, -10.0], 0.25, found) == [True, True]
    assert rightness(TFLITE, [10.0, -10.0], 0.25, found.sign() * 2) == [False, False]
    assert [twice(total, 0.5) for total in (5, -5)] == [3, -2]
    assert rightness(TFLITE, [5.0, -5.0], 0.5, torch.tensor([3.0, -2.0]).double()) == [True, True]


@pytest.mark.rule("NUM-03")
def test_what_is_rounded_down_may_be_a_step_below_and_not_above() -> None:
    requantize = Requantize(rounding=RoundingMode.DOWN)
    totals, step = [10.0] * 4 + [-10.0] * 2, 0.3  # 3 and −3, with a factor that is not exact
    found = torch.tensor([3.0, 2.0, 4.0, 1.0, -3.0, -4.0]).double()
    assert rightness(requantize, totals, step, found) == [True, True, False, False, True, True]
    assert rightness(requantize, [11.0] * 3, step, torch.tensor([3.0, 4.0, 2.0]).double()) == [True, False, False]
    assert rightness(requantize, [-11.0] * 2, step, torch.tensor([-4.0, -3.0]).double()) == [True, False]
    towards = Requantize(rounding=RoundingMode.TOWARDS_ZERO)
    assert rightness(towards, [-11.0] * 2, step, torch.tensor([-4.0, -3.0]).double()) == [False, True]


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("bits", (None, 31))
@pytest.mark.parametrize("zero_point", (0, 8))
def test_a_sum_that_cancels_is_zero_whatever_float64_makes_of_it(bits: int | None, zero_point: int) -> None:
    """71·38 + 91·16 − 67·62 = 0; of the same with scales float64 left −1.4e-17, whose floor is −1: 0 was refused."""
    grid = Grid(scale=0.005, zero_point=zero_point, low=-128, high=127, dtype="qint8")
    scales = torch.tensor([1 / 204, 0.0031]).double()  # of float32
    x, w = torch.tensor([[71.0, 91.0, -67.0], [38.0, 16.0, 62.0]]).double() * scales[:, None]
    noise = F.linear(x[None], w[None]).flatten()
    step, real = scales.prod(), torch.cat([noise, -noise])
    assert 0 < float(noise.abs()) < 1e-15
    accumulator = Accumulator(step=step)
    requantize = Requantize(multiplier_bits=bits, rounding=RoundingMode.DOWN)
    target = find_target(requantize, real, grid, accumulator, torch.zeros_like(real)).clamp(grid)
    slack = sum(bound_requantizing(requantize, grid.integers(real), grid, accumulator).values(), torch.zeros_like(real))
    for found, is_right in ((zero_point, True), (zero_point + 1, False), (zero_point - 2, False)):
        excess = target.measure_excess(torch.full_like(real, found), slack)
        assert [bool(each <= 0) for each in excess] == [is_right] * 2, found


@pytest.mark.rule("NUM-05")
def test_what_only_moves_is_not_a_step_below_even_where_a_floor_is_declared() -> None:
    """A factor of 1 is exact: one integer is right."""
    requantize = Requantize(rounding=RoundingMode.DOWN)
    assert rightness(requantize, [7.0, 7.0], 1.0, torch.tensor([7.0, 6.0]).double()) == [True, False]


@pytest.mark.rule("NUM-03")
def test_an_end_of_a_clamp_may_be_rounded_by_the_compiler() -> None:
    """6 / 0.7 = 8.57…: 8 as all else, 9 as a compiler rounds; of 5.6 / 0.7 = 8 there is one."""
    grid = Grid(scale=0.7, zero_point=0, low=-128, high=127, dtype="qint8")
    requantize = Requantize(rounding=RoundingMode.DOWN)
    real = torch.tensor([6.0, 6.0, 6.0, 6.0, 5.6, 5.6], dtype=torch.float64)
    ends = torch.tensor([True, True, True, False, True, True])
    accumulator = Accumulator(step=torch.tensor(0.01).double(), ends=ends)
    target = find_target(requantize, real, grid, accumulator, torch.zeros_like(real))
    found = torch.tensor([8.0, 9.0, 7.0, 9.0, 8.0, 7.0]).double()
    slack = torch.full_like(real, 1e-5)
    right = [bool(each <= 0) for each in target.measure_excess(found, slack)]
    assert right == [True, True, False, False, True, False]


@pytest.mark.rule("NUM-03")
def test_a_result_beyond_the_range_has_one_integer_left() -> None:
    grid = Grid(scale=1.0, zero_point=0, low=-128, high=127, dtype="qint8")
    real = torch.tensor([200.0, 200.0, -300.0, -300.0, 126.6, 126.6], dtype=torch.float64)
    accumulator, found = Accumulator(step=None), torch.tensor([127, 126, -128, -127, 126, 127]).double()
    for mode in (RoundingMode.DOWN, RoundingMode.TOWARDS_ZERO):
        target = find_target(Requantize(rounding=mode), real, grid, accumulator, real * 0).clamp(grid)
        excess = target.measure_excess(found, torch.full_like(real, 1e-5))
        assert [bool(each <= 0) for each in excess] == [True, False, True, False, True, False]


@pytest.mark.rule("NUM-04")
def test_an_end_of_the_range_is_right_beside_a_result_that_only_just_leaves_it() -> None:
    """Before: half of what is left of the tie was rounded to less than the end's distance from its middle."""
    grid = Grid(scale=1.0, zero_point=-128, low=-128, high=127, dtype="qint8")
    real = torch.rand(4096, generator=torch.Generator().manual_seed(0)).double() * 1e-12
    target = find_target(Requantize(), real, grid, Accumulator(step=None), real * 0).clamp(grid)
    assert (target.measure_excess(torch.full_like(real, -128.0), real * 0) <= 0).all()
