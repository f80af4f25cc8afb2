"""Models of the arithmetic that a kernel may use, and naming the one that predicts the kernel's results.

A fingerprint's probe makes operands on which the models differ. All values are float64, in output steps from the zero
point unless noted otherwise; ``Rule`` rounds them to whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fx_quant_conformance.backends.base import LEAST_BITS, Requantize, RoundingMode
from fx_quant_conformance.conformance.oracle.grids import Grid

Rule: TypeAlias = Callable[[Tensor], Tensor]
Key = TypeVar("Key", bound=Hashable)


def join_runs(runs: Iterable[tuple[Mapping[Key, Tensor], Tensor]]) -> tuple[dict[Key, Tensor], Tensor]:
    """Join the predictions for several runs, model by model, and the results of these runs."""
    predictions, results = zip(*runs, strict=True)
    joined = {model: torch.cat([values[model].flatten() for values in predictions]) for model in predictions[0]}
    return joined, torch.cat([result.flatten() for result in results])


# -- rounding ---------------------------------------------------------------------------------------------------------


def _list_rules(zero_point: int) -> dict[str, Rule]:
    """Every rule that can be named. Half to even differs where the zero point is added before it."""
    return {
        "half_even": torch.round,
        "half_even, after the zero point is added": lambda r: (r + zero_point).round() - zero_point,
        "half_away": lambda r: r.sign() * (r.abs() + 0.5).floor(),
        "half_up": lambda r: (r + 0.5).floor(),
        "half_down": lambda r: (r - 0.5).ceil(),
        "half_to_zero": lambda r: r.sign() * (r.abs() - 0.5).ceil(),
        "always down": torch.floor,
        "always up": torch.ceil,
        "always towards zero": torch.trunc,
    }


_MODES: Mapping[str, RoundingMode] = {
    "half_even": RoundingMode.HALF_EVEN,
    "half_away": RoundingMode.HALF_AWAY,
    "half_up": RoundingMode.HALF_UP,
    "always down": RoundingMode.DOWN,
    "always towards zero": RoundingMode.TOWARDS_ZERO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How exact ties are rounded: the name of the rule, or a description, and the rule where one fits."""

    text: str
    rule: Rule | None = None
    mode: RoundingMode | None = None
    """What `Requantize` calls it; None: it has no such rounding, or none was seen."""
    is_second: bool = False
    """Whether it follows a rounding before the shift."""


def name_rounding(exact: Tensor, results: Tensor, zero_point: int, twice: Tensor | None = None) -> Rounding:
    """Name the rounding of results that hold exact ties of both signs and parities, and other results.

    Where several rules give these results, all that fit are named; where none fits, the ties are counted. ``twice``:
    what is left of the exact results where they are rounded to integers before they are shifted.
    """
    below = exact.floor()
    is_tie = (exact - below) == 0.5
    if not bool(is_tie.any()):
        return Rounding(text="none seen: no result was an exact tie")
    fitting = {name: rule for name, rule in _list_rules(zero_point).items() if torch.equal(rule(exact), results)}
    if fitting:
        mode = next((_MODES[name] for name in fitting if name in _MODES), None)
        return Rounding(text=" or ".join(fitting), rule=next(iter(fitting.values())), mode=mode)
    if twice is not None:
        for name, rule in _list_rules(zero_point).items():
            if torch.equal(rule(twice), results):
                text = f"{name}, of what was rounded before the shift"
                return Rounding(text=text, rule=rule, mode=_MODES.get(name), is_second=True)
    ties, up = int(is_tie.sum()), int((is_tie & (results == below + 1)).sum())
    down = int((is_tie & (results == below)).sum())
    wrong = int((~is_tie & ((results - exact).abs() > 0.5)).sum())
    elsewhere = "" if up + down == ties else f", {ties - up - down} elsewhere"
    text = f"mixed: of {ties} ties {up} up and {down} down{elsewhere}"
    return Rounding(text=text + (f"; {wrong} other results not to the nearest" if wrong else ""))


# -- rescale ----------------------------------------------------------------------------------------------------------


class RescaleModel(NamedTuple):
    """A model of a rescale: its name; the bits of its factor, in fixed point; whether it computes in float32."""

    text: str
    bits: int | None = None
    is_float32: bool = False
    fraction_bits: int | None = None
    """Bits of the factor behind its point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescale:
    """What was found of a rescale."""

    text: str
    factor: Mapping[str, Any] | None = field(default_factory=dict)
    """What `Requantize` says of it; None: nothing that it has words for."""

    def __str__(self) -> str:
        return self.text


Predictions: TypeAlias = dict[RescaleModel, Tensor]
EXACT = RescaleModel("exact")
TWICE = RescaleModel("31 bits, rounded twice")
FACTOR_BITS = range(6, 33)
_FLOAT32_BITS = 24


def _round_to_bits(factor: float, bits: int, exponent: int | None = None) -> float:
    """Round a factor to a mantissa of this many bits, of its own exponent or of another's (a shift that is shared)."""
    exponent = math.frexp(factor)[1] if exponent is None else exponent
    return math.ldexp(round(math.ldexp(factor, bits - exponent)), exponent - bits)


def _round_number(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _round(value: Tensor) -> Tensor:
    return value.float().double()


def _end_in_float32(products: Mapping[str, Tensor], zero_point: int) -> Predictions:
    """Models that end in a float32 product, given exactly: rounded only, before the zero point is added, or after."""
    models = {}
    for name, product in products.items():
        models[f"float32: {name}"] = _round(product)
        models[f"float32: {name}, then + zero point"] = _round(_round(product) + zero_point) - zero_point
        models[f"float32: {name} + zero point, fused"] = _round(product + zero_point) - zero_point
    return {RescaleModel(text, is_float32=True): values for text, values in models.items()}


def predict_factor(total: Tensor, scales: tuple[float, ...], out: float, zero_point: int) -> Predictions:
    """Predict total · ∏ scales / out, not rounded to whole steps, under every model of a rescale by one factor.

    ``total``: the accumulator's integers. ``scales``: float32 numbers as float64 (s_x and s_w).
    """
    product = math.prod(scales)
    single, inverse = _round_number(product), _round_number(1 / out)
    inverted = _round_number(math.prod(_round_number(1 / _round_number(1 / scale)) for scale in scales))
    in_float = {
        "· (s_x·s_w/s_y)": total * _round_number(single / out),
        "· (s_x·s_w·(1/s_y))": total * _round_number(single * inverse),
        "· s_x·s_w, / s_y": _round(total * single) / out,
        "· s_x·s_w, · (1/s_y)": _round(total * single) * inverse,
        "· s_x·s_w (handed over as 1/s_x, 1/s_w), · (1/s_y)": _round(total * inverted) * inverse,
    }
    predictions = {EXACT: total * product / out, **_end_in_float32(in_float, zero_point)}
    for bits in FACTOR_BITS:
        predictions[RescaleModel(f"{bits} bits", bits)] = total * _round_to_bits(product / out, bits)
    for bits in FACTOR_BITS:
        fraction = round(product / out * 2**bits) / 2**bits or math.nan  # of 0 nothing is left
        predictions[RescaleModel(f"{bits} fraction bits", fraction_bits=bits)] = total * fraction
    return predictions | {TWICE: round_before_shift(total, product / out)}


def round_before_shift(total: Tensor, factor: float) -> Tensor:
    """Return integers times a 31-bit factor in [1/2, 1), rounded to integers, and shifted, as TFLite has them."""
    mantissa, exponent = math.frexp(factor)
    return (total * _round_to_bits(mantissa, 31) + 0.5).floor() * 2.0**exponent


@dataclass(frozen=True, slots=True)
class Term:
    """An operand of an addition or product: its integers without their zero point, and its grid."""

    centred: Tensor
    grid: Grid

    def dequantize(self) -> dict[str, Tensor]:
        """Return its real values as float32, by either way to compute them: (q - z)·s, or q·s + (-z·s) fused."""
        scale, zero_point = self.grid.scale, self.grid.zero_point
        fused = (self.centred + zero_point) * scale - _round_number(zero_point * scale)
        return {"dequantized": _round(self.centred * scale), "dequantized by a fused q·s - z·s": _round(fused)}


def predict_sum(a: Term, b: Term, output: Grid) -> Predictions:
    """Predict (a·s_a + b·s_b) / s_y under every model of an addition."""
    out, scales = output.scale, (a.grid.scale, b.grid.scale)
    sums = {name: _round(value + b.dequantize()[name]) for name, value in a.dequantize().items()}
    first, second = a.centred * _round_number(scales[0] / out), b.centred * _round_number(scales[1] / out)
    in_float = {
        **_divide(sums, out),
        "factors s_a/s_y and s_b/s_y": _round(first) + _round(second),
        "factors s_a/s_y and s_b/s_y, fused": first + _round(second),
    }
    exact = (a.centred * scales[0] + b.centred * scales[1]) / out
    predictions = {EXACT: exact, **_end_in_float32(in_float, output.zero_point)}
    exponent = math.frexp(max(scales) / out)[1]
    for bits in FACTOR_BITS:
        factors = [_round_to_bits(scale / out, bits, exponent) for scale in scales]
        predictions[RescaleModel(f"{bits} bits", bits)] = a.centred * factors[0] + b.centred * factors[1]
    return predictions


def _divide(values: Mapping[str, Tensor], out: float) -> dict[str, Tensor]:
    """Float32 values quantized: divided by the scale, or multiplied by its inverse."""
    inverse = {f"{name}, · (1/s_y)": value * _round_number(1 / out) for name, value in values.items()}
    return inverse | {f"{name}, / s_y": value / out for name, value in values.items()}


def predict_product(a: Term, b: Term, output: Grid) -> Predictions:
    """Predict a·s_a·b·s_b / s_y: one factor for the product of integers, or float32 products of real values."""
    products = {name: _round(value * b.dequantize()[name]) for name, value in a.dequantize().items()}
    by_factor = predict_factor(a.centred * b.centred, (a.grid.scale, b.grid.scale), output.scale, output.zero_point)
    return by_factor | _end_in_float32(_divide(products, output.scale), output.zero_point)


def predict_copy(term: Term, output: Grid) -> Predictions:
    """Predict a·s_a / s_y: integers that are copied to another grid."""
    in_float = _end_in_float32(_divide(term.dequantize(), output.scale), output.zero_point)
    return in_float | predict_factor(term.centred, (term.grid.scale,), output.scale, output.zero_point)


def predict_leaky(term: Term, output: Grid, slope: float) -> Predictions:
    """Predict a·s_a / s_y, by the slope where a is negative: a factor for each sign, or float32 products."""
    out, negative = output.scale, term.centred < 0
    ratios = (slope * term.grid.scale / out, term.grid.scale / out)

    def choose(change: Callable[[float], float]) -> Tensor:
        below, above = map(change, ratios)
        return term.centred * torch.where(negative, below, above)

    sloped = {name: torch.where(negative, _round(value * slope), value) for name, value in term.dequantize().items()}
    by_factor = {"a factor for each sign": choose(_round_number)}
    predictions = {EXACT: choose(float), **_end_in_float32(by_factor | _divide(sloped, out), output.zero_point)}
    for bits in FACTOR_BITS:
        predictions[RescaleModel(f"{bits} bits", bits)] = choose(partial(_round_to_bits, bits=bits))
    for bits in FACTOR_BITS:
        model = RescaleModel(f"{bits} fraction bits", fraction_bits=bits)
        predictions[model] = choose(lambda factor, end=2.0**bits: round(factor * end) / end)  # type: ignore[misc]
    return predictions


def predict_quantize(values: Tensor, output: Grid) -> Predictions:
    """Predict float32 values / scale under every model of quantize. (NUM-01)"""
    return {EXACT: values / output.scale, **_end_in_float32(_divide({"x": values}, output.scale), output.zero_point)}


def keep_inside(predictions: Predictions, results: Tensor) -> tuple[Predictions, Tensor]:
    """Keep the results that are far enough inside of the output's grid, and the predictions for them."""
    inside = predictions[EXACT].abs() < 120
    return {model: values[inside] for model, values in predictions.items()}, results[inside]


def name_rescale(runs: Iterable[tuple[Predictions, Tensor]], rule: Rule) -> Rescale:
    """Name the first model of a rescale whose rounded predictions are exactly the results of all runs."""
    predictions, results = join_runs(runs)
    fitting = [model for model, values in predictions.items() if torch.equal(rule(values), results)]
    in_float = [model.text for model in fitting if model.is_float32]
    bits = [model.bits for model in fitting if model.bits is not None]
    if EXACT in fitting:
        least = f", as by a factor of {min(bits)} bits or more" if bits else ""
        return Rescale(text="exact or float32: these operands do not tell" if in_float else f"exact{least}")
    if in_float:
        return Rescale(text=in_float[0])
    fractions = [model.fraction_bits for model in fitting if model.fraction_bits is not None]
    if bits:
        text = f"fixed point: factor of {min(bits)}{f' to {max(bits)}' if len(bits) > 1 else ''} bits"
        text += f", or of {min(fractions)} fraction bits" if fractions else ""
        is_fraction = min(bits) < LEAST_BITS and bool(fractions)
        return Rescale(
            text=text, factor={"fraction_bits": min(fractions)} if is_fraction else {"multiplier_bits": min(bits)}
        )
    if TWICE in fitting:
        return Rescale(text=f"fixed point: {TWICE.text}", factor={"multiplier_bits": 31, "rounds_twice": True})
    if fractions:
        text = f"fixed point: factor of {min(fractions)} fraction bits"
        return Rescale(text=text, factor={"fraction_bits": min(fractions)})
    return Rescale(text=_format_difference(predictions[EXACT], results), factor=None)


def propose(op: str, rounding: Rounding, rescale: Rescale, declared: Requantize) -> str:
    """Return the line that declares what was measured of an op, and what is declared that this contradicts.

    A float32 factor and the nearest integer need no declaration. What is finer than the probes can see agrees.
    """
    if rescale.factor is None or rounding.rule is None:
        return "nothing that Requantize has words for"
    mode = rounding.mode or RoundingMode.NEAREST
    factor = {"multiplier_bits": 31, "rounds_twice": True} if rounding.is_second else rescale.factor
    words = [f"{name}={value}" for name, value in factor.items()]
    if words or mode.is_directed:
        words += [f"rounding=RoundingMode.{mode.name}"] if mode is not RoundingMode.NEAREST else []
        text = f'requantize_of={{"{op}": Requantize({", ".join(words)})}}'
    else:
        text = "nothing"
    against = list(_list_contradictions(mode, factor, declared))
    return f"{text}; declared is {' and '.join(against)}" if against else text


def _list_contradictions(mode: RoundingMode, factor: Mapping[str, Any], declared: Requantize) -> Iterator[str]:
    named = {RoundingMode.NEAREST, mode}
    if mode is not RoundingMode.NEAREST and declared.rounding not in named:
        yield f"the rounding {declared.rounding.value!r}"
    elif mode.is_directed and declared.rounding is RoundingMode.NEAREST:
        yield "rounding to the nearest"
    bits, fraction_bits = factor.get("multiplier_bits"), factor.get("fraction_bits")
    if bits is not None and declared.fraction_bits is None and bits < (declared.multiplier_bits or _FLOAT32_BITS):
        yield f"multiplier_bits={declared.multiplier_bits}"
    if fraction_bits is not None and fraction_bits < (declared.fraction_bits or math.inf):
        yield f"fraction_bits={declared.fraction_bits}"
    if factor.get("rounds_twice") and not declared.rounds_twice:
        yield "rounds_twice=False"


def _format_difference(exact: Tensor, results: Tensor) -> str:
    """Say how far a rescale that no model fits is from correct rounding, also relative to the result."""
    excess = (results - exact).abs() - 0.5
    off = excess > 0
    if not bool(off.any()):
        return "no model fits, but all results are correctly rounded"
    relative = math.log2(float((excess / exact.abs().clamp(min=0.5))[off].max()))
    return (
        f"no model of one step fits: {int(off.sum())} of {results.numel()} results beyond a tie on the wrong side, "
        f"by {float(excess.max()):.2g} steps or 2^{relative:.0f} of the result at most"
    )


def draw_scales(steps: float, factor: float = 1.0) -> list[tuple[float, float]]:
    """Draw pairs of scales s_x, s_y, float32 numbers with s_x·factor/s_y next to 1/steps but not equal to it.

    Odd multiples of steps/2, rescaled so, are next to a tie, and on which side of it they fall depends on the last
    bits of the arithmetic: of a factor of n bits, if the ratio is off by less than 2^-n. The pairs are off by 2^-25,
    2^-26 and so on, on either side, as far as float32 numbers among 4096 draws come near to that.
    """
    mantissas = torch.randint(2**23, 2**24, (4096,), generator=torch.Generator().manual_seed(0)).double()
    s_x = mantissas * 2.0**-27
    s_y = (s_x * factor * steps).float().double()
    error = s_x * factor * steps / s_y - 1
    chosen = dict.fromkeys(
        int((side * error / 2.0**-bits).where(side * error > 0, torch.inf).log2().abs().argmin())
        for bits in range(25, 37)
        for side in (1, -1)
    )
    return [(float(s_x[index]), float(s_y[index])) for index in chosen if error[index] != 0]


# -- anything else ----------------------------------------------------------------------------------------------------


_BLUR = 2.0**-12
"""By how many steps a prediction may be off before it is rounded: the models differ by much more than a rescale in
float32 or fixed point errs."""


def name_value(models: Mapping[str, Tensor], results: Tensor, rule: Rule, otherwise: str = "none of the models") -> str:
    """Name the first model that predicts the results; `otherwise` where none does."""
    for name, value in models.items():
        if bool(((results == rule(value - _BLUR)) | (results == rule(value + _BLUR))).all()):
            return name
    return otherwise


def padding_integers(grid: Grid) -> dict[str, int]:
    """Return the integers that padding may hold, less the zero point, by name."""
    return {"the zero point": 0, "integer 0": -grid.zero_point, "the lowest integer": grid.centred_ends[0]}


def name_ends(exact: Tensor, results: Tensor, grid: Grid, rule: Rule) -> str:
    """Say where results that go beyond a grid end. All values are in steps from its zero point."""
    low, high = (int(end) + grid.zero_point for end in (results.min(), results.max()))
    if not torch.equal(results, rule(exact).clamp(low - grid.zero_point, high - grid.zero_point)):
        is_inside = (results > grid.centred_ends[0]) & (results < grid.centred_ends[1])
        wraps = ((exact - results).abs() > 1) & is_inside
        return f"no clamp at {low} and {high}: {int(wraps.sum())} results beyond the range come back inside it"
    is_whole = (low, high) == (grid.low, grid.high)
    return f"{low}..{high}, the whole grid" if is_whole else f"{low}..{high}; the grid is {grid.low}..{grid.high}"


def name_relu(exact: Tensor, results: Tensor, grid: Grid, rule: Rule) -> str:
    """Say where a relu cuts results (in steps from the zero point) off."""
    low, high = grid.centred_ends
    cuts = {"at the zero point": 0, "not at all": low, "at integer 0": -grid.zero_point}
    return name_value({name: exact.clamp(max(low, cut), high) for name, cut in cuts.items()}, results, rule)
