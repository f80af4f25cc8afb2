"""Kinds of requantizing: integer kernels that do what they declare, and others that do something else.

A machine that multiplies by a fixed-point number holds its bias as int32, and adds in steps as fine as TFLite's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import tests.mutants.integer_faults  # noqa: F401  (enters them in the table)
from fx_quant_conformance.backends.base import Requantize, RoundingMode, Tolerance
from tests.mutants.fault_table import CONV, FAULTS, LINEAR, RATIO, RESCALED, Fault
from tests.mutants.honest import bias_int32, half_away, half_up, integer
from tests.mutants.integer_kernels import Integers, Kernels, Make, Sum, varied

HEADROOM = 20
"""Bits below the larger step in which TFLite adds."""
Round = Callable[[Tensor], Tensor]
Combine = Callable[[Tensor, Tensor], Tensor]
Rescale = Callable[[Tensor, Tensor], Tensor]
"""Of integer sums and factors (float64) to integers (float64)."""


# -- machines ---------------------------------------------------------------------------------------------------------


def hold(factor: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The mantissa as an integer of so many bits (int64), and the exponent."""
    mantissa, exponent = torch.frexp(factor)
    held = (mantissa * 2.0**bits).round().long()
    is_whole = held == 2**bits
    return torch.where(is_whole, held // 2, held), exponent.long() + is_whole


def shift_left(total: Tensor, exponent: Tensor) -> Tensor:
    """What a factor above 1 has before its mantissa; it saturates as int32."""
    return (total.long() << exponent.clamp(min=0)).clamp(-(2**31), 2**31 - 1)


def high_mul(a: Tensor, b: Tensor) -> Tensor:
    """gemmlowp's SaturatingRoundingDoublingHighMul."""
    product = a * b
    nudge = torch.where(product >= 0, 2**30, 1 - 2**30)
    return torch.div(product + nudge, 2**31, rounding_mode="trunc")


def shift_half_away(x: Tensor, shift: Tensor) -> Tensor:
    """gemmlowp's RoundingDivideByPOT."""
    mask = (1 << shift) - 1
    return (x >> shift) + ((x & mask) > (mask >> 1) + (x < 0).long()).long()


def shift_towards_zero(x: Tensor, shift: Tensor) -> Tensor:
    return x.sign() * (x.abs() >> shift)


def shift_down(x: Tensor, shift: Tensor) -> Tensor:
    return x >> shift


def multiply_and_shift(
    total: Tensor, held: Tensor, exponent: Tensor, shift_right: Combine = shift_half_away, multiply: Combine = high_mul
) -> Tensor:
    """TFLite's MultiplyByQuantizedMultiplier, with a shift and a product to choose."""
    product = multiply(shift_left(total, exponent), held)
    return shift_right(product, (-exponent).clamp(min=0)).double()


def twice(shift_right: Combine, multiply: Combine = high_mul) -> Rescale:
    """A product of 31 bits that is rounded, and a shift."""
    return lambda total, factor: multiply_and_shift(total, *hold(factor, 31), shift_right, multiply)


def once(bits: int, add_half: bool = True) -> Rescale:
    """A product and one shift, rounded half up; or down."""

    def rescale(total: Tensor, factor: Tensor) -> Tensor:
        held, exponent = hold(factor, bits)
        shift = bits - exponent.clamp(max=0)
        half = (1 << (shift - 1)) if add_half else torch.zeros_like(shift)
        return ((shift_left(total, exponent) * held + half) >> shift).double()

    return rescale


def by_fraction(bits: int, add_half: bool = True) -> Rescale:
    """A factor of so many bits behind the point, and one shift, rounded half up; or down."""

    def rescale(total: Tensor, factor: Tensor) -> Tensor:
        held = (factor * 2.0**bits).round().long()
        return ((total.long() * held + (1 << (bits - 1)) * add_half) >> bits).double()

    return rescale


def machine(rescale: Rescale, round_: Round) -> type[Kernels]:
    """Kernels that rescale whole sums so; others, as of an average or with a number, are exact and rounded."""

    class Machine(Kernels):
        def rescale(self, total: Tensor, ratio: Tensor) -> Tensor:
            is_whole = bool((total == total.round()).all()) and bool((total.abs() < 2.0**31).all())
            return rescale(total, ratio) if is_whole else round_(total * ratio)

        def rounded(self, value: Tensor) -> Tensor:
            return value

        def with_bias(self, total: Sum, bias: Tensor) -> Sum:
            kept: Sum = bias_int32(super().with_bias, total, bias)
            return Sum(total=kept.total.round(), scale=kept.scale, rectified=kept.rectified)

        def add(self, x: Integers, y: Integers) -> Sum:
            unit = 2 * torch.maximum(x.scale, y.scale) * 2.0**-HEADROOM
            parts = [
                rescale(self.zeroed(value) * 2.0**HEADROOM, value.scale / unit * 2.0**-HEADROOM) for value in (x, y)
            ]
            return Sum(total=parts[0] + parts[1], scale=unit)

    return Machine


def fractional(bits: int, add_half: bool = True) -> type[Kernels]:
    """A machine with factors of so many bits behind the point; a sum of two tensors is exact before it is rounded."""
    round_ = up if add_half else torch.floor
    return type("Fractional", (machine(by_fraction(bits, add_half), round_),), {"add": Kernels.add})


def away(value: Tensor) -> Tensor:
    return half_away(None, value)


def up(value: Tensor) -> Tensor:
    return half_up(None, value)


def rounded(round_: Round) -> Make:
    """Kernels that rescale exactly and round so."""
    return varied("rounded", lambda honest, value: round_(value))


def declares(bits: int | None = None, mode: RoundingMode = RoundingMode.NEAREST, *, rounds_twice: bool = False) -> Any:
    """Capabilities of such a machine."""
    requantize = Requantize(multiplier_bits=bits, rounding=mode, rounds_twice=rounds_twice)
    return {"requantize": requantize, "int32_bias": bits is not None}


def fractions(bits: int, mode: RoundingMode = RoundingMode.HALF_UP) -> Any:
    """Capabilities of a machine with factors of so many bits behind the point."""
    return {"requantize": Requantize(fraction_bits=bits, rounding=mode), "int32_bias": True}


def tolerates(lsb: float = 1.0, glob: str = "*") -> Any:
    """Capabilities of a machine whose results may be so far off."""
    return {"tolerance": {glob: Tolerance(lsb=lsb)}}


TFLITE = declares(31, RoundingMode.HALF_AWAY, rounds_twice=True)

# -- honest -----------------------------------------------------------------------------------------------------------

integer("31-bit fixed point, declared", machine(once(31), up), **declares(31, RoundingMode.HALF_UP))
integer("15-bit fixed point, declared", machine(once(15), up), **declares(15, RoundingMode.HALF_UP))
integer("rounded twice as TFLite, declared", machine(twice(shift_half_away), away), **TFLITE)
integer("31 fraction bits, declared", fractional(31), **fractions(31))
integer("half away, declared", rounded(away), **declares(mode=RoundingMode.HALF_AWAY))
integer("half up, declared", rounded(up), **declares(mode=RoundingMode.HALF_UP))
integer("half even, declared", Kernels, **declares(mode=RoundingMode.HALF_EVEN))
integer("floor, declared", rounded(torch.floor), **declares(mode=RoundingMode.DOWN))
integer(
    "shift down of a 31-bit product, declared",
    machine(once(31, add_half=False), torch.floor),
    **declares(31, RoundingMode.DOWN),
)
integer("truncation, declared", rounded(torch.trunc), **declares(mode=RoundingMode.TOWARDS_ZERO))

# -- faults that show on every claim that they touch ------------------------------------------------------------------


def kind(name: str, kernels: Make, patterns: tuple[str, ...] = RESCALED, **capabilities: Any) -> Fault:
    return Fault(group="requantize", name=name, kernels=kernels, patterns=patterns, capabilities=capabilities)


def tolerated(name: str) -> Fault:
    """A fault of the table, where every op is tolerated."""
    fault = next(each for each in FAULTS if each.name == name)
    return replace(fault, group="requantize", name=f"{name}, tolerated", capabilities=tolerates())


KINDS: list[Fault] = [
    kind("floor, declared half even", rounded(torch.floor), **declares(mode=RoundingMode.HALF_EVEN)),
    kind("floor, declared towards zero", rounded(torch.floor), **declares(mode=RoundingMode.TOWARDS_ZERO)),
    kind("truncation, declared down", rounded(torch.trunc), **declares(mode=RoundingMode.DOWN)),
    kind("nearest, declared down", Kernels, **declares(mode=RoundingMode.DOWN)),
    kind("up, declared down", rounded(torch.ceil), **declares(mode=RoundingMode.DOWN)),
    kind(
        "a half added, then truncated, declared half up",
        rounded(lambda v: (v + 0.5).trunc()),
        **declares(mode=RoundingMode.HALF_UP),
    ),
    kind(
        "shift down in place of half up, 31 bits",
        machine(once(31, add_half=False), torch.floor),
        **declares(31, RoundingMode.HALF_UP),
    ),
    kind(
        "shift towards zero after the product, declared as TFLite",
        machine(twice(shift_towards_zero), torch.trunc),
        **TFLITE,
    ),
    kind("shift down after the product, declared as TFLite", machine(twice(shift_down), torch.floor), **TFLITE),
    kind(
        "rounded at 3 bits after the point first, declared as TFLite",
        rounded(lambda v: (v * 8).round().div(8).round()),
        RATIO,
        **TFLITE,
    ),
    kind("9-bit multiplier, declared 31", machine(once(9), up), RATIO, **declares(31, RoundingMode.HALF_UP)),
    kind("20 fraction bits, shifted down, declared half up", fractional(20, False), RATIO, **fractions(20)),
    kind("16 fraction bits, declared 24", fractional(16), (*LINEAR, *CONV), **fractions(24)),
    kind("9-bit multiplier, declared 24 fraction bits", machine(once(9), up), RATIO, **fractions(24)),
    kind("floor, tolerated by 3/4", rounded(torch.floor), **tolerates(0.75)),
    kind("up by one, tolerated", rounded(lambda v: v.round() + 1), **tolerates()),
    kind("floor, and one lower, tolerated", rounded(lambda v: v.floor() - 1), **tolerates()),
    kind("floor of what another op has tolerated", rounded(torch.floor), (*LINEAR, *CONV), **tolerates(glob="nn.Avg*")),
    tolerated("wraps instead of saturating"),
    tolerated("next channel's scale"),
    tolerated("cat in the wrong order"),
    tolerated("conv pads with integer 0"),
    kind("9-bit multiplier, declared 12", machine(once(9), up), RATIO, **declares(12, RoundingMode.HALF_UP)),
]
"""Of these a result shows that is not declared, in each pattern named."""
FAULTS.extend(KINDS)

FINE: list[Fault] = [
    kind("15-bit multiplier, declared 31", machine(once(15), up), RATIO, **declares(31, RoundingMode.HALF_UP)),
    kind(
        "rounded twice as TFLite, undeclared",
        machine(twice(shift_half_away), away),
        (*LINEAR, *CONV, "operator.mul"),
        int32_bias=True,
    ),
    kind("half down, declared half up", rounded(lambda v: (v - 0.5).ceil()), **declares(mode=RoundingMode.HALF_UP)),
    kind("half even, declared half away", Kernels, **declares(mode=RoundingMode.HALF_AWAY)),
    kind("half up, declared half even", rounded(up), **declares(mode=RoundingMode.HALF_EVEN)),
]
"""These show only in results at a tie or next to it."""
