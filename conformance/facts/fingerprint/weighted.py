"""Fingerprints of linear layers and convolutions: probes for how sums of products are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fx_quant_conformance.conformance.facts import kernel_models as kernels
from fx_quant_conformance.conformance.facts.dot_products import CHANNELS, DOTS, Dot, Stimulus, build_probe, run_stimulus
from fx_quant_conformance.conformance.facts.probe_models import (
    WEIGHT_END,
    WEIGHT_SCALE,
    Op,
    ProbeModel,
    Site,
    Unmeasured,
    centred_integers_of,
    make_operand,
)
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.long_sums import LARGEST, draw_long_sums


def _stimulate(site: Site, y_grid: Grid, *weights: float, rectified: bool = False) -> Stimulus:
    """All integers of the input times one weight in each channel."""
    x_grid, weight = site.make_grid(2.0**-4), torch.tensor(weights).double()[:, None]
    x = centred_integers_of(x_grid)[:, None]
    return Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid, rectified=rectified)


def _build_example(dot: Dot, site: Site) -> ProbeModel:
    return build_probe(dot, _stimulate(site, site.make_grid(2.0**-9), *[1] * CHANNELS))


def measure_rounding(dot: Dot, site: Site) -> kernels.Rounding:
    """Ties and quarters, once by a ratio of 1/4 and once by 1/64, which a kernel that rounds twice gets wrong."""
    weights = (1, 2, 3, 1, -1, -2, -3, 2)
    stimuli = [
        _stimulate(site, site.make_grid(2.0**-11 * 4 * step), *(step * weight for weight in weights))
        for step in (1, 16)
    ]
    results = torch.cat([run_stimulus(dot, site, stimulus) for stimulus in stimuli])
    exact = torch.cat([stimulus.exact for stimulus in stimuli])
    twice = torch.cat([kernels.round_before_shift(stimulus.sums, stimulus.ratio) for stimulus in stimuli])
    return kernels.name_rounding(exact, results, stimuli[0].y_grid.zero_point, twice)


def measure_rescale(dot: Dot, site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Sums that are odd multiples of L/2, by a ratio s_x·s_w/s_y next to 1/L: next to a tie, all of them.

    Whether a result falls on the right side of its tie depends on the last bits of the arithmetic. With two values of L
    there are also sums at 4^-k of a step from a tie, which coarser arithmetic gets wrong.
    """
    most = _find_amplitude(site.make_grid(1.0))
    odd = 2 * torch.arange(-most, most - 1).double() + 1
    reach = LARGEST * (dot.free - 1) * most // 256
    half = next(3 * 2**k - 1 for k in range(11, 0, -1) if 3 * 2**k <= reach)  # L/2: 1/L has no long runs of bits
    probes = [(odd * half, scales) for scales in kernels.draw_scales(2 * half, WEIGHT_SCALE)]
    for value in (half, half * 4 // 5):
        near = torch.cat([odd * value + sign * (value // 4**k) for k in range(1, 8) for sign in (1, -1)])
        probes.append((near, kernels.draw_scales(2 * value, WEIGHT_SCALE)[0]))
    runs = []
    for sums, (s_x, s_y) in probes:
        x, weight = _split_sums(sums, dot.free)
        x_grid, y_grid = site.make_grid(s_x), site.make_grid(s_y)
        results = run_stimulus(dot, site, Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid))[:, 0]
        runs.append((kernels.predict_factor(sums, (s_x, WEIGHT_SCALE), s_y, y_grid.zero_point), results))
    return kernels.name_rescale(runs, rule)


def _find_amplitude(grid: Grid) -> int:
    """The largest magnitude that the grid has on both sides of its zero point."""
    return min(map(abs, grid.centred_ends))


def _split_sums(sums: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return operands and weights of `width` products for each of the sums: weights of LARGEST, and one of 1."""
    high = (sums / LARGEST).round()
    share = (high / (width - 1)).trunc()
    spare = high - share * (width - 1)
    column = torch.arange(width - 1)
    big = share[:, None] + (column < spare.abs()[:, None]) * spare.sign()[:, None]
    weight = torch.full((CHANNELS, width), float(LARGEST)).double()
    weight[:, 0] = 1
    return torch.cat([(sums - LARGEST * high)[:, None], big], 1), weight


_NOTHING_LOST = "int32"


def measure_accumulator(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """The largest products, which overflow 16 bits by pairs; then sums beyond 2^24 that come back to small ones.

    ``int32`` stands for every accumulator in which nothing is lost.
    """
    text = _measure_short_sums(dot, site, rule)
    if text != _NOTHING_LOST:
        return text
    return f"holds {dot.free} largest products: 18 bits or more" if dot.most else _measure_long_sums(dot, site, rule)


def _measure_short_sums(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """Largest products: in every place, so that neighbours add up in pairs; then in few places, no two neighbours."""
    x_grid, width = site.make_grid(2.0**-4), min(dot.free, 62)
    apart = torch.zeros(width)
    apart[:: 18 if width > 18 else 2] = 1  # in no layout of channels and taps are two of these a pair
    low, high = x_grid.centred_ends
    runs = []
    for places in (torch.ones(width), apart):
        weight = (places * WEIGHT_END).double().repeat(CHANNELS, 1)
        weight[1::2] *= -1
        largest = high * WEIGHT_END * int(places.sum())
        y_grid = site.make_grid(2.0**-11 * 2.0 ** (largest // 64).bit_length())
        x = torch.full((1, width), float(high)).double()
        stimulus = Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid, rest=low)
        results = run_stimulus(dot, site, stimulus)
        sums = _predict_sums(stimulus, (high - low) * weight, low * weight.sum(1))
        runs.append(({name: (s * stimulus.ratio).clamp(*y_grid.centred_ends) for name, s in sums.items()}, results))
    wrong = f"none of the models: sums of {largest} are found as {float(results[0, 0]) / stimulus.ratio:.0f}"
    return kernels.name_value(*kernels.join_runs(runs), rule, wrong)


def _predict_sums(stimulus: Stimulus, raw: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Predict the sums of a probe with one row of operands.

    ``raw``: the products as a kernel for unsigned operands has them; it adds ``shift`` to their sums afterwards.
    """
    sums, end = stimulus.sums[0], 2.0**15
    pairs = nn.functional.pad(raw, (0, raw.shape[1] % 2)).reshape(len(raw), -1, 2).sum(2)
    return {
        _NOTHING_LOST: sums,
        "sums of two products saturate in int16": pairs.clamp(-end, end - 1).sum(1) + shift,
        "int16, saturating": sums.clamp(-end, end - 1),
        "int16, saturating, the zero point taken off afterwards": raw.sum(1).clamp(-end, end - 1) + shift,
        "int16, wraps around": (sums + end).remainder(2 * end) - end,
    }


def _measure_long_sums(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """Sums pass 2^24 on the way and come back to small ones: float32 loses units."""
    x_grid = site.make_grid(2.0**-4)
    sums = draw_long_sums(_find_amplitude(x_grid))
    stimulus = Stimulus(x=sums.x, weight=sums.weight, x_grid=x_grid, y_grid=site.make_grid(2.0**-11 * 3))
    error = (run_stimulus(dot, site, stimulus) - rule(sums.totals / 3)).abs().max() * 3
    if not bool(error):
        return _NOTHING_LOST
    return f"float32 or the like: sums that pass 2^24 come back wrong, by up to {float(error):.0f}"


def measure_padding(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """An input of one element at its zero point, with padding around it: the result shows the padding's integer."""
    if not dot.pads:
        raise Unmeasured("no padding enters a sum of this op")
    weight = torch.zeros(CHANNELS, dot.taps).double()
    weight[:, 0], weight[1::2, -1], weight[:, dot.taps // 2] = 2, 4, WEIGHT_END
    total = weight[:, 0] + weight[:, -1]
    runs = []
    for share in (0.1, 0.5, 0.9):
        y_grid = site.make_grid(2.0**-11 * 16)
        x_grid = site.make_grid(2.0**-4, round(y_grid.low + share * (y_grid.high - y_grid.low)))
        x = torch.zeros(1, CHANNELS if dot.most else 1, *[1] * dot.rank)
        model = nn.Sequential(dot.build(weight * WEIGHT_SCALE, None))
        results = site.run(ProbeModel(model=model, inputs=(make_operand(x_grid, x),), output=y_grid))
        runs.append(({name: value * total / 16 for name, value in kernels.padding_integers(x_grid).items()}, results))
    predictions, results = kernels.join_runs(runs)
    return kernels.name_value(predictions, results, rule, f"none of the models: results {results.tolist()}")


_FRACTIONS = (0.45, -0.45, 0.55, 1.5, -1.5, 2.5, 100.4, -60.3)
_LARGE = (40000.0, -40000.0, 20000.0, -20000.0, 33000.0, -33000.0, 400000.0, -400000.0)


def measure_bias(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """Biases of fractions of the accumulator's step s_x·s_w, then ones beyond 16 bits."""
    runs = []
    for numbers, ratio in ((_FRACTIONS, 2.0**-0.5), (_LARGE, 2.0**-12.5)):
        x_grid, steps = site.make_grid(2.0**-4), torch.tensor(numbers).double()
        y_grid = site.make_grid(float(torch.tensor(2.0**-11 / ratio)))
        x = centred_integers_of(x_grid)[:: 1 if ratio > 0.5 else 16, None]
        weight, bias = torch.ones(CHANNELS, 1).double(), (steps * 2.0**-11).float()
        stimulus = Stimulus(x=x, weight=weight, x_grid=x_grid, y_grid=y_grid, bias=bias)
        results = run_stimulus(dot, site, stimulus)
        predictions = _predict_bias(stimulus, steps, rule)
        runs.append(({name: values.clamp(*y_grid.centred_ends) for name, values in predictions.items()}, results))
    return kernels.name_value(*kernels.join_runs(runs), rule)


def _predict_bias(stimulus: Stimulus, steps: Tensor, rule: kernels.Rule) -> dict[str, Tensor]:
    """Results (batch × channels) by how a bias, in steps of the accumulator, is held and added."""
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


def measure_saturation(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """Results far beyond both ends of the output's range."""
    stimulus = _stimulate(site, site.make_grid(2.0**-11 * 16), 1, -1, 16, -16, 32, -32, 63, -63)
    return kernels.name_ends(stimulus.exact, run_stimulus(dot, site, stimulus), stimulus.y_grid, rule)


def measure_relu(dot: Dot, site: Site, rule: kernels.Rule) -> str:
    """A relu after the op: where results below zero end, with a zero point that is neither 0 nor the lowest."""
    stimulus = _stimulate(site, site.make_relu_grid(2.0**-11 * 4), 1, -1, 2, -2, 3, -3, 1, 2, rectified=True)
    return kernels.name_relu(stimulus.exact, run_stimulus(dot, site, stimulus), stimulus.y_grid, rule)


PROPERTIES: Mapping[str, Callable[[Dot, Site, kernels.Rule], str | kernels.Rescale]] = {
    "rescale": measure_rescale,
    "accumulator": measure_accumulator,
    "padding": measure_padding,
    "bias": measure_bias,
    "saturation": measure_saturation,
    "relu": measure_relu,
}
OPS: Mapping[str, Op] = {
    name: Op(
        patterns=(dot.pattern,),
        example=partial(_build_example, dot),
        rounding=partial(measure_rounding, dot),
        properties=tuple((title, partial(measure_property, dot)) for title, measure_property in PROPERTIES.items()),
        has_weight=True,
    )
    for name, dot in DOTS.items()
}
