"""What a run covers, beside its verdicts: which rules were checked, which waivers are in force, what took long."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime
from importlib.resources import files

from reports.results import Results
from reports.schema import ClaimResult, Judged, Waiver

SLOWEST = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """How a rule fared: in how many claims it was checked, and with which outcomes. `text` is what it asks for."""

    rule: str
    text: str
    claims: int
    outcomes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverRow:
    """A waiver in force.

    ``days``: days from the run to its expiry; None: it does not expire. ``verdicts``: number of claims and models that
    it covers, by verdict.
    """

    waiver: Waiver
    days: int | None
    verdicts: Mapping[str, int]


@functools.cache
def rule_texts() -> dict[str, str]:
    """What each rule asks for, by its ID; docs/spec.md says the same."""
    texts: dict[str, str] = json.loads(files("reports").joinpath("rules.json").read_text(encoding="utf-8"))
    return texts


def rules(results: Results) -> tuple[RuleRow, ...]:
    """The rules that checks name, in order of their IDs."""
    outcomes: dict[str, Counter[str]] = {}
    claims: dict[str, set[str]] = {}
    for check in results.checks:
        if check.rule:
            outcomes.setdefault(check.rule, Counter())[check.outcome] += 1
            claims.setdefault(check.rule, set()).add(check.claim)
    return tuple(
        RuleRow(rule=rule, text=rule_texts().get(rule, ""), claims=len(claims[rule]), outcomes=outcomes[rule])
        for rule in sorted(outcomes)
    )


def waivers(results: Results) -> tuple[WaiverRow, ...]:
    """The waivers that cover something, those that expire first before the others."""
    groups: dict[Waiver, list[Judged]] = {}
    for row in results.judged:
        if row.waived and row.waiver is not None:
            groups.setdefault(row.waiver, []).append(row)
    ordered = sorted(groups.items(), key=lambda item: _expiry_first(item[0]))
    return tuple(_waiver(waiver, rows, results.header.started) for waiver, rows in ordered)


def _expiry_first(waiver: Waiver) -> tuple[str, str, str, str]:
    return waiver.expires or "9999", waiver.reason, waiver.url or "", str(waiver.max_lsb)


def slowest(results: Results) -> tuple[ClaimResult, ...]:
    """The claims that took most time, the longest first."""
    return tuple(sorted(results.claims, key=lambda claim: (-claim.seconds, claim.claim))[:SLOWEST])


def _waiver(waiver: Waiver, rows: list[Judged], started: str) -> WaiverRow:
    return WaiverRow(
        waiver=waiver, days=_days(started, waiver.expires), verdicts=Counter(row.verdict.value for row in rows)
    )


def _days(started: str, expires: str | None) -> int | None:
    """How many days are left after the day of the run; None: it does not expire, or nobody can tell."""
    try:
        return None if expires is None else (date.fromisoformat(expires) - datetime.fromisoformat(started).date()).days
    except ValueError:
        return None
