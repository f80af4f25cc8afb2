"""Models of the arithmetic that a kernel may use, and naming the one whose predictions are what was found.

A fingerprint's probe makes operands on which the models differ. All values are float64, in output steps from the zero
point unless said otherwise; ``Rule`` rounds them to whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from conformance.oracle.grids import Grid

Rule: TypeAlias = Callable[[Tensor], Tensor]

# -- rounding ---------------------------------------------------------------------------------------------------------


def rounding_rules(zero_point: int) -> dict[str, Rule]:
    """Every rule that is told apart, by name. Half to even differs where the zero point is added before it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What was seen at exact ties: the name of the rule, or a description, and the rule where one fits."""

    text: str
    rule: Rule | None = None


def name_rounding(exact: Tensor, found: Tensor, zero_point: int) -> Rounding:
    """Name the rounding of results that hold exact ties of both signs and parities, and other results.

    Where rules cannot be told apart by these results, all that fit are named; where none fits, the ties are counted.
    """
    below = exact.floor()
    is_tie = (exact - below) == 0.5
    if not bool(is_tie.any()):
        return Rounding(text="none seen: no result was an exact tie")
    fitting = {name: rule for name, rule in rounding_rules(zero_point).items() if torch.equal(rule(exact), found)}
    if fitting:
        return Rounding(text=" or ".join(fitting), rule=next(iter(fitting.values())))
    ties, up = int(is_tie.sum()), int((is_tie & (found == below + 1)).sum())
    down = int((is_tie & (found == below)).sum())
    others = ~is_tie & ((found - exact).abs() > 0.5)
    beside = "" if up + down == ties else f", {ties - up - down} elsewhere"
    text = f"mixed: of {ties} ties {up} up and {down} down{beside}"
    return Rounding(text=text + (f"; {int(others.sum())} other results not to the nearest" if others.any() else ""))


# -- rescale ----------------------------------------------------------------------------------------------------------

MOST_BITS, LEAST_BITS = 32, 6  # of a fixed-point factor


def to_bits(factor: float, bits: int, exponent: int | None = None) -> float:
    """Round a factor to a mantissa of so many bits, of its own exponent or of another's (a shift that is shared)."""
    exponent = math.frexp(factor)[1] if exponent is None else exponent
    return math.ldexp(round(math.ldexp(factor, bits - exponent)), exponent - bits)


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _float(value: Tensor) -> Tensor:
    return value.float().double()


def _in_float32(products: Mapping[str, Tensor], zero_point: int) -> dict[str, Tensor]:
    """Models that end in a float32 product, given exactly: rounded alone, before the zero point is added, or after."""
    models = {}
    for name, product in products.items():
        models[f"float32: {name}"] = _float(product)
        models[f"float32: {name}, then + zero point"] = _float(_float(product) + zero_point) - zero_point
        models[f"float32: {name} + zero point, fused"] = _float(product + zero_point) - zero_point
    return models


def factor_models(total: Tensor, scales: tuple[float, ...], out: float, zero_point: int) -> dict[str, Tensor]:
    """Predict total · ∏ scales / out, not rounded to whole steps, under every model of a rescale by one factor.

    ``total``: the accumulator's integers. ``scales``: float32 numbers as float64 (s_x and s_w).
    """
    product = math.prod(scales)
    single, inverse = _single(product), _single(1 / out)
    inverted = _single(math.prod(_single(1 / _single(1 / scale)) for scale in scales))
    in_float = {
        "· (s_x·s_w/s_y)": total * _single(single / out),
        "· (s_x·s_w·(1/s_y))": total * _single(single * inverse),
        "· s_x·s_w, / s_y": _float(total * single) / out,
        "· s_x·s_w, · (1/s_y)": _float(total * single) * inverse,
        "· s_x·s_w (handed over as 1/s_x, 1/s_w), · (1/s_y)": _float(total * inverted) * inverse,
    }
    fixed = {f"{bits} bits": total * to_bits(product / out, bits) for bits in range(LEAST_BITS, MOST_BITS + 1)}
    twice = {"31 bits, rounded twice": _rounded_twice(total, product / out)}
    return {"exact": total * product / out, **_in_float32(in_float, zero_point), **fixed, **twice}


def _rounded_twice(total: Tensor, factor: float) -> Tensor:
    """A 31-bit factor in [1/2, 1), rounded to an integer, then a shift right: as in gemmlowp and TFLite."""
    mantissa, exponent = math.frexp(factor)
    high = (total * to_bits(mantissa, 31) + 0.5).floor()
    return high * 2.0**exponent


@dataclass(frozen=True, slots=True)
class Term:
    """An operand of an addition or product: its integers without their zero point, and its grid."""

    centred: Tensor
    grid: Grid

    def dequantized(self) -> dict[str, Tensor]:
        """Its real values as float32, by either way to compute them: (q - z)·s, or q·s + (-z·s) fused."""
        scale, zero_point = self.grid.scale, self.grid.zero_point
        fused = (self.centred + zero_point) * scale - _single(zero_point * scale)
        return {"dequantized": _float(self.centred * scale), "dequantized by a fused q·s - z·s": _float(fused)}


def sum_models(a: Term, b: Term, output: Grid) -> dict[str, Tensor]:
    """Predict (a·s_a + b·s_b) / s_y under every model of an addition."""
    out, scales = output.scale, (a.grid.scale, b.grid.scale)
    sums = {name: _float(value + b.dequantized()[name]) for name, value in a.dequantized().items()}
    first, second = a.centred * _single(scales[0] / out), b.centred * _single(scales[1] / out)
    in_float = {
        **_over(sums, out),
        "factors s_a/s_y and s_b/s_y": _float(first) + _float(second),
        "factors s_a/s_y and s_b/s_y, fused": first + _float(second),
    }
    exponent = math.frexp(max(scales) / out)[1]
    fixed = {}
    for bits in range(LEAST_BITS, MOST_BITS + 1):
        factors = [to_bits(scale / out, bits, exponent) for scale in scales]
        fixed[f"{bits} bits"] = a.centred * factors[0] + b.centred * factors[1]
    exact = (a.centred * scales[0] + b.centred * scales[1]) / out
    return {"exact": exact, **_in_float32(in_float, output.zero_point), **fixed}


def _over(values: Mapping[str, Tensor], out: float) -> dict[str, Tensor]:
    """Float32 values quantized: divided by the scale, or multiplied by its inverse."""
    inverse = {f"{name}, · (1/s_y)": value * _single(1 / out) for name, value in values.items()}
    return inverse | {f"{name}, / s_y": value / out for name, value in values.items()}


def product_models(a: Term, b: Term, output: Grid) -> dict[str, Tensor]:
    """Predict a·s_a·b·s_b / s_y: one factor for the product of integers, or float32 products of real values."""
    products = {name: _float(value * b.dequantized()[name]) for name, value in a.dequantized().items()}
    by_factor = factor_models(a.centred * b.centred, (a.grid.scale, b.grid.scale), output.scale, output.zero_point)
    return by_factor | _in_float32(_over(products, output.scale), output.zero_point)


def copy_models(term: Term, output: Grid) -> dict[str, Tensor]:
    """Predict a·s_a / s_y: what becomes of integers that are copied to another grid."""
    in_float = _in_float32(_over(term.dequantized(), output.scale), output.zero_point)
    return in_float | factor_models(term.centred, (term.grid.scale,), output.scale, output.zero_point)


def quantize_models(values: Tensor, output: Grid) -> dict[str, Tensor]:
    """Predict float32 values / scale under every model of quantize. (NUM-01)"""
    return {"exact": values / output.scale} | _in_float32(_over({"x": values}, output.scale), output.zero_point)


def joined(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join, model by model, what is predicted for several runs."""
    return {name: torch.cat([each[name].flatten() for each in models]) for name in models[0]}


def name_rescale(models: Mapping[str, Tensor], found: Tensor, rule: Rule) -> str:
    """Name the model of a rescale whose rounded predictions are exactly what was found, the first where several are."""
    fitting = [name for name, value in models.items() if torch.equal(rule(value), found)]
    in_float = [name for name in fitting if name.startswith("float32")]
    bits = [int(name.split()[0]) for name in fitting if name.endswith(" bits")]
    if "exact" in fitting:
        least = f", as by a factor of {min(bits)} bits or more" if bits else ""
        return "exact or float32: these operands do not tell" if in_float else f"exact{least}"
    if in_float:
        return in_float[0]
    if bits:
        return f"fixed point: factor of {_range(bits)} bits"
    if fitting:
        return f"fixed point: {fitting[0]}"
    return _described(models["exact"], found)


def _described(exact: Tensor, found: Tensor) -> str:
    """Say how far a rescale that no model fits is from correct rounding, also relative to the result."""
    excess = (found - exact).abs() - 0.5
    off = excess > 0
    if not bool(off.any()):
        return "no model fits, but all results are correctly rounded"
    relative = math.log2(float((excess / exact.abs().clamp(min=0.5))[off].max()))
    return (
        f"no model of one step fits: {int(off.sum())} of {found.numel()} results beyond a tie on the wrong side, "
        f"by {float(excess.max()):.2g} steps or 2^{relative:.0f} of the result at most"
    )


def _range(bits: list[int]) -> str:
    return str(min(bits)) if len(bits) == 1 else f"{min(bits)} to {max(bits)}"


def near_ties(steps: float, beside: float = 1.0) -> list[tuple[float, float]]:
    """Draw pairs of scales s_x, s_y, float32 numbers with s_x·beside/s_y next to 1/steps but not equal to it.

    Odd multiples of steps/2, rescaled so, are next to a tie, and on which side of it they fall depends on the last
    bits of the arithmetic: of a factor of n bits, if the ratio is off by less than 2^-n. The pairs are off by 2^-25,
    2^-26 and so on, on either side, as far as float32 numbers among 4096 draws come near to that.
    """
    mantissas = torch.randint(2**23, 2**24, (4096,), generator=torch.Generator().manual_seed(0)).double()
    s_x = mantissas * 2.0**-27
    s_y = (s_x * beside * steps).float().double()
    error = s_x * beside * steps / s_y - 1
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


def name_value(models: Mapping[str, Tensor], found: Tensor, rule: Rule) -> str | None:
    """Name the first model whose predictions are what was found; None: no model fits."""
    for name, value in models.items():
        if bool(((found == rule(value - _BLUR)) | (found == rule(value + _BLUR))).all()):
            return name
    return None


def name_ends(exact: Tensor, found: Tensor, grid: Grid, rule: Rule) -> str:
    """Say where results that go beyond a grid end. All values are in steps from its zero point."""
    low, high = (int(end) + grid.zero_point for end in (found.min(), found.max()))
    if not torch.equal(found, rule(exact).clamp(low - grid.zero_point, high - grid.zero_point)):
        far = (exact - found).abs() > 1
        wraps = far & (found + grid.zero_point > grid.low) & (found + grid.zero_point < grid.high)
        return f"no clamp at {low} and {high}: {int(wraps.sum())} results beyond the range come back inside it"
    is_whole = (low, high) == (grid.low, grid.high)
    return f"{low}..{high}, the whole grid" if is_whole else f"{low}..{high}; the grid is {grid.low}..{grid.high}"


def name_relu(exact: Tensor, found: Tensor, grid: Grid, rule: Rule) -> str:
    """Say where a relu cuts results (in steps from the zero point) off."""
    low, high = grid.low - grid.zero_point, grid.high - grid.zero_point
    cuts = {"at the zero point": 0, "not at all": low, "at integer 0": -grid.zero_point}
    models = {name: exact.clamp(max(low, cut), high) for name, cut in cuts.items()}
    return name_value(models, found, rule) or "none of the models"
