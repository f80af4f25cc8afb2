"""Comparing a backend's output with the oracle, and judging a claim by it (rules NUM-03 to NUM-06)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.oracle.evaluate import Exact, flat
from conformance.oracle.grids import Grid
from conformance.stages.attribution import attribute, unravelled, worst
from conformance.stages.check import Check
from conformance.stages.statistics import Sample, measured
from reports.results import GREEN, Verdict

SHOWN = 6  # elements of the worst finding that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared: a backend's output, and the exact result it should be a rounding of."""

    case: str
    exact: Exact
    output: Any
    input_grids: tuple[Grid | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one comparison. ``max_lsb``: the largest |q - v|; ``excess``: the most by which a bound is passed.

    ``problem``: what is wrong with the output as a whole (its type, its shape, not finite, off the grid), or "".
    ``rule``: the rule that a problem breaks, where it is not the one that the claim is judged by. ``is_float``: a
    quantized output was computed in float. ``in_float``: the claim's output is a float tensor. ``sample``: what was
    compared; None: there was nothing to compare.
    """

    case: str
    max_lsb: float
    slack_lsb: float
    excess: float
    is_within_one: bool
    problem: str = ""
    rule: str = ""
    is_float: bool = False
    in_float: bool = False
    sample: Sample | None = None
    evidence: Mapping[str, object] = field(default_factory=dict)


def compare(comparison: Comparison) -> Finding:
    """Measure the LSB distance of an output. (NUM-03)"""
    problem = _malformed(comparison)
    if problem:
        return _whole(comparison, problem)
    exact, grid = comparison.exact, comparison.exact.grid
    if grid is None:
        return _in_float(comparison)
    position = grid.integers(comparison.output)
    found = position.round()
    if bool(((position - found).abs() > grid.nearness(found)).any()):
        return _off_grid(comparison, grid, position)
    allowed = exact.slack.expand_as(found)
    distance = (found - exact.integers).abs()
    outside = (found < grid.low) | (found > grid.high)
    excess = distance - 0.5 - allowed  # rule: NUM-03
    return Finding(
        case=comparison.case,
        max_lsb=_largest(distance),
        slack_lsb=_largest(allowed),
        excess=_largest(excess, default=-0.5),
        is_within_one=bool(((distance <= 1 + allowed) & ~outside).all()),  # NaN is within nothing
        sample=Sample(distance=distance, exact=exact.integers - grid.zero_point),
        evidence=_evidence(comparison, exact.integers, found, distance, excess),
    )


def _in_float(comparison: Comparison) -> Finding:
    """A float output has no grid to be rounded to: it lies within the bound, or is wrong. (NUM-04)"""
    exact = comparison.exact
    distance = (comparison.output.double() - exact.real).abs() / exact.step
    allowed = exact.slack.expand_as(distance)
    excess = distance - allowed
    return Finding(
        case=comparison.case,
        max_lsb=_largest(distance),
        slack_lsb=_largest(allowed),
        excess=_largest(excess, default=-0.5),
        is_within_one=False,
        in_float=True,
        sample=Sample(distance=distance, exact=exact.real / exact.step, is_float=True),
        evidence=_evidence(comparison, exact.real, comparison.output.double(), distance, excess),
    )


def compare_all(
    case: str, exacts: Sequence[Exact], output: Any, input_grids: tuple[Grid | None, ...] = ()
) -> Iterator[Finding]:
    """Compare all outputs of a model, in order; of a model with one output, that is a tensor, not a list of one."""
    outputs = flat(output) if len(exacts) > 1 else [output]
    if len(outputs) != len(exacts):
        text = f"the model returned {len(outputs)} outputs; expected {len(exacts)}"
        yield _whole(Comparison(case=case, exact=exacts[0], output=output), text)
        return
    for number, (exact, found) in enumerate(zip(exacts, outputs, strict=True)):
        label = case if len(exacts) == 1 else f"{case}, output {number}"
        yield compare(Comparison(case=label, exact=exact, output=found, input_grids=input_grids))


def _largest(values: Tensor, default: float = 0.0) -> float:
    return float(values.max()) if values.numel() else default


def _malformed(comparison: Comparison) -> str:
    output, wanted = comparison.output, comparison.exact.real
    if not isinstance(output, Tensor):
        return f"the output is a {type(output).__name__}; expected a tensor"
    if output.shape != wanted.shape:
        return f"the output has shape {tuple(output.shape)}; expected {tuple(wanted.shape)}"
    if output.dtype is not torch.float32:
        return f"the output has dtype {output.dtype}; the model's output is real, so float32 was expected"
    if not bool(torch.isfinite(output).all()):
        return "the output is not finite, on finite inputs"
    return ""


def _whole(comparison: Comparison, problem: str) -> Finding:
    return Finding(
        case=comparison.case, max_lsb=float("inf"), slack_lsb=0.0, excess=float("inf"), is_within_one=False,
        problem=problem, evidence={"case": comparison.case},
    )  # fmt: skip


def failure(case: str, rule: str, problem: str, evidence: Mapping[str, object]) -> Finding:
    """Return the finding that stands for a run without an output."""
    return Finding(
        case=case, max_lsb=0.0, slack_lsb=0.0, excess=float("inf"), is_within_one=False, rule=rule, problem=problem,
        evidence={"case": case, **evidence},
    )  # fmt: skip


def _off_grid(comparison: Comparison, grid: Grid, position: Tensor) -> Finding:
    """An output between two integers was computed in float; it may still be the right number."""
    exact = comparison.exact
    distance = (position.clamp(grid.low, grid.high) - exact.integers).abs()
    is_right = bool((distance <= 1 + exact.slack).all())
    text = "the output is not on its quantization grid: it was computed in float, or on a grid of the kernel's own"
    return Finding(
        case=comparison.case,
        max_lsb=_largest(distance),
        slack_lsb=0.0,
        excess=_largest(distance),
        is_within_one=is_right,
        problem=text if is_right else f"{text}, and it is wrong",
        is_float=is_right,
        sample=Sample(distance=distance, exact=exact.integers - grid.zero_point),
        evidence=_evidence(comparison, exact.integers, position, distance, distance),
    )


def _evidence(
    comparison: Comparison, expected: Tensor, found: Tensor, distance: Tensor, excess: Tensor
) -> dict[str, object]:
    """Show the worst elements: where, what was expected and found, and on which grids."""
    if not distance.numel() or not bool((excess > 0).any()):
        return {}
    exact = comparison.exact
    order = excess.flatten().argsort(descending=True, stable=True)[:SHOWN]
    indexes = [unravelled(int(flat), distance.shape) for flat in order]
    grids = {f"input {number}": grid.row() for number, grid in enumerate(comparison.input_grids) if grid is not None}
    evidence: dict[str, object] = {
        "case": comparison.case,
        "index": indexes,
        "expected": [round(float(expected.flatten()[flat]), 6) for flat in order],
        "found": [_number(float(found.flatten()[flat])) for flat in order],
    }
    if exact.grid is None:
        return evidence
    return evidence | {
        "qparams": {**grids, "output": exact.grid.row()},
        "attribution": _counted(attribute(expected, found, exact.grid, exact.parts)),
        "worst": worst(expected, found, exact.grid, exact.parts),
    }


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else round(value, 6)


def judge(findings: Sequence[Finding], *, moves_only: bool) -> Check:
    """Judge a claim's numbers by all comparisons: the worst decides. (NUM-03, NUM-05)"""
    lead = max(findings, key=lambda finding: (-_verdict(finding, moves_only).rank, finding.excess))
    verdict = _verdict(lead, moves_only)
    return Check(
        stage="numerics",
        rule=lead.rule or ("NUM-05" if moves_only else "NUM-03"),
        outcome="pass" if verdict in GREEN else "fail",
        verdict=verdict,
        message=_message(lead, verdict),
        max_lsb=_largest_finite(finding.max_lsb for finding in findings),
        slack_lsb=_largest_finite(finding.slack_lsb for finding in findings),
        cases=len(findings),
        failing=sum(_verdict(finding, moves_only) not in GREEN for finding in findings),
        measured=measured(finding.sample for finding in findings if finding.sample is not None),
        evidence={} if verdict is Verdict.VERIFIED else {**lead.evidence, **_others(findings, lead, moves_only)},
    )


def _others(findings: Sequence[Finding], lead: Finding, moves_only: bool) -> dict[str, object]:
    """What else is as bad: a line for each case, up to a number that can be read."""
    alike = [each for each in findings if each is not lead and _verdict(each, moves_only) is _verdict(lead, moves_only)]
    if not alike:
        return {}
    lines = {"others": [_message(each, _verdict(each, moves_only)) for each in alike[:20]]}
    by_chance = any(each.evidence.get("nondeterministic") for each in alike)
    return {**lines, "nondeterministic": True} if by_chance else {**lines}


def _verdict(finding: Finding, moves_only: bool) -> Verdict:
    """What one comparison makes of the claim. Computed in float is never verified, however right."""
    if finding.is_float:
        return Verdict.FALLBACK
    if finding.excess <= 0:
        return Verdict.VERIFIED
    return Verdict.QUALITY if finding.is_within_one and not moves_only else Verdict.REFUTED


def _message(finding: Finding, verdict: Verdict) -> str:
    if verdict is Verdict.VERIFIED:
        return ""
    if finding.problem:
        return f"{finding.case}: {finding.problem}"
    half = "" if finding.in_float else "0.5 + "
    text = f"{finding.case}: distance {finding.max_lsb:.6g} LSB, allowed {half}{finding.slack_lsb:.3g}"
    return f"within one step, not correctly rounded: {text}" if verdict is Verdict.QUALITY else text


def _largest_finite(values: Iterable[float]) -> float | None:
    """The largest number among what was measured: an output that cannot be measured hides no other's distance."""
    return max((round(value, 6) for value in values if math.isfinite(value)), default=None)
