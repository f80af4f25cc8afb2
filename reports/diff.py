"""Differences between two results files: what a merge is gated by, and what a report shows beside a baseline.

What both runs judged is compared: worse is what was green and is not, what has a worse verdict, and what fails as
before but in more cases, or by a larger error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tabulate import tabulate

from reports.results import Results
from reports.schema import ClaimResult, Judged, Number
from reports.text import end, lsb, middle, one_line
from reports.verdicts import PASSING, Outcome

_BASIS = ("backend", "config_sha256", "torch", "python", "suite_version", "suite_commit", "isa", "cpu", "profile",
          "seed")  # fmt: skip


class Change(StrEnum):
    """What became of a claim or model, the worst first."""

    REGRESSED = "regressed"
    """Worse: the verdict, the error, how many cases fail, or a waiver that is gone."""
    REMOVED = "removed"
    """In the earlier run alone."""
    ADDED = "added"
    """In the later run alone."""
    CHANGED = "changed"
    """Other, and neither better nor worse."""
    IMPROVED = "improved"
    """Better."""
    UNCHANGED = "unchanged"
    """The same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A claim or model in one or both of two runs."""

    name: str
    """Its ID."""
    change: Change
    """What became of it."""
    old: Judged | None
    """Its row in the earlier run; None: it was not there."""
    new: Judged | None
    """Its row in the later run; None: it is not there."""
    why: str
    """What differs, in words."""

    @property
    def states(self) -> tuple[str, str]:
        """Verdict and largest error, before and after."""
        return _state(self.old), _state(self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """All that two runs judged."""

    rows: tuple[Difference, ...]
    """The worst changes first."""
    basis: tuple[str, ...]
    """In what the runs themselves differ, such as torch or the CPU; a line each."""
    is_complete: bool
    """Whether the later run came to its end."""

    @property
    def counts(self) -> dict[Change, int]:
        """How many there are of each change, none left out."""
        found = Counter(row.change for row in self.rows)
        return {change: found[change] for change in Change}

    @property
    def told(self) -> tuple[Difference, ...]:
        """Those that are not simply unchanged."""
        return tuple(row for row in self.rows if row.change is not Change.UNCHANGED)

    @property
    def regressed(self) -> bool:
        """Whether something got worse, or the new run did not get to its end and so does not tell."""
        return bool(self.counts[Change.REGRESSED]) or not self.is_complete


def compare_runs(old: Results, new: Results) -> Differences:
    """Compare what two runs judged, by ID. Runs of other versions, seeds or machines compare too; ``basis`` says so."""
    before, after = _by_name(old), _by_name(new)
    rows = [_difference(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]
    order = list(Change)
    return Differences(
        rows=tuple(sorted(rows, key=lambda row: order.index(row.change))),
        basis=tuple(_basis(old, new)),
        is_complete=new.outcome is not Outcome.INCOMPLETE,
    )


def diff_text(found: Differences, width: int) -> str:
    """Return the differences as text, fitted to `width` columns; what is unchanged is counted alone."""
    counts = ", ".join(f"{count} {change}" for change, count in found.counts.items())
    lines = [f"{'REGRESSED' if found.regressed else 'no regression'}: {counts}", *found.basis]
    if not found.is_complete:
        lines.append("the new run is incomplete: what it did not reach is not known to hold")
    rows = [(row.change, *map(one_line, row.states), f"{middle(one_line(row.name), width - 52)}\n"
             f"{end(one_line(row.why), width - 52)}") for row in found.told]  # fmt: skip
    if rows:
        headers = ("change", "was", "is", "claim, and what differs")
        lines.append("\n" + tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
    return "\n".join(lines) + "\n"


def _by_name(results: Results) -> dict[str, Judged]:
    return {row.id: row for row in results.judged}


def _basis(old: Results, new: Results) -> Iterator[str]:
    for name in _BASIS:
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            yield one_line(f"{name}: {str(was)[:60]} in the old run, {str(now)[:60]} in the new one")


def _difference(name: str, old: Judged | None, new: Judged | None) -> Difference:
    if old is None or new is None:
        change, why = (Change.ADDED, "not in the old run") if old is None else (Change.REMOVED, "not in the new run")
    elif why := _worse(old, new):
        change = Change.REGRESSED
    elif why := _worse(new, old):
        change, why = Change.IMPROVED, _better(old, new)
    elif why := _other(old, new):
        change = Change.CHANGED
    else:
        change = Change.UNCHANGED
    return Difference(name=name, change=change, old=old, new=new, why=why)


def _worse(old: Judged, new: Judged) -> str:
    """Say in what `new` is worse; "" if it is not."""
    if old.passes and not new.passes:
        return "passed before" if old.verdict in PASSING else "is not waived any more"
    if new.verdict.rank < old.verdict.rank:
        return f"was {old.verdict}"
    if new.verdict is not old.verdict or new.passes is not old.passes or new.verdict in PASSING:
        return ""
    if _size(new.max_lsb) > _size(old.max_lsb):
        return f"the largest error was {lsb(old.max_lsb)} LSB"
    was, now = _failing(old), _failing(new)
    return f"{now} cases fail, not {was}" if was is not None and now is not None and now > was else ""


def _better(old: Judged, new: Judged) -> str:
    if new.waived and not old.waived:
        return "is waived now"
    return f"was {old.verdict}" if new.verdict is not old.verdict else "a smaller error, or fewer cases"


def _size(value: Number | None) -> float:
    """An error to compare by: one that is not finite is beyond all others."""
    return 0.0 if value is None else math.inf if isinstance(value, str) else value


def _failing(row: Judged) -> int | None:
    return row.failing if isinstance(row, ClaimResult) else None


def _other(old: Judged, new: Judged) -> str:
    """Say in what two that are neither better nor worse differ; "": in nothing."""
    pairs = {
        "verdict": (old.verdict, new.verdict),
        "waived": (old.waived, new.waived),
        "LSB": (lsb(old.max_lsb), lsb(new.max_lsb)),
        "failing cases": (_failing(old), _failing(new)),
    }
    return ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now)


def _state(row: Judged | None) -> str:
    if row is None:
        return "-"
    return f"{'WAIVED ' if row.waived else ''}{row.verdict} {lsb(row.max_lsb)}"
