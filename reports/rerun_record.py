"""What a rerun of a certificate's parts proved, as a file that a report can show.

``verify --rerun=N --record=FILE`` writes it, and ``render --rerun=FILE`` takes it. It names the run by the digest of
its results, so that no other run's report can show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import ClassVar

from reports.codec import SchemaError, decode, line_of, loads
from reports.decision import spell_share
from reports.results import Results, ResultsError
from reports.text import pluralize

CONFIDENCE = 95
"""Confidence of the bound, in percent."""
_MOST = 100_000
"""Largest number of units that a record may be about."""
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunRecord:
    """What came of a rerun: the units that were run again, and those that gave something else."""

    kind: ClassVar[str] = "rerun"
    results: str
    """Digest of the run's results: the footer's sha256."""
    units: list[str]
    """IDs of the claims, models and measurements that were run again."""
    of: int
    """Number of those that they were drawn from."""
    seed: int
    """Seed of the draw."""
    chosen: bool
    """Whether the seed was given by whoever ran it, and not drawn."""
    differing: list[str] = field(default_factory=list)
    """IDs of those that gave something else."""
    tolerated: list[str] = field(default_factory=list)
    """IDs of those that differ only as chance lets them."""
    varying: int = 0
    """Number of those that vary by chance, of which only verdicts and waivers are compared."""
    started: str = ""
    """Start of the rerun, in UTC, ISO 8601."""
    cpu: str = ""
    """Model of the processor that it ran on."""
    torch: str = ""
    """Version of torch that it ran with."""

    def describe(self) -> str:
        """Say in a line what was run again, on what, and what came of it."""
        drawn, units = len(self.units), "claims, models and measurements"
        draw = f"with seed {self.seed}, which was given" if self.chosen else f"drawn at random (seed {self.seed})"
        what = f"all {drawn} {units}" if drawn == self.of else f"{drawn} of {self.of} {units}, {draw}"
        place = f", on {self.cpu}, torch {self.torch}" if self.cpu else ""
        day = f", {self.started[:10]}" if self.started else ""
        parts = [f"A rerun of {what}{place}{day}: {self._spell_outcome()}"]
        if self.tolerated:
            parts.append(f"{len(self.tolerated)} differed as what varies by chance may")
        if self.varying:
            parts.append(f"of {self.varying} that vary by chance the verdicts and waivers alone were compared")
        return "; ".join([*parts, *filter(None, [self._spell_bound()])]) + "."

    def _spell_outcome(self) -> str:
        same = len(self.units) - len(self.differing) - len(self.tolerated)
        if not self.differing:
            return f"{'all' if same == len(self.units) else same} gave the same, bit for bit"
        more = len(self.differing) - _NAMED
        named = ", ".join(self.differing[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{len(self.differing)} of {len(self.units)} gave something else: {named}"

    def _spell_bound(self) -> str:
        if len(self.units) == self.of:
            return ""
        if self.chosen:
            return "a seed that was given bounds nothing, as it can be chosen"
        most = bound_differing(len(self.units), self.of, len(self.differing))
        share = spell_share(most, self.of)
        return f"with {CONFIDENCE} % confidence at most {most} of the {self.of} ({share}) would differ"


def bound_differing(drawn: int, of: int, differing: int) -> int:
    """Return how many of all units differ at most, with 95 % confidence, if so many of those drawn did.

    It is the largest number D that a draw without replacement does not speak against: the probability of at most
    ``differing`` among ``drawn``, which is hypergeometric, is above 5 % for D, and falls with D. That is the one-sided
    bound of Clopper and Pearson ("The use of confidence or fiducial limits illustrated in the case of the binomial",
    Biometrika 26, 1934) for a finite number of units. If none differs it is close to the rule of three, 3/n (Hanley and
    Lippman-Hand, "If nothing goes wrong, is everything all right?", JAMA 249, 1983), and below it. All numbers are
    integers, so that nothing is rounded.
    """
    total = comb(of, drawn)

    def is_possible(number: int) -> bool:
        ways = sum(comb(number, few) * comb(of - number, drawn - few) for few in range(differing + 1))
        return 100 * ways > (100 - CONFIDENCE) * total

    low, high = differing, of - (drawn - differing)  # of those drawn the others did not differ
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_possible(middle) else (low, middle - 1)
    return low


def write_record(record: RerunRecord, path: Path) -> None:
    """Write a record. Raises ResultsError if it cannot be written."""
    try:
        path.write_text(f"{line_of(record)}\n", encoding="utf-8")
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written: {error.strerror}") from error


def read_record(path: Path | None, results: Results) -> RerunRecord | None:
    """Read the record of a rerun of these results; None without a path.

    Raises ResultsError for a file that cannot be read, is none, contradicts itself or is of another run.
    """
    if path is None:
        return None
    try:
        record = decode(loads(path.read_text(encoding="utf-8")), {RerunRecord.kind: RerunRecord})
    except OSError as error:
        raise ResultsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError, SchemaError) as error:
        raise ResultsError(f"{path}: is no record of a rerun (verify --rerun=N --record=FILE): {error}") from error
    assert isinstance(record, RerunRecord)
    if why := _find_contradiction(record):
        raise ResultsError(f"{path}: contradicts itself: {why}")
    if results.footer is None or record.results != results.footer.sha256:
        stated = results.footer.sha256[:12] if results.footer else "none, as the run is incomplete"
        raise ResultsError(f"{path}: is of the results with sha256 {record.results[:12]}; that of these is {stated}")
    return record


def _find_contradiction(record: RerunRecord) -> str:
    units, parts = set(record.units), [*record.differing, *record.tolerated]
    if not 0 < len(units) == len(record.units) <= record.of <= _MOST:
        return f"{pluralize(len(record.units), 'unit')} of {record.of}; each is there once"
    if strange := [unit for unit in parts if unit not in units]:
        return f"{strange[0]} was not run again"
    return "a unit differs twice" if len(set(parts)) < len(parts) else ""
