"""Coverage of a run: the rules that were checked, the waivers in force, and the slowest claims."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from importlib.resources import files

from reports.findings import Finding, lay_out_findings
from reports.results import Results
from reports.schema import ClaimResult, Judged, Waiver

SLOWEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """A rule: its requirement (`text`), the number of claims in which it was checked, and the outcomes.

    ``failing``: the IDs of the claims with a check of it that fails.
    """

    rule: str
    text: str
    claims: int
    outcomes: Mapping[str, int]
    failing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverRow:
    """A waiver in force.

    ``days``: days from the run to the expiry; None: it does not expire. ``verdicts``: number of claims and models that
    it covers, by verdict. ``first``: the ID of the first of them. ``findings``: what explains it.
    """

    waiver: Waiver
    days: int | None
    verdicts: Mapping[str, int]
    first: str
    findings: tuple[Finding, ...]


@functools.cache
def read_rule_texts() -> dict[str, str]:
    """Return the requirement of each rule, by ID; docs/spec.md says the same."""
    texts: dict[str, str] = json.loads(files("reports").joinpath("rules.json").read_text(encoding="utf-8"))
    return texts


def collect_rules(results: Results) -> tuple[RuleRow, ...]:
    """Return the rules that checks name, in the order of their IDs."""
    outcomes: dict[str, Counter[str]] = {}
    claims: dict[str, set[str]] = {}
    failing: dict[str, set[str]] = {}
    for check in results.checks:
        if check.rule:
            outcomes.setdefault(check.rule, Counter())[check.outcome] += 1
            claims.setdefault(check.rule, set()).add(check.claim)
            if check.failed:
                failing.setdefault(check.rule, set()).add(check.claim)
    return tuple(
        RuleRow(
            rule=rule,
            text=read_rule_texts().get(rule, ""),
            claims=len(claims[rule]),
            outcomes=outcomes[rule],
            failing=tuple(sorted(failing.get(rule, ()))),
        )
        for rule in sorted(outcomes)
    )


def collect_waivers(results: Results) -> tuple[WaiverRow, ...]:
    """Return the waivers that cover something, the first to expire first."""
    groups: dict[Waiver, list[Judged]] = {}
    for row in results.judged:
        if row.waived and row.waiver is not None:
            groups.setdefault(row.waiver, []).append(row)
    ordered = sorted(groups.items(), key=lambda item: _make_expiry_key(item[0]))
    findings = lay_out_findings([waiver.findings for waiver, _ in ordered], results.header.findings)
    return tuple(
        _make_waiver_row(waiver, rows, results.header.started, own)
        for (waiver, rows), own in zip(ordered, findings, strict=True)
    )


def _make_expiry_key(waiver: Waiver) -> tuple[str, str, str, str, list[str]]:
    return waiver.expires or "9999", waiver.reason, waiver.url or "", str(waiver.max_lsb), waiver.findings


def find_slowest(results: Results) -> tuple[ClaimResult, ...]:
    """Return the claims that took most time, the longest first."""
    return tuple(sorted(results.claims, key=lambda claim: (-claim.seconds, claim.claim))[:SLOWEST])


def _make_waiver_row(waiver: Waiver, rows: list[Judged], started: str, findings: tuple[Finding, ...]) -> WaiverRow:
    return WaiverRow(
        waiver=waiver,
        days=_count_days(started, waiver.expires),
        verdicts=Counter(row.verdict.value for row in rows),
        first=rows[0].id,
        findings=findings,
    )


def _count_days(started: str, expires: str | None) -> int | None:
    """Count the days left after the day of the run; None: it does not expire, or a date is not readable."""
    try:
        return None if expires is None else (date.fromisoformat(expires) - datetime.fromisoformat(started).date()).days
    except ValueError:
        return None
