"""Fingerprints of ops without weights but for sums and products: means, cat, functions, and quantize itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.facts.kernel_models import (
    Rounding,
    Rule,
    Term,
    copy_models,
    factor_models,
    joined,
    name_ends,
    name_rescale,
    name_rounding,
    name_value,
    near_ties,
    quantize_models,
)
from conformance.facts.probe_models import Op, ProbeModel, Site, all_integers, one_input, operand, two_inputs
from conformance.oracle.grids import Grid


def _cat_of(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)


# -- means ------------------------------------------------------------------------------------------------------------

CHANNELS = 8


def _mean_model(site: Site, width: int) -> nn.Module:
    """A mean over a whole image, width × width."""
    if "adaptive" in getattr(site.pattern, "__name__", "").lower():
        return one_input(site.pattern, 1)
    is_mean = site.pattern is torch.mean or site.pattern == "mean"
    return one_input(site.pattern, (2, 3) if is_mean else width)


def _mean(site: Site, images: Tensor) -> ProbeModel:
    grid = site.grid(2.0**-4)
    return ProbeModel(model=_mean_model(site, images.shape[-1]), inputs=(operand(grid, images),), output=grid)


def _means(site: Site, images: Tensor) -> Tensor:
    return site.run(_mean(site, images)).flatten()


def _images(sums: Tensor, width: int) -> Tensor:
    """Images of so many channels (batch × channels × width × width), the integers of each adding up to a given sum."""
    count = width * width
    share = (sums / count).floor()
    spare = sums - share * count
    values = share[:, None] + (torch.arange(count) < spare[:, None])
    return values.reshape(-1, CHANNELS, width, width)


def _mean_example(site: Site) -> ProbeModel:
    return _mean(site, torch.zeros(1, CHANNELS, 2, 2))


def _mean_rounding(site: Site) -> Rounding:
    """Means of four: whole, quarters and ties."""
    sums = torch.arange(-4 * 60, 4 * 60).double()
    return name_rounding(sums / 4, _means(site, _images(sums, 2)), site.grid(1.0).zero_point)


def _mean_rescale(site: Site, rule: Rule) -> str:
    """Means of 225 numbers whose sum is as near to a tie as it can be: 1/450 of a step."""
    sums = ((torch.arange(-60, 60).double() + 0.5) * 225).floor()
    models = factor_models(sums, (1.0,), 225.0, site.grid(1.0).zero_point)
    return name_rescale(models, _means(site, _images(sums, 15)), rule)


def _mean_accumulator(site: Site, rule: Rule) -> str:
    """289 equal numbers, at either end of the range: their sum, with or without the zero point, passes 16 bits."""
    grid = site.grid(1.0)
    ends = torch.tensor([grid.low, grid.high]).double().repeat_interleave(CHANNELS) - grid.zero_point
    found = _means(site, _images(ends * 289, 17))
    return name_value({"holds 289 numbers at an end of the range: 17 bits or more": ends}, found, rule) or (
        f"means of 289 equal numbers {sorted(set(ends.tolist()))} are found as {sorted(set(found.tolist()))}"
    )


def _mean_padding(site: Site, rule: Rule) -> str:
    """One element, padded all around, under windows of four that each hold it once."""
    grid = site.grid(2.0**-4)
    values = all_integers(grid)
    model = one_input(site.pattern, 2, 1, 1)
    found = site.run(ProbeModel(model=model, inputs=(operand(grid, values.reshape(-1, 1, 1, 1)),), output=grid))
    integers = {"the zero point": 0, "integer 0": -grid.zero_point, "the lowest integer": grid.low - grid.zero_point}
    models = {name: (values + 3 * value) / 4 for name, value in integers.items()} | {"nothing: not counted": values}
    return (
        name_value({n: v[:, None].expand(-1, 4) for n, v in models.items()}, found.flatten(1), rule)
        or "none of the models"
    )


def _averaging(*patterns: Any, pads: bool = False) -> Op:
    padding = (("padding", _mean_padding),) if pads else ()
    properties = (("rescale", _mean_rescale), ("accumulator", _mean_accumulator), *padding)
    return Op(patterns=patterns, example=_mean_example, rounding=_mean_rounding, properties=properties)


# -- cat --------------------------------------------------------------------------------------------------------------


def _cat(site: Site, second: float, scale: float) -> ProbeModel:
    """The second operand has a scale of its own; the result has the first one's."""
    grids = (site.grid(scale), site.grid(second))
    inputs = tuple(operand(grid, all_integers(grid)[None]) for grid in grids)
    return ProbeModel(model=two_inputs(_cat_of), inputs=inputs, output=grids[0])


def _second(site: Site, probe: ProbeModel) -> Tensor:
    return site.run(probe)[0, -len(all_integers(probe.output)) :]


def _cat_rounding(site: Site) -> Rounding:
    probe = _cat(site, 2.0**-6, 2.0**-4)
    return name_rounding(all_integers(probe.output) / 4, _second(site, probe), probe.output.zero_point)


def _cat_rescale(site: Site, rule: Rule) -> str:
    """Odd integers by ratios next to 3/2, all next to a tie; then all by ratios that few bits do not hold."""
    models, found = [], []
    for s_x, s_y in [*near_ties(2 / 3), *near_ties(2.718)[:2]]:
        probe = _cat(site, s_x, s_y)
        term = Term(centred=all_integers(probe.output), grid=probe.inputs[1][0])
        predicted = copy_models(term, probe.output)
        inside = predicted["exact"].abs() < 120
        found.append(_second(site, probe)[inside])
        models.append({name: value[inside] for name, value in predicted.items()})
    return name_rescale(joined(models), torch.cat(found), rule)


def _cat_saturation(site: Site, rule: Rule) -> str:
    probe = _cat(site, 2.0**-2, 2.0**-4)
    return name_ends(all_integers(probe.output) * 4, _second(site, probe), probe.output, rule)


CAT = Op(
    patterns=(torch.cat,),
    example=lambda site: _cat(site, 2.0**-6, 2.0**-4),
    rounding=_cat_rounding,
    properties=(("rescale", _cat_rescale), ("saturation", _cat_saturation)),
)

# -- functions of one number ------------------------------------------------------------------------------------------


def _curve(site: Site) -> ProbeModel:
    """All integers of the input, from -4 to 4."""
    grid = site.grid(2.0**-5)
    output = site.fixed_grid() or grid
    return ProbeModel(model=one_input(site.pattern), inputs=(operand(grid, all_integers(grid)[None]),), output=output)


def _curve_results(function: Callable[[Tensor], Tensor], site: Site) -> tuple[Tensor, Tensor, Grid]:
    probe = _curve(site)
    grid = probe.output
    exact = function(probe.inputs[0][1].double()) / grid.scale
    return exact.clamp(grid.low - grid.zero_point, grid.high - grid.zero_point), site.run(probe), grid


def _curve_rounding(function: Callable[[Tensor], Tensor], site: Site) -> Rounding:
    exact, found, grid = _curve_results(function, site)
    return name_rounding(exact, found, grid.zero_point)


def _curve_value(function: Callable[[Tensor], Tensor], site: Site, rule: Rule) -> str:
    exact, found, _ = _curve_results(function, site)
    distance = (found - exact).abs()
    off = distance > 0.5
    if not bool(off.any()):
        return f"correctly rounded for all {found.numel()} integers"
    worst = f"the worst {float(distance.max()):.6g} steps from the exact one"
    return f"{int(off.sum())} of {found.numel()} results not correctly rounded, {worst}"


def _function(exact: Callable[[Tensor], Tensor], *patterns: Any) -> Op:
    return Op(
        patterns=patterns,
        example=_curve,
        rounding=partial(_curve_rounding, exact),
        properties=(("values", partial(_curve_value, exact)),),
    )


# -- quantize ---------------------------------------------------------------------------------------------------------


def _quantize(site: Site, values: Tensor, grid: Grid) -> ProbeModel:
    """An op that only moves its input: what is seen is the quantize in front of it."""
    arguments = (1,) if site.pattern is torch.flatten else ()
    model = one_input(site.pattern, *arguments)
    return ProbeModel(model=model, inputs=((grid, values.reshape(-1, 4, 1).float()),), output=grid)


def _quantize_rounding(site: Site) -> Rounding:
    grid = site.grid(2.0**-4)
    steps = torch.arange(-400, 400).double() / 4
    return name_rounding(steps, site.run(_quantize(site, steps * grid.scale, grid)).flatten(), grid.zero_point)


def _quantize_rescale(site: Site, rule: Rule) -> str:
    """Float32 numbers next to ties, and their neighbours on either side."""
    models, found = [], []
    for scale, _ in near_ties(2 / 3)[::4]:
        grid = site.grid(scale)
        near = ((torch.arange(-100, 100).double() + 0.5) * scale).float()
        up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (torch.inf, -torch.inf))
        values = torch.cat([down, near, up])
        found.append(site.run(_quantize(site, values, grid)).flatten())
        models.append(quantize_models(values.double(), grid))
    return name_rescale(joined(models), torch.cat(found), rule)


def _quantize_saturation(site: Site, rule: Rule) -> str:
    grid = site.grid(2.0**-4)
    steps = torch.arange(-1000, 1000).double()
    return name_ends(steps, site.run(_quantize(site, steps * grid.scale, grid)).flatten(), grid, rule)


QUANTIZE = Op(
    patterns=(torch.flatten, nn.Identity, "contiguous"),
    example=lambda site: _quantize(site, torch.zeros(4), site.grid(2.0**-4)),
    rounding=_quantize_rounding,
    properties=(("rescale", _quantize_rescale), ("saturation", _quantize_saturation)),
)

OPS: Mapping[str, Op] = {
    "quantize": QUANTIZE,
    "avg_pool2d": _averaging(nn.AvgPool2d, F.avg_pool2d, pads=True),
    "adaptive_avg_pool2d": _averaging(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
    "mean": _averaging(torch.mean, "mean"),
    "cat": CAT,
    "hardswish": _function(F.hardswish, nn.Hardswish, F.hardswish),
    "hardsigmoid": _function(F.hardsigmoid, nn.Hardsigmoid, F.hardsigmoid),
    "sigmoid": _function(torch.sigmoid, nn.Sigmoid, torch.sigmoid),
    "tanh": _function(torch.tanh, nn.Tanh, torch.tanh),
    "elu": _function(F.elu, nn.ELU, F.elu),
    "leaky_relu": _function(F.leaky_relu, nn.LeakyReLU, F.leaky_relu),
}
