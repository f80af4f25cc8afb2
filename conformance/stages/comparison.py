"""Comparing a backend's output with the exact result (rules NUM-03, NUM-04)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.machine.guard import guard
from conformance.oracle.error_bounds import flatten
from conformance.oracle.exact import Exact
from conformance.oracle.grids import Grid
from conformance.stages.attribution import attribute, describe_worst, unravel_index
from conformance.stages.resemblance import Resemblance, find_resemblance, spell_allowed
from conformance.stages.statistics import Sample
from reports.schema import Where

MOST_SHOWN = 6
"""Elements of the worst comparison that the report shows."""
InputGrids = tuple[Grid | None, ...]
"""The grid of each input; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcome of comparing one output with what it should be.

    ``max_lsb``: the largest |q - v|; ``slack_lsb``: the largest slack; ``excess``: the most by which a bound is passed.
    ``is_within_one``: every element is within one step and the slack. ``is_function``: the output is that of a function
    that kernels approximate. ``problem``: what is wrong with the whole output (its type, its shape, not finite, off the
    grid), or "". ``rule``: the rule that a problem breaks, if not the one that the claim is judged by.
    ``ran_in_float``: a quantized output was computed in float. ``allowed``: what a right result may be off by beside
    the slack, in words. ``resemblance``: what rounding the differences look like; None: nothing is wrong, or something
    else. ``sample``: the distances, for statistics; None: nothing was compared.
    """

    where: Where
    max_lsb: float = 0.0
    slack_lsb: float = 0.0
    excess: float = -0.5
    is_within_one: bool = True
    is_function: bool = False
    problem: str = ""
    rule: str = ""
    ran_in_float: bool = False
    allowed: str = "0.5 + "
    resemblance: Resemblance | None = None
    sample: Sample | None = None
    evidence: Mapping[str, object] = field(default_factory=dict)


def compare_all(where: Where, exacts: Sequence[Exact], output: Any, grids: InputGrids = ()) -> Iterator[Comparison]:
    """Compare all outputs of a model, in order; of a model with one output, that is a tensor, not a list of one."""
    outputs = flatten(output) if len(exacts) > 1 else [output]
    if len(outputs) != len(exacts):
        yield compare_unusable(where, f"the model returned {len(outputs)} outputs; expected {len(exacts)}")
        return
    for number, (exact, value) in enumerate(zip(exacts, outputs, strict=True)):
        yield compare(where if len(exacts) == 1 else replace(where, output=number), exact, value, grids)


def compare(where: Where, exact: Exact, output: Any, grids: InputGrids = ()) -> Comparison:
    """Measure the LSB distance of an output from its exact result. (NUM-03)"""
    if problem := describe_form_fault(exact, output):
        return compare_unusable(where, problem)
    grid = exact.grid
    if grid is None:
        return _compare_floats(where, exact, output, grids)
    position = grid.integers(output)
    integers = position.round()
    if bool(((position - integers).abs() > grid.nearness(integers)).any()):
        return compare_off_grid(where, exact, position, grids)
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
        is_within_one=is_within_one,
        is_function=exact.is_function,
        allowed=spell_allowed(exact),
        resemblance=find_resemblance(exact, integers) if most > 0 and is_within_one else None,
        sample=Sample(distance=distance, exact=exact.integers - grid.zero_point),
        evidence=_show_worst(where, exact, grids, exact.integers, integers, excess),
    )


def _compare_floats(where: Where, exact: Exact, output: Tensor, grids: InputGrids) -> Comparison:
    """Compare a float output, which has no grid to be rounded to: it lies within the bound, or is wrong. (NUM-04)"""
    distance = (output.double() - exact.real).abs() / exact.step
    allowed = exact.slack.expand_as(distance)
    excess = distance - allowed
    return Comparison(
        where=where,
        max_lsb=_largest_of(distance),
        slack_lsb=_largest_of(allowed),
        excess=_largest_of(excess, default=-0.5),
        is_within_one=False,
        allowed="",
        sample=Sample(distance=distance, exact=exact.real / exact.step, is_float_output=True),
        evidence=_show_worst(where, exact, grids, exact.real, output.double(), excess),
    )


@guard("numerics.grid")
def compare_off_grid(where: Where, exact: Exact, position: Tensor, grids: InputGrids) -> Comparison:
    """Compare an output between two integers: it was computed in float, and may still be the right number."""
    assert exact.grid is not None
    grid = exact.grid
    distance = (position.clamp(grid.low, grid.high) - exact.integers).abs()
    is_right = bool((distance <= 1 + exact.slack).all())
    text = "the output is not on its quantization grid: it was computed in float, or on a grid of the kernel's own"
    return Comparison(
        where=where,
        max_lsb=_largest_of(distance),
        excess=_largest_of(distance),
        is_within_one=is_right,
        problem=text if is_right else f"{text}, and it is wrong",
        ran_in_float=is_right,
        sample=Sample(distance=distance, exact=exact.integers - grid.zero_point),
        evidence=_show_worst(where, exact, grids, exact.integers, position, distance),
    )


@guard("numerics.form")
def describe_form_fault(exact: Exact, output: Any) -> str:
    """Say what is wrong with an output's form; "" for a finite float32 tensor of the right shape."""
    if not isinstance(output, Tensor):
        return f"the output is a {type(output).__name__}; expected a tensor"
    if output.shape != exact.real.shape:
        return f"the output has shape {tuple(output.shape)}; expected {tuple(exact.real.shape)}"
    if output.dtype is not torch.float32:
        return f"the output has dtype {output.dtype}; the model's output is real, so float32 was expected"
    if not bool(torch.isfinite(output).all()):
        return "the output is not finite, on finite inputs"
    return ""


def compare_unusable(where: Where, problem: str, *, rule: str = "", **evidence: object) -> Comparison:
    """Return the comparison of an output that cannot be measured."""
    return Comparison(
        where=where, max_lsb=float("inf"), excess=float("inf"), is_within_one=False, problem=problem, rule=rule,
        evidence={"where": where, **evidence},
    )  # fmt: skip


@guard("numerics.runs")
def compare_failed_run(where: Where, rule: str, problem: str, evidence: Mapping[str, object]) -> Comparison:
    """Return the comparison of a run without an output."""
    return Comparison(
        where=where, excess=float("inf"), is_within_one=False, rule=rule, problem=problem,
        evidence={"where": where, **evidence},
    )  # fmt: skip


def _show_worst(
    where: Where, exact: Exact, grids: InputGrids, expected: Tensor, actual: Tensor, excess: Tensor
) -> dict[str, object]:
    """Return as evidence the worst elements: where, what was expected and found, and on which grids."""
    if not excess.numel() or not bool((excess > 0).any()):
        return {}
    order = excess.flatten().argsort(descending=True, stable=True)[:MOST_SHOWN]
    evidence: dict[str, object] = {
        "where": where,
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
        "worst": describe_worst(expected, actual, exact.grid, exact.slack_by_cause, target),
    }


def _shorten(value: float) -> int | float:
    return int(value) if value.is_integer() else round(value, 6)


def _largest_of(values: Tensor, default: float = 0.0) -> float:
    return float(values.max()) if values.numel() else default
