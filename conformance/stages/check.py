"""Check: what one stage says of one claim, and the row that it leaves in the results file."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reports.codec import PlainRow
from reports.results import Verdict

_FOLDERS = {*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")), str(Path(__file__).parents[2])}
_PLACES = tuple(json.dumps(f"{folder}{os.sep}")[1:-1] for folder in sorted(_FOLDERS, key=len, reverse=True))
_VOLATILE = re.compile(r"(<eval_with_key>)\.\d+|(0x)[0-9a-f]{6,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A rule that does not hold, and how it shows."""

    rule: str
    message: str
    verdict: Verdict = Verdict.REFUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one stage for one claim.

    ``verdict`` is what this check alone makes of the claim; the claim's verdict is the worst of its checks.
    ``outcome``: "pass", "fail" (a rule is broken), "error" (the suite itself failed) or "skip" (not reached, or not
    built; ``message`` says why). ``max_lsb`` and ``slack_lsb`` are in steps of the output's scale (NUM-03, NUM-04).
    ``failing``: of ``cases``, how many do not pass; a stage that looks at the claim as a whole has none of them.
    ``measured``: how the numbers of all comparisons are spread (conformance.stages.statistics).
    """

    stage: str
    rule: str
    outcome: str
    verdict: Verdict
    message: str = ""
    max_lsb: float | None = None
    slack_lsb: float | None = None
    cases: int | None = None
    failing: int = 0
    seconds: float = 0.0
    evidence: Mapping[str, object] = field(default_factory=dict)
    measured: Mapping[str, object] = field(default_factory=dict)

    def row(self, claim_id: str) -> dict[str, object]:
        """Return the results-file row, plain builtins only."""
        row: dict[str, object] = {
            "kind": "check",
            "claim": claim_id,
            "stage": self.stage,
            "rule": self.rule,
            "outcome": self.outcome,
            "verdict": self.verdict.value,
            "message": self.message,
            "max_lsb": self.max_lsb,
            "slack_lsb": self.slack_lsb,
            "cases": self.cases,
            "seconds": round(self.seconds, 6),
        }
        if self.failing:
            row["failing"] = self.failing
        if self.evidence:
            row["evidence"] = dict(self.evidence)
        if self.measured:
            row["measured"] = dict(self.measured)
        return row


def plain(row: Mapping[str, object]) -> PlainRow:
    """Return a row as it will be in the file: plain builtins, text without lone surrogates.

    Counters and addresses, which differ from process to process, are left out of its texts, and of paths the folders of
    Python, of installed packages and of the suite, which differ from machine to machine.
    Raises TypeError or ValueError for what JSON cannot hold.
    """
    text = _VOLATILE.sub(r"\1\2", json.dumps(row, allow_nan=False, ensure_ascii=False))
    for place in _PLACES:
        text = text.replace(place, "")
    found: PlainRow = json.loads(text.encode("utf-8", "replace"))
    return found
