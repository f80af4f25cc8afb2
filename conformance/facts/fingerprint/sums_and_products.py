"""Fingerprints of sums and products of two tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.facts.kernel_models import (
    Rounding,
    Rule,
    Term,
    joined,
    name_ends,
    name_relu,
    name_rescale,
    name_rounding,
    near_ties,
    product_models,
    sum_models,
)
from conformance.facts.probe_models import Op, ProbeModel, Site, Unmeasured, all_integers, operand, two_inputs
from conformance.oracle.grids import Grid


def _pairs(grids: tuple[Grid, Grid], every: int = 1) -> tuple[Tensor, Tensor]:
    """Every pair of two inputs' integers, centred; or only each `every`-th of the second's integers."""
    a, b = torch.meshgrid(all_integers(grids[0]), all_integers(grids[1])[::every], indexing="ij")
    return a, b


def _two(
    site: Site, grids: tuple[Grid, Grid], terms: tuple[Tensor, Tensor], output: Grid, *, relu: bool = False
) -> ProbeModel:
    inputs = tuple(operand(grid, term) for grid, term in zip(grids, terms, strict=True))
    return ProbeModel(model=two_inputs(site.pattern, rectified=relu), inputs=inputs, output=output)


def _add_by(ratios: tuple[float, float], site: Site, output: Grid) -> tuple[tuple[Grid, Grid], Callable[..., Tensor]]:
    grids = site.grid(ratios[0] * output.scale), site.grid(ratios[1] * output.scale)
    return grids, lambda a, b: a * ratios[0] + b * ratios[1]


def _mul_by(ratio: float, site: Site, output: Grid) -> tuple[tuple[Grid, Grid], Callable[..., Tensor]]:
    return (site.grid(2.0**-4), site.grid(ratio * output.scale * 2.0**4)), lambda a, b: a * b * ratio


Family = Callable[[Site, Grid], tuple[tuple[Grid, Grid], Callable[..., Tensor]]]
"""Given the output's grid: grids of the inputs, and what becomes of their centred integers in output steps."""


def _exact_and_found(family: Family, site: Site, output: Grid, *, relu: bool = False) -> tuple[Tensor, Tensor]:
    grids, meaning = family(site, output)
    terms = _pairs(grids)
    found = site.run(_two(site, grids, terms, output, relu=relu))
    return meaning(*terms), found


def _binary_rounding(families: tuple[Family, ...], site: Site) -> Rounding:
    output = site.grid(2.0**-3)
    results = [_exact_and_found(family, site, output) for family in families]
    exact, found = (torch.cat(part) for part in zip(*results, strict=True))
    inside = (exact > output.low - output.zero_point) & (exact < output.high - output.zero_point)
    return name_rounding(exact[inside], found[inside], output.zero_point)


def _binary_saturation(family: Family, site: Site, rule: Rule) -> str:
    output = site.grid(2.0**-3)
    return name_ends(*_exact_and_found(family, site, output), output, rule)


def _binary_relu(family: Family, site: Site, rule: Rule) -> str:
    if not site.has_relu:
        raise Unmeasured("the config claims no relu behind this op")
    output = site.relu_grid(2.0**-3)
    return name_relu(*_exact_and_found(family, site, output, relu=True), output, rule)


def _binary_example(family: Family, site: Site) -> ProbeModel:
    output = site.grid(2.0**-3)
    grids, _ = family(site, output)
    return _two(site, grids, _pairs(grids), output)


def _add_rescale(site: Site, rule: Rule) -> str:
    """Rescale odd sums by ratios next to 3/2, with a second term by one next to 3/2 or 3/32: all next to a tie.

    Then any sums by ratios that few bits do not hold.
    """
    models, found = [], []
    for s_a, s_y in [*near_ties(2 / 3)[::4], *near_ties(2.718)[:2]]:
        for share in (1.0, 2.0**-4):
            output, grids = site.grid(s_y), (site.grid(s_a), site.grid(_neighbour(s_a) * share))
            terms = _pairs(grids, every=3)
            predicted = sum_models(Term(terms[0], grids[0]), Term(terms[1], grids[1]), output)
            inside = predicted["exact"].abs() < 120
            found.append(site.run(_two(site, grids, terms, output))[inside])
            models.append({name: value[inside] for name, value in predicted.items()})
    return name_rescale(joined(models), torch.cat(found), rule)


def _neighbour(scale: float) -> float:
    """The next float32 number."""
    return float(torch.nextafter(torch.tensor(scale), torch.tensor(1.0)))


def _mul_rescale(site: Site, rule: Rule) -> str:
    """Products by ratios next to 1/74: odd multiples of 37 are next to a tie, others 1/74 or more away from it."""
    models, found = [], []
    for s_a, s_y in near_ties(2 * 37, 2.0**-3):
        output, grids = site.grid(s_y), (site.grid(s_a), site.grid(2.0**-3))
        others = torch.tensor([37.0, 36.0, 31.0, 23.0, 5.0, -37.0]).double()
        a, b = torch.meshgrid(all_integers(grids[0]), others, indexing="ij")
        found.append(site.run(_two(site, grids, (a, b), output)).flatten())
        models.append(product_models(Term(a, grids[0]), Term(b, grids[1]), output))
    return name_rescale(joined(models), torch.cat(found), rule)


def _binary(patterns: tuple[Any, ...], families: tuple[Family, ...], wide: Family, rescale: Any) -> Op:
    properties = (
        ("rescale", rescale),
        ("saturation", partial(_binary_saturation, wide)),
        ("relu", partial(_binary_relu, families[0])),
    )
    rounding = partial(_binary_rounding, families)
    return Op(
        patterns=patterns, example=partial(_binary_example, families[0]), rounding=rounding, properties=properties
    )


OPS: Mapping[str, Op] = {
    "add": _binary(
        (operator.add, torch.add),
        (partial(_add_by, (0.25, 0.25)), partial(_add_by, (0.25, 0.0625))),
        partial(_add_by, (2.0, 1.0)),
        _add_rescale,
    ),
    "mul": _binary((operator.mul, torch.mul), (partial(_mul_by, 2.0**-8),), partial(_mul_by, 2.0**-4), _mul_rescale),
}
