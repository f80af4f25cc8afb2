"""The arithmetic of five runtimes as each is declared, and faults that lie just outside of each declaration.

The kernels are ours; how they round is what the runtimes document or were measured to do. Their grids are the same for
all: zero points and -128, which ncnn has not. Sums that overflow before the multiplier are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from tests.mutants.honest import bias_int32
from tests.mutants.integer_faults import in_bits, padding_with, wraps
from tests.mutants.integer_kernels import IntegerBackend, Integers, Kernels, Sum, small_config, varied
from tests.mutants.requantize_kinds import (
    TFLITE,
    Rescale,
    away,
    by_fraction,
    declares,
    hold,
    machine,
    multiply_and_shift,
    once,
    shift_down,
    shift_half_away,
    shift_towards_zero,
    twice,
    up,
)
from tests.mutation.mutant import Mutant

LINEAR, CONV, RECTIFIED, ADD, MUL = "nn.Linear", "torch.conv2d", "nn.Linear+nn.ReLU", "operator.add", "operator.mul"
WEIGHTED, LEAKY, MEAN = (LINEAR, CONV), "nn.LeakyReLU", "torch.mean"
LAYERS = (LINEAR, RECTIFIED, "nni.LinearReLU", CONV)
S8 = DTypeConfig(torch.qint8, torch.qint8)
WEIGHTS = DTypeConfig(torch.qint8, torch.qint8, DTypeWithConstraints(torch.qint8, -127, 127), torch.float)
ADD_BITS = 20
"""The larger of XNNPACK's two multipliers in a sum is at least 2 to this power."""
LEAKY_BITS = 8
"""Behind the point of XNNPACK's factors in a leaky relu."""

# -- the runtimes -----------------------------------------------------------------------------------------------------


def in_float32(total: Tensor, factor: Tensor) -> Tensor:
    """A float32 factor, rounded half to even."""
    return (total.float() * factor.float()).round().double()


def nudged_mul(a: Tensor, b: Tensor) -> Tensor:
    """A product that is rounded half up and does not saturate, as in CMSIS-NN."""
    return (a * b + 2**30) >> 31


class Spread(Kernels):
    """Kernels that also know a leaky relu, with a factor on each side of zero, and means."""

    def call(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        if isinstance(module, nn.LeakyReLU):
            return self.leaky(arguments[0], module.negative_slope)
        return super().call(module, arguments)

    def leaky(self, x: Integers, slope: float) -> Sum:
        total = self.zeroed(x)
        return Sum(total=total, scale=torch.where(total < 0, slope, 1.0).double() * x.scale)

    def function(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if target is not torch.mean:
            return super().function(target, arguments, keywords)
        x, *rest = arguments
        total = torch.sum(self.zeroed(x), *rest, **keywords)
        return self.mean(total, x.scale, x.q.numel() // max(1, total.numel()))

    def mean(self, total: Tensor, scale: Tensor, count: int) -> Sum:
        return Sum(total=total, scale=scale / count)


class Xnnpack(Spread, machine(in_float32, torch.round)):  # type: ignore[misc]
    """A float32 factor; sums of two and leaky relus by integers."""

    add_bits, leaky_bits, rounds = ADD_BITS, LEAKY_BITS, True

    def add(self, x: Integers, y: Integers) -> Sum:
        return replace(Kernels.add(self, x, y), own=partial(self.added, (x, y)))

    def added(self, parts: tuple[Integers, ...], grid: Integers) -> Tensor:
        """Both operands by multipliers, and one shift, rounded half up."""
        factors = [part.scale / grid.scale for part in parts]
        shift = self.add_bits + 1 - torch.frexp(torch.maximum(*factors)).exponent.double()
        held = [(factor * 2.0**shift).round() for factor in factors]
        total = self.zeroed(parts[0]) * held[0] + self.zeroed(parts[1]) * held[1]
        return (total * 2.0**-shift + 0.5 * self.rounds).floor()

    def leaky(self, x: Integers, slope: float) -> Sum:
        made = super().leaky(x, slope)
        rescale = by_fraction(self.leaky_bits, self.rounds)
        return replace(made, own=lambda grid: rescale(made.total, made.scale / grid.scale))


class Tflite(Spread, machine(twice(shift_half_away), away)):  # type: ignore[misc]
    """TFLite's reference kernels, whose means divide the multiplier."""

    def mean(self, total: Tensor, scale: Tensor, count: int) -> Sum:
        def divided(grid: Integers) -> Tensor:
            held, exponent = hold(scale / grid.scale, 31)
            more = count.bit_length() - 1
            return multiply_and_shift(total, (held << more) // count, exponent - more)

        return replace(super().mean(total, scale, count), own=divided)


class CmsisNN(Spread, machine(twice(shift_half_away, nudged_mul), away)):  # type: ignore[misc]
    """CMSIS-NN as it is built by default."""


class SingleRounding(Spread, machine(once(31), up)):  # type: ignore[misc]
    """CMSIS-NN and TFLite as they are built with a single rounding."""


class Ncnn(Spread):
    """A float32 factor, a float bias after it and a second factor; rounded half away from zero."""

    def with_bias(self, total: Sum, bias: Tensor) -> Sum:
        return replace(total, late=bias)

    def scaled(self, value: Sum, grid: Integers) -> Tensor:
        real = value.total.float() * value.scale.float()
        real = real if value.late is None else real + value.late.float()
        return away((real * (1 / grid.scale).float()).double())


class DeclaredBackend(IntegerBackend):
    """Claims what its runtime has kernels of, in qint8."""

    def __init__(self, kernels: Any, patterns: tuple[str, ...], name: str, capabilities: Mapping[str, Any]) -> None:
        super().__init__(kernels, name, **capabilities)
        self._patterns = patterns

    def backend_config(self) -> BackendConfig:
        return declared_config(self._patterns)


@cache
def declared_config(patterns: tuple[str, ...]) -> BackendConfig:
    """Return entries of qint8 for these patterns; made once, for patterns are compared by identity in places."""
    known = {pattern_name(entry.normal_pattern): entry for entry in small_config().configs}
    known |= {pattern_name(op): BackendPatternConfig(op) for op in (nn.LeakyReLU, torch.mean)}
    config = BackendConfig("declared")
    for name in patterns:
        own = copy.copy(known[name])
        own.set_dtype_configs([WEIGHTS if name in LAYERS else S8])
        own.set_qat_module(None)  # type: ignore[arg-type]
        config.set_backend_pattern_config(own)
    return config


# -- what lies just outside -------------------------------------------------------------------------------------------

Step = Callable[[type[Kernels]], type[Kernels]]
"""Gets the kernels of a runtime wrong in one step."""


def step(method: str, body: Callable[..., Any]) -> Step:
    return lambda kernels: varied(method, body, kernels)


def shifted(steps: float) -> Step:
    """The sum is off by so many steps of the result, as by a wrong constant of the rounding."""

    def body(honest: Any, value: Sum, grid: Integers) -> Tensor:
        off = (steps * grid.scale / value.scale).round()
        result: Tensor = honest(replace(value, total=value.total + off), grid)
        return result

    return step("scaled", body)


def refactored(change: Callable[[Tensor], Tensor]) -> Step:
    """Another factor."""

    def body(honest: Any, value: Sum, grid: Integers) -> Tensor:
        result: Tensor = honest(replace(value, scale=change(value.scale / grid.scale) * grid.scale), grid)
        return result

    return step("scaled", body)


def rounded_at(parts: int) -> Step:
    """Rounded to a part of a step first."""

    def body(honest: Any, value: Sum, grid: Integers) -> Tensor:
        unit = grid.scale / value.scale / parts
        result: Tensor = honest(replace(value, total=((value.total / unit).round() * unit).round()), grid)
        return result

    return step("scaled", body)


def with_other_bias(change: Callable[[Sum, Tensor], Tensor]) -> Step:
    return step("with_bias", lambda honest, total, bias: honest(total, change(total, bias)))


def by_operand(change: Callable[[Tensor], Tensor]) -> Step:
    """A sum of operands that are first brought to the result's grid, and changed there."""

    def body(honest: Any, x: Integers, y: Integers) -> Sum:
        def added(grid: Integers) -> Tensor:
            first, second = (change(each.centred() * each.scale / grid.scale) for each in (x, y))
            return first + second

        made: Sum = honest(x, y)
        return replace(made, own=added)

    return step("add", body)


def in_sixteens(honest: Any, x: Integers, y: Integers) -> Sum:
    """The product without its lowest four bits."""
    made: Sum = honest(x, y)
    return replace(made, total=(made.total / 16).floor() * 16)


def averaged_first(honest: Any, total: Tensor, scale: Tensor, count: int) -> Sum:
    """The mean is an integer of the input's grid before it is rescaled."""
    return Sum(total=(total / count).round(), scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """A fault just outside of a declaration: the wrong step, and the ops on which it shows."""

    name: str
    step: Step
    patterns: tuple[str, ...] = WEIGHTED


ANYWHERE: tuple[Outside, ...] = (
    Outside(name="half a step low", step=shifted(-0.5)),
    Outside(name="half a step high", step=shifted(0.5)),
    Outside(name="an eighth of a step high", step=shifted(0.125)),
    Outside(name="a sixteenth of a step low", step=shifted(-0.0625)),
    Outside(name="rounded at a quarter first", step=rounded_at(4)),
    Outside(name="rounded at an eighth first", step=rounded_at(8)),
    Outside(name="factor off by 2^-9", step=refactored(lambda factor: factor * (1 + 2.0**-9))),
    Outside(name="factor off by 2^-11", step=refactored(lambda factor: factor * (1 - 2.0**-11))),
    Outside(name="factor of 9 bits", step=refactored(lambda factor: in_bits(factor, 9))),
    Outside(name="factor in float16", step=refactored(lambda factor: in_bits(factor, 11))),
    Outside(name="bias floored", step=with_other_bias(lambda t, bias: (bias / t.scale).floor() * t.scale)),
    Outside(name="bias in steps of 16", step=with_other_bias(lambda t, b: (b / t.scale / 16).round() * 16 * t.scale)),
    Outside(
        name="bias of the coarsest channel", step=with_other_bias(lambda t, b: (b / t.scale.max()).round() * t.scale)
    ),
    Outside(
        name="range from -127", step=step("clamped", lambda honest, v, grid, **k: honest(v.clamp(min=-127), grid, **k))
    ),
    Outside(
        name="range to 126", step=step("clamped", lambda honest, v, grid, **k: honest(v.clamp(max=126), grid, **k))
    ),
    Outside(
        name="relu at integer 0",
        step=step(
            "clamped",
            lambda honest, v, grid, rectified: honest(v.clamp(min=0) if rectified else v, grid, rectified=False),
        ),
        patterns=(RECTIFIED,),
    ),
    Outside(name="pads with integer 0", step=step("convolution", padding_with(0)), patterns=(CONV,)),
    Outside(
        name="sums of 16 bits",
        step=step("linear", wraps(16)),
        patterns=(LINEAR,),
    ),
)
"""Outside of each declaration."""
OF_SUMS: tuple[Outside, ...] = (
    Outside(name="operands of a sum rounded first", step=by_operand(Tensor.round), patterns=(ADD,)),
    Outside(name="sums of two wrap as int16", step=by_operand(partial(wraps(16), torch.round)), patterns=(ADD,)),
    Outside(
        name="product without its lowest bits",
        step=step("mul", in_sixteens),
        patterns=(MUL,),
    ),
)
"""Outside of each declaration of a runtime that adds and multiplies."""


def by(rescale: Rescale) -> Step:
    return step("rescale", lambda honest, total, factor: rescale(total, factor))


def having(**fields: Any) -> Step:
    return lambda kernels: type("Having", (kernels,), fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A runtime's kernels, its ops, what it declares, and faults that are its own."""

    name: str
    kernels: type[Kernels]
    patterns: tuple[str, ...]
    capabilities: Mapping[str, Any]
    own: tuple[Outside, ...] = ()

    def faults(self) -> tuple[Outside, ...]:
        """Return what lies just outside of the declaration."""
        common = (*ANYWHERE, *(OF_SUMS if ADD in self.patterns else ()))
        return (*common, *self.own)

    def make(self, kernels: type[Kernels] | None = None) -> DeclaredBackend:
        return DeclaredBackend(kernels or self.kernels, self.patterns, self.name, self.capabilities)


ORDINARY = (*LAYERS, ADD, MUL, LEAKY)
AVERAGED = Requantize(multiplier_bits=29, rounds_twice=True, spare_bits=1, rounding=RoundingMode.HALF_AWAY)
MEANS = Outside(name="means rounded on the input's grid first", step=step("mean", averaged_first), patterns=(MEAN,))
TWICE = (
    Outside(name="shifts down after the product", step=by(twice(shift_down))),
    Outside(name="shifts towards zero after the product", step=by(twice(shift_towards_zero))),
)
RUNTIMES: tuple[Runtime, ...] = (
    Runtime(
        name="XNNPACK",
        kernels=Xnnpack,
        patterns=(*ORDINARY, MEAN),
        capabilities={
            "int32_bias": True,
            "requantize_of": {LEAKY: Requantize(fraction_bits=LEAKY_BITS, rounding=RoundingMode.HALF_UP)},
        },
        own=(
            Outside(name="a leaky relu of 6 fraction bits", step=having(leaky_bits=6), patterns=(LEAKY,)),
            Outside(name="leaky relus and sums shift down", step=having(rounds=False), patterns=(LEAKY, ADD)),
            Outside(name="sums by multipliers of 10 bits", step=having(add_bits=9), patterns=(ADD,)),
            MEANS,
        ),
    ),
    Runtime(
        name="TFLite",
        kernels=Tflite,
        patterns=(*ORDINARY, MEAN),
        capabilities={**TFLITE, "requantize_of": {MEAN: AVERAGED}},
        own=(*TWICE, MEANS),
    ),
    Runtime(name="CMSIS-NN", kernels=CmsisNN, patterns=ORDINARY, capabilities=TFLITE, own=TWICE),
    Runtime(
        name="a single rounding",
        kernels=SingleRounding,
        patterns=ORDINARY,
        capabilities=declares(31, RoundingMode.HALF_UP),
        own=(
            Outside(name="shifts down", step=by(once(31, add_half=False))),
            Outside(name="rounds twice", step=by(twice(shift_half_away))),
        ),
    ),
    Runtime(
        name="ncnn",
        kernels=Ncnn,
        patterns=LAYERS,
        capabilities=declares(mode=RoundingMode.HALF_AWAY),
        own=(Outside(name="a bias of int32", step=step("with_bias", bias_int32)),),
    ),
)


def claims_on(patterns: tuple[str, ...], scheme: str) -> tuple[str, ...]:
    """Return globs of the PTQ claims on these patterns; with a weight, of this scheme."""
    return tuple(f"{pattern}/*/ptq/{scheme if pattern in LAYERS else 'no_weight'}" for pattern in patterns)


def _mutants() -> Iterator[Mutant]:
    for runtime in RUNTIMES:
        yield Mutant(group="honest", name=f"{runtime.name}, declared", make=runtime.make, claims=("*/static:*/ptq/*",))
        for fault in runtime.faults():
            yield Mutant(
                group="declared",
                name=f"{runtime.name}: {fault.name}",
                make=partial(runtime.make, fault.step(runtime.kernels)),
                rules=("NUM-03",),
                claims=claims_on(fault.patterns, "*"),
                in_full=claims_on(fault.patterns, "per_channel_symmetric"),
            )


MUTANTS = tuple(_mutants())
