"""Fingerprints of ops without weights other than sums and products: means, cat, functions, and quantize itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.facts import kernel_models as kernels
from fx_quant_conformance.conformance.facts.probe_models import (
    Op,
    ProbeModel,
    Site,
    build_one_input,
    build_two_inputs,
    centred_integers_of,
    make_operand,
)
from fx_quant_conformance.conformance.oracle.grids import Grid

# -- means ------------------------------------------------------------------------------------------------------------

CHANNELS = 8
_ADAPTIVE = (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)


def _probe_mean(site: Site, images: Tensor) -> ProbeModel:
    """A mean over whole images."""
    grid = site.make_grid(2.0**-4)
    argument: Any = images.shape[-1]
    if site.pattern in (torch.mean, "mean"):
        argument = (2, 3)
    elif site.pattern in _ADAPTIVE:
        argument = 1
    model = build_one_input(site.pattern, argument)
    return ProbeModel(model=model, inputs=(make_operand(grid, images),), output=grid)


def _run_means(site: Site, sums: Tensor, width: int) -> Tensor:
    """Run on images (batch × channels × width × width), the integers of each channel adding up to one of the sums."""
    count = width * width
    share = (sums / count).floor()
    spare = sums - share * count
    values = share[:, None] + (torch.arange(count) < spare[:, None])
    return site.run(_probe_mean(site, values.reshape(-1, CHANNELS, width, width))).flatten()


def _measure_mean_rounding(site: Site) -> kernels.Rounding:
    """Means of four: whole, quarters and ties."""
    sums = torch.arange(-4 * 60, 4 * 60).double()
    return kernels.name_rounding(sums / 4, _run_means(site, sums, 2), site.make_grid(1.0).zero_point)


def _measure_mean_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Means of 225 numbers whose sum is as near to a tie as it can be: 1/450 of a step."""
    sums = ((torch.arange(-60, 60).double() + 0.5) * 225).floor()
    predictions = kernels.predict_factor(sums, (1.0,), 225.0, site.make_grid(1.0).zero_point)
    return kernels.name_rescale([(predictions, _run_means(site, sums, 15))], rule)


def _measure_mean_accumulator(site: Site, rule: kernels.Rule) -> str:
    """289 equal numbers, at either end of the range: their sum, with or without the zero point, passes 16 bits."""
    ends = torch.tensor(site.make_grid(1.0).centred_ends).double().repeat_interleave(CHANNELS)
    results = _run_means(site, ends * 289, 17)
    wrong = f"means of 289 equal numbers {sorted(set(ends.tolist()))} are found as {sorted(set(results.tolist()))}"
    return kernels.name_value({"holds 289 numbers at an end of the range: 17 bits or more": ends}, results, rule, wrong)


def _measure_mean_padding(site: Site, rule: kernels.Rule) -> str:
    """One element, padded all around, under windows of four that each hold it once."""
    grid = site.make_grid(2.0**-4)
    values = centred_integers_of(grid)[:, None].expand(-1, 4)
    inputs = (make_operand(grid, values[:, :1, None, None]),)
    results = site.run(ProbeModel(model=build_one_input(site.pattern, 2, 1, 1), inputs=inputs, output=grid))
    models = {name: (values + 3 * integer) / 4 for name, integer in kernels.padding_integers(grid).items()}
    return kernels.name_value(models | {"nothing: not counted": values}, results.flatten(1), rule)


_MEAN = Op(
    patterns=(torch.mean, "mean"),
    example=lambda site: _probe_mean(site, torch.zeros(1, CHANNELS, 2, 2)),
    rounding=_measure_mean_rounding,
    properties=(("rescale", _measure_mean_rescale), ("accumulator", _measure_mean_accumulator)),
)
_AVG_POOL = replace(
    _MEAN, patterns=(nn.AvgPool2d, F.avg_pool2d), properties=(*_MEAN.properties, ("padding", _measure_mean_padding))
)

# -- cat --------------------------------------------------------------------------------------------------------------


def _probe_cat(site: Site, second: float, scale: float) -> ProbeModel:
    """The second operand has its own scale; the result has the first one's."""
    grids = (site.make_grid(scale), site.make_grid(second))
    inputs = tuple(make_operand(grid, centred_integers_of(grid)[None]) for grid in grids)
    return ProbeModel(model=build_two_inputs(lambda x, y: torch.cat([x, y], 1)), inputs=inputs, output=grids[0])


def _run_cat(site: Site, second: float, scale: float) -> tuple[Grid, kernels.Term, Tensor]:
    """Return the grid of the result, the second operand, and what the result holds of it."""
    probe = _probe_cat(site, second, scale)
    term = kernels.Term(centred=centred_integers_of(probe.output), grid=probe.inputs[1][0])
    return probe.output, term, site.run(probe)[0, -len(term.centred) :]


def _measure_cat_rounding(site: Site) -> kernels.Rounding:
    grid, term, results = _run_cat(site, 2.0**-6, 2.0**-4)
    return kernels.name_rounding(term.centred / 4, results, grid.zero_point)


def _measure_cat_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Odd integers by ratios next to 3/2, all next to a tie; then all by ratios that few bits do not hold."""
    runs = []
    for scales in [*kernels.draw_scales(2 / 3), *kernels.draw_scales(2.718)[:2]]:
        grid, term, results = _run_cat(site, *scales)
        runs.append(kernels.keep_inside(kernels.predict_copy(term, grid), results))
    return kernels.name_rescale(runs, rule)


def _measure_cat_saturation(site: Site, rule: kernels.Rule) -> str:
    grid, term, results = _run_cat(site, 2.0**-2, 2.0**-4)
    return kernels.name_ends(term.centred * 4, results, grid, rule)


_CAT = Op(
    patterns=(torch.cat,),
    example=lambda site: _probe_cat(site, 2.0**-6, 2.0**-4),
    rounding=_measure_cat_rounding,
    properties=(("rescale", _measure_cat_rescale), ("saturation", _measure_cat_saturation)),
)

# -- functions of one number ------------------------------------------------------------------------------------------


def _probe_curve(site: Site) -> ProbeModel:
    """All integers of the input, from -4 to 4."""
    grid = site.make_grid(2.0**-5)
    return _probe_integers(site, grid, site.find_fixed_grid() or grid)


def _probe_integers(site: Site, grid: Grid, output: Grid, *arguments: Any) -> ProbeModel:
    """An op of one tensor, with these arguments after it, on all integers of a grid."""
    inputs = (make_operand(grid, centred_integers_of(grid)[None]),)
    return ProbeModel(model=build_one_input(site.pattern, *arguments), inputs=inputs, output=output)


def _run_curve(function: Callable[[Tensor], Tensor], site: Site) -> tuple[Tensor, Tensor, Grid]:
    """Return the exact results, the backend's, and their grid."""
    probe = _probe_curve(site)
    exact = function(probe.inputs[0][1].double()) / probe.output.scale
    return exact.clamp(*probe.output.centred_ends), site.run(probe), probe.output


def _measure_curve_rounding(function: Callable[[Tensor], Tensor], site: Site) -> kernels.Rounding:
    exact, results, grid = _run_curve(function, site)
    return kernels.name_rounding(exact, results, grid.zero_point)


def _measure_curve_values(function: Callable[[Tensor], Tensor], site: Site, rule: kernels.Rule) -> str:
    exact, results, _ = _run_curve(function, site)
    distance = (results - exact).abs()
    off = distance > 0.5
    if not bool(off.any()):
        return f"correctly rounded for all {results.numel()} integers"
    worst = f"the worst {float(distance.max()):.6g} steps from the exact one"
    return f"{int(off.sum())} of {results.numel()} results not correctly rounded, {worst}"


def _make_function(exact: Callable[[Tensor], Tensor], *patterns: Any) -> Op:
    return Op(
        patterns=patterns,
        example=_probe_curve,
        rounding=partial(_measure_curve_rounding, exact),
        properties=(("values", partial(_measure_curve_values, exact)),),
    )


# -- leaky relu -------------------------------------------------------------------------------------------------------


def _probe_leaky(site: Site, slope: float, s_x: float, s_y: float) -> ProbeModel:
    """All integers of the input."""
    return _probe_integers(site, site.make_grid(s_x), site.make_grid(s_y), slope)


def _measure_leaky_rounding(site: Site) -> kernels.Rounding:
    """Ties and quarters of either sign: a slope of 1/2, and a step of the output that is two of the input's."""
    probe = _probe_leaky(site, 0.5, 2.0**-5, 2.0**-4)
    x = centred_integers_of(probe.inputs[0][0])
    return kernels.name_rounding(torch.where(x < 0, x / 4, x / 2), site.run(probe).flatten(), probe.output.zero_point)


def _measure_leaky_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Slopes of different sizes, by ratios that few bits do not hold."""
    runs = []
    for slope, ratio in ((0.01, 0.9), (0.3, 0.7), (0.06, 1.3)):
        slope, s_x, s_y = (float(torch.tensor(number)) for number in (slope, 2.0**-5 * ratio, 2.0**-5))
        probe = _probe_leaky(site, slope, s_x, s_y)
        term = kernels.Term(centred_integers_of(probe.inputs[0][0]), probe.inputs[0][0])
        predictions = kernels.predict_leaky(term, probe.output, slope)
        runs.append(kernels.keep_inside(predictions, site.run(probe).flatten()))
    return kernels.name_rescale(runs, rule)


_LEAKY = Op(
    patterns=(nn.LeakyReLU, F.leaky_relu),
    example=lambda site: _probe_leaky(site, 0.5, 2.0**-5, 2.0**-4),
    rounding=_measure_leaky_rounding,
    properties=(("rescale", _measure_leaky_rescale),),
)

# -- quantize ---------------------------------------------------------------------------------------------------------


def _probe_quantize(site: Site, values: Tensor, grid: Grid) -> ProbeModel:
    """An op that only moves its input: the result shows the quantize in front of it."""
    model = build_one_input(site.pattern, *((1,) if site.pattern is torch.flatten else ()))
    return ProbeModel(model=model, inputs=((grid, values.reshape(-1, 4, 1).float()),), output=grid)


def _run_quantize(site: Site, steps: Tensor) -> tuple[Tensor, Tensor, Grid]:
    """Return the exact results, which are `steps`, the backend's, and their grid."""
    grid = site.make_grid(2.0**-4)
    return steps, site.run(_probe_quantize(site, steps * grid.scale, grid)).flatten(), grid


def _measure_quantize_rounding(site: Site) -> kernels.Rounding:
    exact, results, grid = _run_quantize(site, torch.arange(-400, 400).double() / 4)
    return kernels.name_rounding(exact, results, grid.zero_point)


def _measure_quantize_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Float32 numbers next to ties, and their neighbours on either side."""
    runs = []
    for scale, _ in kernels.draw_scales(2 / 3)[::4]:
        grid = site.make_grid(scale)
        near = ((torch.arange(-100, 100).double() + 0.5) * scale).float()
        up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (torch.inf, -torch.inf))
        values = torch.cat([down, near, up])
        runs.append((kernels.predict_quantize(values.double(), grid), site.run(_probe_quantize(site, values, grid))))
    return kernels.name_rescale(runs, rule)


_QUANTIZE = Op(
    requantizes=False,
    patterns=(torch.flatten, nn.Identity, "contiguous"),
    example=lambda site: _probe_quantize(site, torch.zeros(4), site.make_grid(2.0**-4)),
    rounding=_measure_quantize_rounding,
    properties=(
        ("rescale", _measure_quantize_rescale),
        (
            "saturation",
            lambda site, rule: kernels.name_ends(*_run_quantize(site, torch.arange(-1000, 1000).double()), rule),
        ),
    ),
)

OPS: Mapping[str, Op] = {
    "quantize": _QUANTIZE,
    "avg_pool2d": _AVG_POOL,
    "adaptive_avg_pool2d": replace(_MEAN, patterns=_ADAPTIVE),
    "mean": _MEAN,
    "cat": _CAT,
    "hardswish": _make_function(F.hardswish, nn.Hardswish, F.hardswish),
    "hardsigmoid": _make_function(F.hardsigmoid, nn.Hardsigmoid, F.hardsigmoid),
    "sigmoid": _make_function(torch.sigmoid, nn.Sigmoid, torch.sigmoid),
    "tanh": _make_function(torch.tanh, nn.Tanh, torch.tanh),
    "elu": _make_function(F.elu, nn.ELU, F.elu),
    "leaky_relu": _LEAKY,
}
