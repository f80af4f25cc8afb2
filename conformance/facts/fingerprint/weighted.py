"""Fingerprints of linear layers and convolutions: probes for what becomes of sums of products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from conformance.facts.dot_products import BIG, CHANNELS, DOTS, Dot, Stimulus, measure, probe_model
from conformance.facts.kernel_models import (
    Rounding,
    Rule,
    factor_models,
    joined,
    name_ends,
    name_relu,
    name_rescale,
    name_rounding,
    name_value,
    near_ties,
)
from conformance.facts.probe_models import (
    WEIGHT_END,
    WEIGHT_SCALE,
    Op,
    ProbeModel,
    Site,
    Unmeasured,
    all_integers,
    operand,
)
from conformance.oracle.grids import Grid


def _channels(*weights: float) -> Tensor:
    """One column of weights: so much in each channel."""
    return torch.tensor(weights).double()[:, None]


def _example(dot: Dot, site: Site) -> ProbeModel:
    x_grid = site.grid(2.0**-4)
    weight = torch.ones(CHANNELS, 1).double()
    return probe_model(
        dot, Stimulus(x=all_integers(x_grid)[:, None], weight=weight, x_grid=x_grid, y_grid=site.grid(2.0**-9))
    )


def rounding(dot: Dot, site: Site) -> Rounding:
    """Ties and quarters, once by a ratio of 1/4 and once by 1/64, which a kernel that rounds twice gets wrong."""
    x_grid = site.grid(2.0**-4)
    weight, x = _channels(1, 2, 3, 1, -1, -2, -3, 2), all_integers(x_grid)[:, None]
    stimuli = [
        Stimulus(x=x, weight=weight * step, x_grid=x_grid, y_grid=site.grid(2.0**-11 * 4 * step)) for step in (1, 16)
    ]
    found = torch.cat([measure(dot, site, stimulus) for stimulus in stimuli])
    return name_rounding(torch.cat([stimulus.exact for stimulus in stimuli]), found, stimuli[0].y_grid.zero_point)


def rescale(dot: Dot, site: Site, rule: Rule) -> str:
    """Sums that are odd multiples of L/2, by a ratio s_x·s_w/s_y next to 1/L: next to a tie, all of them.

    Whether a result falls on the right side of its tie depends on the last bits of the arithmetic. With two values of L
    there are also sums at 4^-k of a step from a tie, which coarser arithmetic gets wrong.
    """
    most = _amplitude(site.grid(1.0))
    odd = 2 * torch.arange(-most, most - 1).double() + 1
    reach = BIG * (dot.free - 1) * most // 256
    half = next(3 * 2**k - 1 for k in range(11, 0, -1) if 3 * 2**k <= reach)  # L/2: 1/L has no long runs of bits
    other = half * 4 // 5
    runs = [(odd * half, scales) for scales in near_ties(2 * half, WEIGHT_SCALE)]
    runs += [(_around(odd, each), near_ties(2 * each, WEIGHT_SCALE)[0]) for each in (half, other)]
    models, found = [], []
    for sums, (s_x, s_y) in runs:
        x, weight = _adding_up_to(sums, dot.free)
        x_grid, y_grid = site.grid(s_x), site.grid(s_y)
        found.append(measure(dot, site, Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid))[:, 0])
        models.append(factor_models(sums, (s_x, WEIGHT_SCALE), s_y, y_grid.zero_point))
    return name_rescale(joined(models), torch.cat(found), rule)


def _around(odd: Tensor, half: int) -> Tensor:
    """Return sums near odd multiples of `half`."""
    return torch.cat([odd * half + sign * (half // 4**k) for k in range(1, 8) for sign in (1, -1)])


def _amplitude(grid: Grid) -> int:
    """The largest magnitude that the grid has on both sides of its zero point."""
    return min(grid.zero_point - grid.low, grid.high - grid.zero_point)


def _adding_up_to(sums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return operands and weights of so many products whose sums are given: weights of BIG, and one of 1."""
    high = (sums / BIG).round()
    share = (high / (width - 1)).trunc()
    spare = high - share * (width - 1)
    column = torch.arange(width - 1)
    big = share[:, None] + (column < spare.abs()[:, None]) * spare.sign()[:, None]
    weight = torch.full((CHANNELS, width), float(BIG)).double()
    weight[:, 0] = 1
    return torch.cat([(sums - BIG * high)[:, None], big], 1), weight


def accumulator(dot: Dot, site: Site, rule: Rule) -> str:
    """The largest products, which overflow 16 bits by pairs; then sums beyond 2^24 that come back to small ones.

    ``int32`` stands for every accumulator in which nothing is lost.
    """
    found = _short_sums(dot, site, rule)
    if found != "int32":
        return found
    return _long_sums(dot, site, rule) if not dot.most else f"holds {dot.free} largest products: 18 bits or more"


def _short_sums(dot: Dot, site: Site, rule: Rule) -> str:
    """Largest products: in every place, so that neighbours add up in pairs; then in few places, no two neighbours."""
    x_grid, width = site.grid(2.0**-4), min(dot.free, 62)
    apart = torch.zeros(width)
    apart[:: 18 if width > 18 else 2] = 1  # in no layout of channels and taps are two of these a pair
    found, models = [], []
    for places in (torch.ones(width), apart):
        weight = (places * WEIGHT_END).double().repeat(CHANNELS, 1)
        weight[1::2] *= -1
        low, high = x_grid.low - x_grid.zero_point, x_grid.high - x_grid.zero_point
        largest = high * WEIGHT_END * int(places.sum())
        y_grid = site.grid(2.0**-11 * 2.0 ** (largest // 64).bit_length())
        x = torch.full((1, width), float(high)).double()
        stimulus = Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid, rest=low)
        found.append(measure(dot, site, stimulus).flatten())
        ends = (y_grid.low - y_grid.zero_point, y_grid.high - y_grid.zero_point)
        predicted = _accumulated(stimulus, (high - low) * weight, low * weight.sum(1))
        models.append({name: (sums * stimulus.ratio).clamp(*ends) for name, sums in predicted.items()})
    text = f"none of the models: sums of {largest} are found as {float(found[1][0]) / stimulus.ratio:.0f}"
    return name_value(joined(models), torch.cat(found), rule) or text


def _accumulated(stimulus: Stimulus, raw: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Predict the sums of a probe with one row of operands.

    ``raw``: the products as a kernel for unsigned operands has them; it adds ``shift`` to their sums afterwards.
    """
    sums, end = stimulus.sums[0], 2.0**15
    return {
        "int32": sums,
        "sums of two products saturate in int16": _pairs(raw).clamp(-end, end - 1).sum(1) + shift,
        "int16, saturating": sums.clamp(-end, end - 1),
        "int16, saturating, the zero point taken off afterwards": raw.sum(1).clamp(-end, end - 1) + shift,
        "int16, wraps around": (sums + end).remainder(2 * end) - end,
    }


def _pairs(products: Tensor) -> Tensor:
    if products.shape[1] % 2:
        products = torch.cat([products, torch.zeros(len(products), 1)], 1)
    return products[:, ::2] + products[:, 1::2]


LONG = 2**16
"""Products on the way up, and as many on the way down: up to 4·10^8, and 2^24 even where there are 16 partial sums."""


def _long_sums(dot: Dot, site: Site, rule: Rule) -> str:
    """Sums climb past 2^24 by odd products, and come down by the same ones in another order: float32 loses units."""
    generator = torch.Generator().manual_seed(0)
    x_grid = site.grid(2.0**-4)
    most = _amplitude(x_grid)
    up = torch.randint(most * 3 // 4, most + 1, (4, LONG), generator=generator).double()
    weights = torch.randint(BIG * 3 // 4, BIG + 1, (CHANNELS, LONG), generator=generator).double()
    order = torch.randperm(LONG, generator=generator)
    last = torch.arange(-2, 2).double()[:, None] * 16
    x = torch.cat([up, up[:, order], last], 1)
    weight = torch.cat([weights, -weights[:, order], torch.ones(CHANNELS, 1)], 1)
    stimulus = Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=site.grid(2.0**-11 * 3))
    found = measure(dot, site, stimulus)
    error = (found - rule(last / 3)).abs().max() * 3
    if not bool(error):
        return "int32"
    return f"float32 or the like: sums that pass 2^24 come back wrong, by up to {float(error):.0f}"


def padding(dot: Dot, site: Site, rule: Rule) -> str:
    """An input of one element at its zero point, with padding around it: the result shows the padding's integer."""
    if not dot.pads:
        raise Unmeasured("no padding enters a sum of this op")
    weight = torch.zeros(CHANNELS, dot.taps).double()
    weight[:, 0], weight[1::2, -1], weight[:, dot.taps // 2] = 2, 4, WEIGHT_END
    total = weight[:, 0] + weight[:, -1]
    found, models = [], []
    for scale_of in (0.1, 0.5, 0.9):
        low, high = site.grid(1.0).low, site.grid(1.0).high
        x_grid = site.grid(2.0**-4, round(low + scale_of * (high - low)))
        y_grid = site.grid(2.0**-11 * 16)
        channels = CHANNELS if dot.most else 1
        x = torch.zeros(1, channels, *[1] * dot.rank)
        model = nn.Sequential(dot.module(weight * WEIGHT_SCALE, None))
        found.append(site.run(ProbeModel(model=model, inputs=(operand(x_grid, x),), output=y_grid)).flatten())
        values = {"the zero point": 0, "integer 0": -x_grid.zero_point, "the lowest integer": low - x_grid.zero_point}
        models.append({name: value * total / 16 for name, value in values.items()})
    return (
        name_value(joined(models), torch.cat(found), rule) or f"none of the models: results {torch.cat(found).tolist()}"
    )


_FRACTIONS = (0.45, -0.45, 0.55, 1.5, -1.5, 2.5, 100.4, -60.3)
_LARGE = (40000.0, -40000.0, 20000.0, -20000.0, 33000.0, -33000.0, 400000.0, -400000.0)


def bias(dot: Dot, site: Site, rule: Rule) -> str:
    """Biases of fractions of the accumulator's step s_x·s_w, then ones beyond 16 bits."""
    found, models = [], []
    for steps, ratio in ((_FRACTIONS, 2.0**-0.5), (_LARGE, 2.0**-12.5)):
        x_grid = site.grid(2.0**-4)
        y_grid = site.grid(float(torch.tensor(2.0**-11 / ratio)))
        x = all_integers(x_grid)[:: 1 if ratio > 0.5 else 16, None]
        value = torch.tensor(steps).double() * 2.0**-11
        weight = torch.ones(CHANNELS, 1).double()
        stimulus = Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid, bias=value.float())
        found.append(measure(dot, site, stimulus).flatten())
        ends = (y_grid.low - y_grid.zero_point, y_grid.high - y_grid.zero_point)
        predicted = _bias_models(stimulus, torch.tensor(steps).double(), rule)
        models.append({name: model.clamp(*ends) for name, model in predicted.items()})
    return name_value(joined(models), torch.cat(found), rule) or "none of the models"


def _bias_models(stimulus: Stimulus, steps: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Results (batch × channels) by what becomes of a bias of so many accumulator steps."""
    to_int8 = steps.abs().max() / 127
    end = 2.0**15
    held = {
        "float": steps,
        "int32 at s_x·s_w, half_even": steps.round(),
        "int32 at s_x·s_w, half_away": steps.sign() * (steps.abs() + 0.5).floor(),
        "int32 at s_x·s_w, cut off": steps.trunc(),
        "int16 at s_x·s_w, saturating": steps.round().clamp(-end, end - 1),
        "int8 at a scale of its own": (steps / to_int8).round() * to_int8,
        "dropped": torch.zeros_like(steps),
        "subtracted": -steps,
    }
    models = {name: (stimulus.sums + value) * stimulus.ratio for name, value in held.items()}
    return models | {"added after the rescale": rule(stimulus.exact) + rule(steps * stimulus.ratio)}


def saturation(dot: Dot, site: Site, rule: Rule) -> str:
    """Results far beyond both ends of the output's range."""
    x_grid = site.grid(2.0**-4)
    weight = _channels(1, -1, 16, -16, 32, -32, 63, -63)
    y_grid = site.grid(2.0**-11 * 16)
    stimulus = Stimulus(x=all_integers(x_grid)[:, None], weight=weight, x_grid=x_grid, y_grid=y_grid)
    return name_ends(stimulus.exact, measure(dot, site, stimulus), y_grid, rule)


def relu(dot: Dot, site: Site, rule: Rule) -> str:
    """A relu behind the op: where results below zero end, with a zero point that is neither 0 nor the lowest."""
    if not site.has_relu:
        raise Unmeasured("the config claims no relu behind this op")
    x_grid, y_grid = site.grid(2.0**-4), site.relu_grid(2.0**-11 * 4)
    weight = _channels(1, -1, 2, -2, 3, -3, 1, 2)
    stimulus = Stimulus(x=all_integers(x_grid)[:, None], weight=weight, x_grid=x_grid, y_grid=y_grid, rectified=True)
    return name_relu(stimulus.exact, measure(dot, site, stimulus), y_grid, rule)


PROPERTIES: Mapping[str, Callable[[Dot, Site, Rule], str]] = {
    "rescale": rescale,
    "accumulator": accumulator,
    "padding": padding,
    "bias": bias,
    "saturation": saturation,
    "relu": relu,
}


def _op(dot: Dot) -> Op:
    properties = tuple((name, partial(measure, dot)) for name, measure in PROPERTIES.items())
    return Op(
        patterns=(dot.pattern,),
        example=partial(_example, dot),
        rounding=partial(rounding, dot),
        properties=properties,
        has_weight=True,
    )


OPS: Mapping[str, Op] = {name: _op(dot) for name, dot in DOTS.items()}
