"""Differences between two results files: the gate of a merge, and the baseline section of a report.

Claims and models of both runs are compared: verdict, deciding rule and stage, count of failing cases, and distance. One
is worse if it passed and no longer does, has a worse verdict, or fails by the same rule but in more cases or by a
larger error. What fails by another rule has changed, and is neither better nor worse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.results import Lead, Results, ResultsError, read_results
from fx_quant_conformance.reports.schema import ClaimResult, Judged
from fx_quant_conformance.reports.selection import select_of_run
from fx_quant_conformance.reports.text import cut_end, cut_middle, format_lsb, join_lines
from fx_quant_conformance.reports.text_enum import TextEnum
from fx_quant_conformance.reports.verdicts import PASSING, Outcome, Verdict

_BASIS = (
    "backend",
    "config_sha256",
    "torch",
    "python",
    "suite_version",
    "suite_commit",
    "isa",
    "cpu",
    "profile",
    "seed",
)


class Change(TextEnum):
    """How a claim or model changed, the worst change first."""

    REGRESSED = "regressed"
    """Worse: the verdict, the error, the number of failing cases, or a waiver that was removed."""
    REMOVED = "removed"
    """Only in the earlier run, though the later one was to run it."""
    ADDED = "added"
    """Only in the later run."""
    CHANGED = "changed"
    """Different, but neither better nor worse."""
    IMPROVED = "improved"
    """Better."""
    UNCHANGED = "unchanged"
    """The same."""


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared of a claim or model in one of the runs."""

    verdict: Verdict
    """Its verdict, before waivers."""
    lead: Lead
    """What decided the verdict."""
    failing: int | None = None
    """In how many cases and comparisons it fails; None: that varies, or is not known."""
    max_lsb: Number | None = None
    """Its largest error, in steps of the output's scale; None: no number was measured, or it is not known."""
    passes: bool = False
    """Whether it lets the run pass."""
    waived: bool = False
    """Whether a waiver lets it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A claim or model in one or both of two runs."""

    name: str
    """ID of the claim or model."""
    change: Change
    """Kind of the change."""
    old: Side | None
    """What the earlier run says of it; None: nothing."""
    new: Side | None
    """What the later run says of it; None: nothing."""
    why: str
    """What differs, in words."""

    @property
    def states(self) -> tuple[str, str]:
        """Verdict and largest error, before and after."""
        return _format_state(self.old), _format_state(self.new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Differences of two runs."""

    rows: tuple[Difference, ...]
    """All claims and models of both runs, the worst changes first."""
    basis: tuple[str, ...]
    """Differences of the headers, such as torch or the CPU; a line each."""
    is_complete: bool
    """Whether the later run is complete."""
    title: str
    """Backend, day and profile of the earlier run."""

    @property
    def counts(self) -> dict[Change, int]:
        """Number of rows with each change, zeros included."""
        counts = Counter(row.change for row in self.rows)
        return {change: counts[change] for change in Change}

    @property
    def changed_rows(self) -> tuple[Difference, ...]:
        """The rows that are not UNCHANGED."""
        return tuple(row for row in self.rows if row.change is not Change.UNCHANGED)

    @property
    def regressed(self) -> bool:
        """Whether something got worse, or the new run is incomplete and so cannot show that nothing did."""
        return bool(self.counts[Change.REGRESSED]) or not self.is_complete


def read_baseline(path: Path | None, profile: str, *, any_profile: bool = False) -> Results | None:
    """Read an earlier run that a run of a profile is compared with; None if there is no path.

    Raises ResultsError for a file that cannot be read, and for a run of another profile, unless any is taken: it has
    other cases, so that a difference need not be a change.
    """
    if path is None:
        return None
    results = read_results(path)
    if results.header.profile != profile and not any_profile:
        raise ResultsError(
            f"{path}: a baseline of profile {results.header.profile}, for a run of profile {profile}: they have other "
            "cases, so that what differs may be no change; --any-profile compares them all the same"
        )
    return results


def compare_runs(old: Results, new: Results) -> Differences:
    """Compare claims and models by ID. Runs may differ in versions, seed or machine; ``basis`` lists where.

    What the later run was not to run, by its ``--claim`` or as a shard, is not compared; ``basis`` counts it.
    """
    before, after = _index(old), _index(new)
    asked = select_of_run(new.header, {*before, *after})
    left_out = [before.pop(name) for name in list(before) if name not in asked and name not in after]
    return Differences(
        rows=compare_sides(before, after),
        basis=(*_compare_headers(old, new), *_format_left_out(left_out)),
        is_complete=new.outcome is not Outcome.INCOMPLETE,
        title=f"{old.header.backend} of {old.header.started[:10]}, profile {old.header.profile}",
    )


def compare_sides(before: Mapping[str, Side], after: Mapping[str, Side]) -> tuple[Difference, ...]:
    """Compare what two runs say, by ID; the worst changes come first."""
    rows = [_compare_rows(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]
    order = list(Change)
    return tuple(sorted(rows, key=lambda row: order.index(row.change)))


def diff_text(differences: Differences, width: int) -> str:
    """Return the differences as text, fitted to `width` columns; unchanged rows are only counted."""
    counts = ", ".join(f"{count} {change}" for change, count in differences.counts.items())
    lines = [f"{'REGRESSED' if differences.regressed else 'no regression'}: {counts}", *differences.basis]
    if not differences.is_complete:
        lines.append("the new run is incomplete: what it did not reach is not known to hold")
    rows = [
        (
            row.change,
            *map(join_lines, row.states),
            f"{cut_middle(join_lines(row.name), width - 52)}\n{cut_end(join_lines(row.why), width - 52)}",
        )
        for row in differences.changed_rows
    ]
    if rows:
        headers = ("change", "was", "is", "claim, and what differs")
        lines.append("\n" + tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
    return "\n".join(lines) + "\n"


def _index(results: Results) -> dict[str, Side]:
    leads = results.leads()
    return {row.id: make_side(row, leads[row.id]) for row in results.judged}


def make_side(row: Judged, lead: Lead) -> Side:
    """Return what is compared of a row."""
    failing = row.failing if isinstance(row, ClaimResult) else None
    return Side(row.verdict, lead, failing, row.max_lsb, row.passes, row.waived)


def _compare_headers(old: Results, new: Results) -> Iterator[str]:
    for name in _BASIS:
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            yield join_lines(f"{name}: {str(was)[:60]} in the old run, {str(now)[:60]} in the new one")


def _format_left_out(rows: Sequence[Side]) -> Iterator[str]:
    if rows:
        yield f"selection: {len(rows)} of the old run's claims and models are not compared: the new run left them out"


def _compare_rows(name: str, old: Side | None, new: Side | None) -> Difference:
    if old is None or new is None:
        change, why = (Change.ADDED, "not in the old run") if old is None else (Change.REMOVED, "not in the new run")
    elif why := _format_regression(old, new):
        change = Change.REGRESSED
    elif _format_regression(new, old):
        change, why = Change.IMPROVED, _format_improvement(old, new)
    elif why := _format_change(old, new):
        change = Change.CHANGED
    else:
        change = Change.UNCHANGED
    return Difference(name=name, change=change, old=old, new=new, why=why)


def _format_regression(old: Side, new: Side) -> str:
    """Say how a claim or model is worse than before; "" if it is not."""
    if old.passes and not new.passes:
        return "passed before" if old.verdict in PASSING else "is not waived any more"
    if new.verdict.rank < old.verdict.rank:
        return f"was {old.verdict}"
    if new.verdict is not old.verdict or new.passes is not old.passes or new.verdict in PASSING:
        return ""
    if old.lead != new.lead:  # what one rule counts and measures says nothing of another
        return ""
    if to_size(new.max_lsb) > to_size(old.max_lsb):
        return f"the largest error was {format_lsb(old.max_lsb)} LSB"
    was, now = old.failing, new.failing
    return f"{now} cases fail, not {was}" if was is not None and now is not None and now > was else ""


def _format_improvement(old: Side, new: Side) -> str:
    if new.waived and not old.waived:
        return "is waived now"
    return f"was {old.verdict}" if new.verdict is not old.verdict else "a smaller error, or fewer cases"


def to_size(value: Number | None) -> float:
    """Convert an error for comparing: one that is not finite is larger than all others."""
    return 0.0 if value is None else math.inf if isinstance(value, str) else value


def _format_change(old: Side, new: Side) -> str:
    """Say how a claim or model differs, if it is not worse; "" if it is the same."""
    pairs = {
        "verdict": (old.verdict, new.verdict),
        "rule": (old.lead, new.lead),
        "waived": (old.waived, new.waived),
        "LSB": (format_lsb(old.max_lsb), format_lsb(new.max_lsb)),
        "failing cases": (old.failing, new.failing),
    }
    return ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in pairs.items() if was != now)


def _format_state(side: Side | None) -> str:
    if side is None:
        return "-"
    return f"{'WAIVED ' if side.waived else ''}{side.verdict} {format_lsb(side.max_lsb)}"
