"""Comparing a backend's output with the exact result (rules NUM-03, NUM-04)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import flatten
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.attribution import attribute, format_worst, unravel_index
from fx_quant_conformance.conformance.stages.resemblance import Resemblance, find_resemblance, format_allowed
from fx_quant_conformance.conformance.stages.statistics import Sample
from fx_quant_conformance.reports.schema import Where
from fx_quant_conformance.reports.verdicts import Verdict

MOST_SHOWN = 6
"""Elements of the worst comparison that the report shows."""
InputGrids = tuple[Grid | None, ...]
"""The grid of each input; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of comparing one output with what it should be."""

    where: Where
    rule: str = "NUM-03"
    """That by which it is judged: NUM-05 where an op only moves or selects values."""
    max_lsb: float = 0.0
    """The largest |q - v|."""
    slack_lsb: float = 0.0
    """The largest slack."""
    excess: float = -0.5
    """The most by which a bound is passed."""
    worst: tuple[float, float] = (0.0, 0.0)
    """|q - v| and the slack of that element."""
    is_within_one: bool = True
    """Every element is within one step and the slack."""
    is_tolerated: bool = False
    """Every element is within what the backend declares as its tolerance."""
    beyond: int = 0
    """Number of elements that pass their bound."""
    elements: int = 0
    decided: int = 0
    """Number of elements of which the bound would show a fault (`Exact.decided`)."""
    allowed: str = "0.5 + "
    """What a right result may be off by beside the slack, in words."""
    resemblance: Resemblance | None = None
    """What rounding the differences look like; None: nothing is wrong, or something else."""
    sample: Sample | None = None
    """The distances, for statistics; None: nothing was compared."""
    evidence: Mapping[str, object] = field(default_factory=dict)
    """The worst elements, if some are wrong."""
    fault: Fault | None = None
    """What is wrong with the output."""

    @property
    def bound(self) -> str:
        """What a right result may be off by, whole: half a step and the slack, or the slack alone.

        Where a bound is passed, that of the element which passes it by the most; else the widest.
        """
        return f"{self.allowed}{self.worst[1] if self.excess > 0 else self.slack_lsb:.3g}"


def compare_all(
    where: Where, exacts: Sequence[Exact], output: Any, grids: InputGrids = (), *, moves_only: bool = False
) -> Iterator[Comparison]:
    """Compare all outputs of a model, in order; of a model with one output, that is a tensor, not a list of one."""
    outputs = [
        torch.view_as_real(each) if isinstance(each, Tensor) and each.is_complex() else each
        for each in (flatten(output) if len(exacts) > 1 else [output])
    ]
    if len(outputs) != len(exacts):
        text = f"{where}: the model returned {len(outputs)} outputs; expected {len(exacts)}"
        yield _compare_unusable(Fault(rule=rule_of_numbers(moves_only), message=text, where=where, size=math.inf))
        return
    for number, (exact, value) in enumerate(zip(exacts, outputs, strict=True)):
        place = where if len(exacts) == 1 else replace(where, output=number)
        yield compare(place, exact, value, grids, moves_only=moves_only)


def compare(where: Where, exact: Exact, output: Any, grids: InputGrids = (), *, moves_only: bool = False) -> Comparison:
    """Measure the LSB distance of an output from its exact result, and judge it. (NUM-03)

    ``moves_only``: the op only moves or selects values, so that no other integer may come out. (NUM-05)
    """
    rule = rule_of_numbers(moves_only)
    for fault in find_form_fault(where, exact, output, rule):
        return _compare_unusable(fault)
    for fault in find_grid_fault(where, exact, output, grids, rule):
        return _compare_off_grid(exact, output, fault)
    comparison = replace(_measure(where, exact, output, grids), rule=rule)
    return replace(comparison, fault=next(find_distance_fault(comparison, moves_only), None))


def rule_of_numbers(moves_only: bool) -> str:
    """Return the rule that an output is held to."""
    return "NUM-05" if moves_only else "NUM-03"


def _measure(where: Where, exact: Exact, output: Tensor, grids: InputGrids) -> Comparison:
    grid = exact.grid
    if grid is None:
        return _measure_floats(where, exact, output, grids)
    integers = grid.integers(output).round()
    allowed = exact.slack.expand_as(integers)
    distance = (integers - exact.integers).abs()
    is_outside = (integers < grid.low) | (integers > grid.high)
    excess = exact.target.measure_excess(integers, allowed)  # rule: NUM-03
    most = _largest_of(excess, default=-0.5)
    is_within_one = bool(((distance <= 1 + allowed) & ~is_outside).all())  # NaN is within nothing
    return Comparison(
        where=where,
        max_lsb=_largest_of(distance),
        slack_lsb=_largest_of(allowed),
        excess=most,
        worst=_find_worst(excess, distance, allowed),
        is_within_one=is_within_one,
        is_tolerated=bool(((distance <= exact.tolerance + allowed) & ~is_outside).all()),
        beyond=int((excess > 0).sum()),
        elements=excess.numel(),
        decided=int(exact.decided.sum()),
        allowed=format_allowed(exact),
        resemblance=find_resemblance(exact, integers) if most > 0 and is_within_one else None,
        sample=Sample(distance=distance, exact=exact.integers - grid.zero_point),
        evidence=_show_worst(exact, grids, exact.integers, integers, excess),
    )


def _measure_floats(where: Where, exact: Exact, output: Tensor, grids: InputGrids) -> Comparison:
    """Measure a float output, which has no grid to be rounded to: it lies within the bound, or is wrong. (NUM-04)"""
    found = output.double()
    is_same = (found == exact.real) | exact.real.isnan()  # infinities that are equal, too
    distance = torch.where(is_same, 0.0, ((found - exact.real).abs() / exact.step).nan_to_num(nan=math.inf))
    allowed = exact.slack.expand_as(distance)
    excess = distance - allowed
    return Comparison(
        where=where,
        max_lsb=_largest_of(distance),
        slack_lsb=_largest_of(allowed),
        excess=_largest_of(excess, default=-0.5),
        worst=_find_worst(excess, distance, allowed),
        is_within_one=False,
        elements=excess.numel(),
        decided=int(exact.decided.sum()),
        allowed="",
        sample=Sample(distance=distance, exact=exact.real / exact.step, is_float_output=True),
        evidence=_show_worst(exact, grids, exact.real, output.double(), excess),
    )


def _find_worst(excess: Tensor, distance: Tensor, slack: Tensor) -> tuple[float, float]:
    """Return distance and slack of the element that passes its bound by the most."""
    if not excess.numel():
        return 0.0, 0.0
    flat = int(excess.argmax())
    return float(distance.flatten()[flat]), float(slack.flatten()[flat])


def _measure_between(exact: Exact, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return where an output lies on its grid, in integers and between them, and how far from the exact results."""
    assert exact.grid is not None
    position = exact.grid.integers(output)
    return position, (position.clamp(exact.grid.low, exact.grid.high) - exact.integers).abs()


# -- faults of an output -----------------------------------------------------------------------------------------------


@guard("numerics.form")
def find_form_fault(where: Where, exact: Exact, output: Any, rule: str) -> Iterator[Fault]:
    """Find what is wrong with an output's form: a finite float32 tensor of the right shape is expected.

    Of integers or truth values, a tensor of any such dtype; infinite only where the exact result is, or no number.
    """
    if not isinstance(output, Tensor):
        text = f"the output is a {type(output).__name__}; expected a tensor"
    elif output.shape != exact.real.shape:
        text = f"the output has shape {tuple(output.shape)}; expected {tuple(exact.real.shape)}"
    elif exact.is_discrete:
        if not output.is_floating_point():
            return
        text = (
            f"the output has dtype {output.dtype}; the model's output is an index or a choice: integers were expected"
        )
    elif output.dtype is not torch.float32:
        text = f"the output has dtype {output.dtype}; the model's output is real, so float32 was expected"
    elif not bool((torch.isfinite(output) | ~exact.real.isfinite()).all()):
        text = "the output is not finite, on finite inputs"
    else:
        return
    yield Fault(rule=rule, message=f"{where}: {text}", where=where, size=math.inf)


@guard("numerics.grid")
def find_grid_fault(where: Where, exact: Exact, output: Tensor, grids: InputGrids, rule: str) -> Iterator[Fault]:
    """Find an output between two integers: it was computed in float, and may still be the right number."""
    if exact.grid is None:
        return
    position, distance = _measure_between(exact, output)
    integers = position.round()
    if not bool(((position - integers).abs() > exact.grid.nearness(integers)).any()):
        return
    is_right = bool((distance <= 1 + exact.slack).all())
    text = "the output is not on its quantization grid: it was computed in float, or on a grid of the kernel's own"
    yield Fault(
        rule=rule,
        message=f"{where}: {text}{'' if is_right else ', and it is wrong'}",
        verdict=Verdict.FALLBACK if is_right else Verdict.REFUTED,
        where=where,
        size=_largest_of(distance),
        evidence=_show_worst(exact, grids, exact.integers, position, distance),
    )


@guard("numerics.distance")
def find_distance_fault(comparison: Comparison, moves_only: bool) -> Iterator[Fault]:
    """Find that an output passes its bound: it is TOLERATED where that is declared, within a step, and else wrong."""
    if comparison.excess <= 0:
        return
    text = f"{comparison.where}: distance {comparison.worst[0]:.6g} LSB, allowed {comparison.bound}"
    is_tolerated = comparison.is_tolerated and not moves_only  # rule: NUM-03
    is_near = comparison.is_within_one and not is_tolerated and not moves_only
    yield Fault(
        rule=comparison.rule,
        message=f"{text}: within one step, which Capabilities.tolerance does not grant" if is_near else text,
        verdict=Verdict.TOLERATED if is_tolerated else Verdict.REFUTED,
        where=comparison.where,
        evidence=comparison.evidence,
        size=comparison.excess,
    )


def _compare_unusable(fault: Fault) -> Comparison:
    """Return the comparison of an output that cannot be measured."""
    return Comparison(where=fault.where, max_lsb=math.inf, excess=math.inf, is_within_one=False, fault=fault)


def _compare_off_grid(exact: Exact, output: Tensor, fault: Fault) -> Comparison:
    """Return the comparison of an output between two integers."""
    assert exact.grid is not None
    _, distance = _measure_between(exact, output)
    sample = Sample(distance=distance, exact=exact.integers - exact.grid.zero_point)
    return Comparison(
        where=fault.where, max_lsb=fault.size, excess=math.inf, is_within_one=False, sample=sample, fault=fault
    )


def _show_worst(exact: Exact, grids: InputGrids, expected: Tensor, actual: Tensor, excess: Tensor) -> dict[str, object]:
    """Return as evidence the worst elements: where, what was expected and found, and on which grids."""
    if not excess.numel() or not bool((excess > 0).any()):
        return {}
    order = excess.flatten().argsort(descending=True, stable=True)[:MOST_SHOWN]
    evidence: dict[str, object] = {
        "index": [unravel_index(int(flat), excess.shape) for flat in order],
        "expected": [round(float(expected.flatten()[flat]), 6) for flat in order],
        "found": [_shorten(float(actual.flatten()[flat])) for flat in order],
    }
    if exact.grid is None:
        return evidence
    inputs = {f"input {number}": grid.row() for number, grid in enumerate(grids) if grid is not None}
    target = exact.target if exact.has_named_rounding else None
    kinds = attribute(expected, actual, exact.grid, exact.slack_by_cause, target)
    return evidence | {
        "qparams": {**inputs, "output": exact.grid.row()},
        "attribution": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "worst": format_worst(expected, actual, exact.grid, exact.slack_by_cause, target),
    }


def _shorten(value: float) -> int | float:
    return int(value) if value.is_integer() else round(value, 6)


def _largest_of(values: Tensor, default: float = 0.0) -> float:
    return float(values.max()) if values.numel() else default
