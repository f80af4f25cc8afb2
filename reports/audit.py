"""Auditing rows against each other: a claim's row follows from its checks, and a check's outcome from its numbers.

A results file in which they contradict each other was edited (`conformance.run.judging` makes the rows). Only what
holds for every run of the suite is looked at, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.numbers import BINS, Number
from reports.results import Results, leading_check
from reports.schema import Check, ClaimResult, Judged
from reports.verdicts import Verdict

MOST_BY_CHANCE = 10
"""One of how many claims may vary from run to run: the numbers of such a claim cannot be held to a repetition."""
FEW = 2
"""So many claims may vary in any run."""
LONGEST_CLAIM = 3600.0
"""Longest time of one claim, in seconds, that a certificate may have been made with."""
_ROUNDED = 1e-5
"""More than the rounding of distances in LSB, which have six digits."""


def is_timeout(value: object) -> bool:
    """Tell whether a value is a time limit of claims, in seconds, that a certificate may have been made with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_CLAIM


def find_contradictions(results: Results) -> Iterator[str]:
    """Yield what contradicts itself in the rows, a line each."""
    checks = results.checks_by_claim()
    for claim in results.claims:
        yield from (f"claim {claim.claim!r} {what}" for what in _audit_claim(claim, checks[claim.claim]))
    is_declared = "requantize" in results.header.capabilities
    half = 1.0 if is_declared else 0.5  # a declared rounding may go to one side (NUM-03)
    for check in results.checks:
        yield from (f"check {check.stage} of {check.claim!r} {what}" for what in _audit_check(check, half))
    for row in results.judged:
        yield from (f"{row.kind} {row.id!r} {what}" for what in _audit_waiver(row))
        if min(row.lowerings, row.runs) < 0:
            yield f"{row.kind} {row.id!r} counts less than no work"
    varying = sum(any(check.is_nondeterministic for check in each) for each in checks.values())
    if varying > max(FEW, len(checks) // MOST_BY_CHANCE):
        yield f"{varying} of {len(checks)} claims are said to vary by chance; at most one in {MOST_BY_CHANCE} may"


def _audit_claim(claim: ClaimResult, checks: Sequence[Check]) -> Iterator[str]:
    """Compare a claim's row with its checks. (`conformance.run.judging.rows_of_claim`)"""
    verdict, lead = Verdict.worst(check.verdict for check in checks), leading_check(checks)
    if claim.verdict is not verdict:
        yield f"is {claim.verdict}, but the worst of its checks is {verdict}"
    if claim.verdict is Verdict.VERIFIED and claim.execution == "none":
        yield "is VERIFIED, but nothing shows its execution"
    largest = max((_size(check.max_lsb) for check in checks), default=-1.0)
    if _size(claim.max_lsb) != largest:
        yield f"is off by {claim.max_lsb} LSB, but its checks by {largest:g}"
    failing = sum(check.failing for check in checks)
    if claim.failing != failing and not any(check.is_nondeterministic for check in checks):
        yield f"fails in {claim.failing} cases and comparisons, but its checks in {failing}"
    if not claim.reason.strip().startswith(lead.message.strip() if lead else ""):
        yield "gives another reason than the check that decides"


def _audit_check(check: Check, half: float) -> Iterator[str]:
    """Compare a check's outcome with its verdict and numbers. ``half``: the largest distance without any slack."""
    is_verified = check.verdict is Verdict.VERIFIED
    if is_verified and (check.outcome != "pass" or check.failing):
        yield f"is VERIFIED, with outcome {check.outcome} and {check.failing} failing"
    if check.is_nondeterministic and not check.failed:
        yield f"is said to vary by chance, with outcome {check.outcome}; only a check that fails is"
    if check.stage != "numerics" or check.outcome != "pass":
        return
    largest, slack = _size(check.max_lsb), max(_size(check.slack_lsb), 0.0)
    if is_verified and largest > half + slack + _ROUNDED:  # NUM-03
        yield f"is VERIFIED, but off by {largest:g} LSB, with a slack of {slack:g}"
    if check.statistics is not None and any(check.statistics.distances):
        last = max(place for place, count in enumerate(check.statistics.distances) if count)
        low, high = (0.0, *BINS)[last], (*BINS, float("inf"))[last]
        if not low - _ROUNDED <= largest <= high + _ROUNDED:
            yield f"is off by {largest:g} LSB, but its statistics by {low:g} to {high:g}"


def _audit_waiver(row: Judged) -> Iterator[str]:
    if row.waived != (row.waiver is not None):
        yield f"{'is' if row.waived else 'is not'} waived, {'without' if row.waived else 'but with'} a waiver"
    if row.allowed and (row.waived or row.verdict is not Verdict.QUALITY):
        yield f"is allowed QUALITY, but is {'waived' if row.waived else row.verdict}"
    elif row.waived and row.verdict is Verdict.VERIFIED:
        yield "is waived, but VERIFIED: it needs no waiver"


def _size(distance: Number | None) -> float:
    """Return a distance as a number; what is not finite is larger than all numbers, and nothing is below zero."""
    if distance is None:
        return -1.0
    return float("inf") if isinstance(distance, str) else float(distance)
