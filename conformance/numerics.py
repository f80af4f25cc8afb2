"""Comparing a backend's output with the oracle, and judging a claim by it (rules NUM-03 to NUM-06)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.checks import Check
from conformance.oracle import Exact, Grid, slack
from reports.results import Verdict

SHOWN = 6  # elements of the worst finding that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What is compared: a backend's output, and the exact result it should be a rounding of."""

    case: str
    exact: Exact
    output: Any
    int32_bias: bool
    float_accumulation: bool
    input_grids: tuple[Grid, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one comparison. ``max_lsb``: the largest |q - v|; ``excess``: the most by which a bound is passed.

    ``problem``: what is wrong with the output as a whole (its type, its shape, not finite, off the grid), or "".
    ``rule``: the rule that a problem breaks, where it is not the one that the claim is judged by.
    """

    case: str
    max_lsb: float
    slack_lsb: float
    excess: float
    is_within_one: bool
    problem: str = ""
    rule: str = ""
    is_float: bool = False
    evidence: Mapping[str, object] = field(default_factory=dict)


def compare(comparison: Comparison) -> Finding:
    """Measure the LSB distance of an output. (NUM-03)"""
    problem = _malformed(comparison)
    if problem:
        return _whole(comparison, problem)
    exact, grid = comparison.exact, comparison.exact.grid
    position = grid.integers(comparison.output)
    found = position.round()
    off_grid = (position - found).abs() - found.sub(grid.zero_point).abs() * 2.0**-22 - 2.0**-20
    if bool((off_grid > 0).any()):
        return _off_grid(comparison, position)
    allowed = slack(
        exact, int32_bias=comparison.int32_bias, float_accumulation=comparison.float_accumulation
    ).expand_as(found)
    distance = (found - exact.integers).abs()
    outside = (found < grid.low) | (found > grid.high)
    excess = distance - 0.5 - allowed
    return Finding(
        case=comparison.case,
        max_lsb=_largest(distance),
        slack_lsb=_largest(allowed),
        excess=_largest(excess, default=-0.5),
        is_within_one=not bool(((distance > 1 + allowed) | outside).any()),
        evidence=_evidence(comparison, found, distance, excess),
    )


def compare_repeated(case: str, first: Any, second: Any) -> Finding | None:
    """Compare the outputs of two runs on one input; None: they are equal, or the first was no output. (NUM-07)"""
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None  # `compare` has said so
    is_alike = isinstance(second, Tensor) and (first.dtype, first.shape) == (second.dtype, second.shape)
    if is_alike and torch.equal(first, second):
        return None
    index = [int(i) for i in (first != second).nonzero()[0]] if is_alike else None
    where = f", first at index {index}" if index is not None else ""
    return Finding(
        case=case, max_lsb=float("inf"), slack_lsb=0.0, excess=float("inf"), is_within_one=False, rule="NUM-07",
        problem=f"a second run on the same input gave another output{where}", evidence={"case": case},
    )  # fmt: skip


def _largest(values: Tensor, default: float = 0.0) -> float:
    return float(values.max()) if values.numel() else default


def _malformed(comparison: Comparison) -> str:
    output, wanted = comparison.output, comparison.exact.integers
    if not isinstance(output, Tensor):
        return f"the output is a {type(output).__name__}; expected a tensor"
    if output.shape != wanted.shape:
        return f"the output has shape {tuple(output.shape)}; expected {tuple(wanted.shape)}"
    if output.dtype is not torch.float32:
        return f"the output has dtype {output.dtype}; the model ends in dequantize, so float32 was expected"
    if not bool(torch.isfinite(output).all()):
        return "the output is not finite, on finite inputs"
    return ""


def _whole(comparison: Comparison, problem: str) -> Finding:
    return Finding(
        case=comparison.case, max_lsb=float("inf"), slack_lsb=0.0, excess=float("inf"), is_within_one=False,
        problem=problem, evidence={"case": comparison.case},
    )  # fmt: skip


def _off_grid(comparison: Comparison, position: Tensor) -> Finding:
    """An output between two integers was computed in float; it may still be the right number."""
    exact = comparison.exact
    distance = (position.clamp(exact.grid.low, exact.grid.high) - exact.integers).abs()
    is_right = not bool((distance > 1).any())
    text = "the output is not on its quantization grid: it was computed in float"
    return Finding(
        case=comparison.case,
        max_lsb=_largest(distance),
        slack_lsb=0.0,
        excess=_largest(distance),
        is_within_one=is_right,
        problem=text if is_right else f"{text}, and it is wrong",
        is_float=is_right,
        evidence=_evidence(comparison, position, distance, distance),
    )


def _evidence(comparison: Comparison, found: Tensor, distance: Tensor, excess: Tensor) -> dict[str, object]:
    """Show the worst elements: where, what was expected and found, and on which grids."""
    exact = comparison.exact
    if not distance.numel():
        return {}
    order = excess.flatten().argsort(descending=True, stable=True)[:SHOWN]
    indexes = [[int(i) for i in torch.unravel_index(flat, distance.shape)] for flat in order]
    worst = order[0]
    grids = {f"input {number}": grid.row() for number, grid in enumerate(comparison.input_grids)}
    return {
        "case": comparison.case,
        "index": indexes,
        "expected": [round(float(exact.integers.flatten()[flat]), 6) for flat in order],
        "found": [_number(float(found.flatten()[flat])) for flat in order],
        "qparams": {**grids, "output": exact.grid.row()},
        "attribution": _attribute(float(exact.integers.flatten()[worst]), float(found.flatten()[worst]), exact.grid),
    }


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else round(value, 6)


def _attribute(expected: float, found: float, grid: Grid) -> str:
    """Name the kind of difference at one element. (NUM-06)"""
    distance = abs(found - expected)
    if abs(abs(expected - round(expected)) - 0.5) < 1e-4 and distance < 0.51:
        return "exact tie"
    if distance <= 0.5:
        return "correctly rounded"
    if distance <= 1:
        return "off by one: the other neighbour was taken"
    if found in (grid.low, grid.high):
        return "saturated"
    return "wrong"


def judge(findings: Sequence[Finding], *, moves_only: bool) -> Check:
    """Judge a claim by all its comparisons: the worst decides. (NUM-03, NUM-05)"""
    worst = max(findings, key=lambda finding: (_SEVERITY.index(_verdict(finding, moves_only)), finding.excess))
    verdict = _verdict(worst, moves_only)
    return Check(
        stage="numerics",
        rule=worst.rule or ("NUM-05" if moves_only else "NUM-03"),
        outcome="pass" if verdict in (Verdict.VERIFIED, Verdict.QUALITY) else "fail",
        verdict=verdict,
        message=_message(worst, verdict),
        max_lsb=_finite(max(finding.max_lsb for finding in findings)),
        slack_lsb=_finite(max(finding.slack_lsb for finding in findings)),
        cases=len(findings),
        evidence={} if verdict is Verdict.VERIFIED else worst.evidence,
    )


_SEVERITY = (Verdict.VERIFIED, Verdict.QUALITY, Verdict.FALLBACK, Verdict.REFUTED)


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
    text = f"{finding.case}: distance {finding.max_lsb:.6g} LSB, allowed 0.5 + {finding.slack_lsb:.3g}"
    return f"within one step, not correctly rounded: {text}" if verdict is Verdict.QUALITY else text


def _finite(value: float) -> float | None:
    return round(value, 6) if value < float("inf") else None
