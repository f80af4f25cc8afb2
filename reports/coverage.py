"""Coverage of a run: the rules that were checked."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from fx_quant_conformance.reports.results import Results


@dataclass(slots=True, kw_only=True)
class RuleRow:
    """A rule, the number of checks of it by outcome, and the IDs of the claims, and of those with a failing check."""

    rule: str
    outcomes: Counter[str] = field(default_factory=Counter)
    claims: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)


@functools.cache
def read_rule_texts() -> Mapping[str, str]:
    """Return the requirement of each rule, by ID; docs/spec.md says the same."""
    texts: dict[str, str] = json.loads(
        files("fx_quant_conformance.reports").joinpath("rules.json").read_text(encoding="utf-8")
    )
    return texts


def collect_rules(results: Results) -> tuple[RuleRow, ...]:
    """Return the rules that checks name, in the order of their IDs."""
    rows: dict[str, RuleRow] = {}
    for check in results.checks:
        if check.rule:
            row = rows.setdefault(check.rule, RuleRow(rule=check.rule))
            row.outcomes[check.outcome] += 1
            row.claims.add(check.claim)
            if check.failed:
                row.failing.add(check.claim)
    return tuple(rows[rule] for rule in sorted(rows))
