"""Fingerprints of sums and products of two tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.facts import kernel_models as kernels
from fx_quant_conformance.conformance.facts.probe_models import (
    Op,
    ProbeModel,
    Site,
    build_two_inputs,
    centred_integers_of,
    make_operand,
)
from fx_quant_conformance.conformance.oracle.grids import Grid


def _pair(first: Grid, second: Grid, every: int = 1) -> tuple[kernels.Term, kernels.Term]:
    """Pair every integer of one input with every `every`-th of another."""
    integers = (centred_integers_of(first), centred_integers_of(second)[::every])
    a, b = torch.meshgrid(*integers, indexing="ij")
    return kernels.Term(a, first), kernels.Term(b, second)


def _build_probe(
    site: Site, terms: tuple[kernels.Term, kernels.Term], output: Grid, *, relu: bool = False
) -> ProbeModel:
    inputs = tuple(make_operand(term.grid, term.centred) for term in terms)
    return ProbeModel(model=build_two_inputs(site.pattern, rectified=relu), inputs=inputs, output=output)


Family = Callable[[Site, Grid], tuple[tuple[kernels.Term, kernels.Term], Tensor]]
"""Given the output's grid: two operands, and their exact results in output steps."""


def _add_by(ratios: tuple[float, float], site: Site, output: Grid) -> tuple[tuple[kernels.Term, kernels.Term], Tensor]:
    a, b = _pair(site.make_grid(ratios[0] * output.scale), site.make_grid(ratios[1] * output.scale))
    return (a, b), a.centred * ratios[0] + b.centred * ratios[1]


def _multiply_by(ratio: float, site: Site, output: Grid) -> tuple[tuple[kernels.Term, kernels.Term], Tensor]:
    a, b = _pair(site.make_grid(2.0**-4), site.make_grid(ratio * output.scale * 2.0**4))
    return (a, b), a.centred * b.centred * ratio


def _run_family(family: Family, site: Site, output: Grid, *, relu: bool = False) -> tuple[Tensor, Tensor]:
    """Return the exact results, and the backend's."""
    terms, exact = family(site, output)
    return exact, site.run(_build_probe(site, terms, output, relu=relu))


def _build_example(family: Family, site: Site) -> ProbeModel:
    output = site.make_grid(2.0**-3)
    return _build_probe(site, family(site, output)[0], output)


def _measure_rounding(families: tuple[Family, ...], site: Site) -> kernels.Rounding:
    output = site.make_grid(2.0**-3)
    runs = [_run_family(family, site, output) for family in families]
    exact, results = (torch.cat(parts) for parts in zip(*runs, strict=True))
    inside = (exact > output.centred_ends[0]) & (exact < output.centred_ends[1])
    return kernels.name_rounding(exact[inside], results[inside], output.zero_point)


def _measure_saturation(family: Family, site: Site, rule: kernels.Rule) -> str:
    output = site.make_grid(2.0**-3)
    return kernels.name_ends(*_run_family(family, site, output), output, rule)


def _measure_relu(family: Family, site: Site, rule: kernels.Rule) -> str:
    output = site.make_relu_grid(2.0**-3)
    return kernels.name_relu(*_run_family(family, site, output, relu=True), output, rule)


def _measure_add_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Rescale odd sums by ratios next to 3/2, with a second term by one next to 3/2 or 3/32: all next to a tie.

    Then any sums by ratios that few bits do not hold.
    """
    runs = []
    for s_a, s_y in [*kernels.draw_scales(2 / 3)[::4], *kernels.draw_scales(2.718)[:2]]:
        neighbour = float(torch.nextafter(torch.tensor(s_a), torch.tensor(1.0)))  # the next float32 number
        for share in (1.0, 2.0**-4):
            output = site.make_grid(s_y)
            terms = _pair(site.make_grid(s_a), site.make_grid(neighbour * share), every=3)
            runs.append(
                kernels.keep_inside(kernels.predict_sum(*terms, output), site.run(_build_probe(site, terms, output)))
            )
    return kernels.name_rescale(runs, rule)


def _measure_multiply_rescale(site: Site, rule: kernels.Rule) -> kernels.Rescale:
    """Products by ratios next to 1/74: odd multiples of 37 are next to a tie, others 1/74 or more away from it."""
    runs = []
    others = torch.tensor([37.0, 36.0, 31.0, 23.0, 5.0, -37.0]).double()
    for s_a, s_y in kernels.draw_scales(2 * 37, 2.0**-3):
        output, grids = site.make_grid(s_y), (site.make_grid(s_a), site.make_grid(2.0**-3))
        a, b = torch.meshgrid(centred_integers_of(grids[0]), others, indexing="ij")
        terms = (kernels.Term(a, grids[0]), kernels.Term(b, grids[1]))
        runs.append((kernels.predict_product(*terms, output), site.run(_build_probe(site, terms, output))))
    return kernels.name_rescale(runs, rule)


def _make_op(patterns: tuple[Any, ...], families: tuple[Family, ...], wide: Family, rescale: Any) -> Op:
    saturation, relu = partial(_measure_saturation, wide), partial(_measure_relu, families[0])
    return Op(
        patterns=patterns,
        example=partial(_build_example, families[0]),
        rounding=partial(_measure_rounding, families),
        properties=(("rescale", rescale), ("saturation", saturation), ("relu", relu)),
    )


OPS: Mapping[str, Op] = {
    "add": _make_op(
        (operator.add, torch.add),
        (partial(_add_by, (0.25, 0.25)), partial(_add_by, (0.25, 0.0625))),
        partial(_add_by, (2.0, 1.0)),
        _measure_add_rescale,
    ),
    "mul": _make_op(
        (operator.mul, torch.mul),
        (partial(_multiply_by, 2.0**-8),),
        partial(_multiply_by, 2.0**-4),
        _measure_multiply_rescale,
    ),
}
