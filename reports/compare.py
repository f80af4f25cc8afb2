"""The scoreboard: runs of several backends side by side, op by op and dtype config by dtype config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fx_quant_conformance.reports.decision import VerifiedShare, count_verified, pass_by_waiver
from fx_quant_conformance.reports.families import FAMILIES, OTHER, find_family
from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.page import render_page
from fx_quant_conformance.reports.results import Results, ResultsError
from fx_quant_conformance.reports.schema import ClaimResult, Header
from fx_quant_conformance.reports.text import format_lsb, pluralize
from fx_quant_conformance.reports.verdicts import Outcome, Verdict

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The claims of one backend on one op and dtypes: worst verdict, largest error, and time."""

    verdict: Verdict
    waived: bool
    """Whether none fails, by a waiver."""
    claims: int
    max_lsb: Number | None
    seconds: float

    @property
    def words(self) -> str:
        """Everything that the cell says, the verdict first."""
        parts = [f"{self.verdict}{' waived' if self.waived else ''}", pluralize(self.claims, "claim")]
        parts += [] if self.max_lsb is None else [f"up to {format_lsb(self.max_lsb)} LSB"]
        return ", ".join([*parts, f"{self.seconds:.1f} s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of the board: an op and its dtypes, without the backends' constraints on these."""

    pattern: str
    dtypes: str
    cells: tuple[Cell | None, ...]

    @property
    def family(self) -> str:
        """The family that the op belongs to."""
        return find_family(self.pattern)

    @property
    def worst(self) -> Verdict:
        """The worst verdict of all backends, waived or not."""
        return Verdict.worst(cell.verdict for cell in self.cells if cell)

    @property
    def differs(self) -> bool:
        """Whether two backends that claim this have different verdicts."""
        return len({cell.verdict for cell in self.cells if cell}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Everything the page shows."""

    runs: Mapping[str, Results]
    """The runs, by name."""
    families: Mapping[str, tuple[VerifiedShare, ...]]
    """What each run has VERIFIED of each family of ops."""
    total: tuple[VerifiedShare, ...]
    """What each run has VERIFIED of all families."""
    lines: tuple[Line, ...]
    prints: Mapping[tuple[str, str], tuple[str, ...]]
    """The values of a property, by the kind of kernels and its name, in each run; "" where it was not measured."""


def render_board(runs: Sequence[Results]) -> str:
    """Return the scoreboard as one HTML file: runs of several backends side by side.

    A pure function of the runs. Raises ResultsError for a run that is incomplete or a shard, or that is given twice.
    """
    return render_page("scoreboard.html.j2", board=build_board(runs))


def build_board(runs: Sequence[Results]) -> Board:
    """Arrange the runs side by side, in the order of their names; what has the worst verdict comes first."""
    named = sorted(zip(_name_runs(runs), runs, strict=True), key=lambda item: _order(item[1].header))
    ordered = [run for _, run in named]
    cells = [_make_cells(run) for run in ordered]
    lines = (
        Line(pattern=pattern, dtypes=dtypes, cells=tuple(each.get((pattern, dtypes)) for each in cells))
        for pattern, dtypes in {key for each in cells for key in each}
    )
    return Board(
        runs=dict(named),
        families=_share_families(ordered),
        total=tuple(count_verified(run.claims) for run in ordered),
        lines=tuple(sorted(lines, key=lambda line: (line.worst.rank, line.pattern, line.dtypes))),
        prints=_collect_prints(ordered),
    )


def _order(header: Header) -> tuple[str, ...]:
    return header.backend, header.isa, header.started


def _name_runs(runs: Sequence[Results]) -> list[str]:
    """Name runs by backend, and by what distinguishes runs of one backend: level, profile, start.

    Raises ResultsError for a run that is incomplete or a shard, or that is given twice.
    """
    for run in runs:
        if run.outcome is Outcome.INCOMPLETE or run.header.shard:
            raise ResultsError(f"{run.header.backend}: the run of {run.header.started} is incomplete or a shard")
    names = [run.header.backend for run in runs]
    for field in ("isa", "profile", "started"):
        count = Counter(names)
        names = [
            f"{name} {getattr(run.header, field)}" if count[name] > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
    if duplicates := [name for name, times in Counter(names).items() if times > 1]:
        raise ResultsError(f"{duplicates[0]}: two results files are of the same run; give each once")
    return names


def _share_families(runs: Sequence[Results]) -> dict[str, tuple[VerifiedShare, ...]]:
    """Sum up the claims of each family that any run claims, in the order of the table of families."""
    groups = [_group(run.claims, lambda claim: find_family(claim.pattern)) for run in runs]
    return {
        family: tuple(count_verified(group.get(family, ())) for group in groups)
        for family in (*FAMILIES, OTHER)
        if any(family in group for group in groups)
    }


def _group(claims: Sequence[ClaimResult], key_of: Callable[[ClaimResult], Key]) -> dict[Key, list[ClaimResult]]:
    groups: dict[Key, list[ClaimResult]] = {}
    for claim in claims:
        groups.setdefault(key_of(claim), []).append(claim)
    return groups


def _make_cells(run: Results) -> dict[tuple[str, str], Cell]:
    groups = _group(run.claims, lambda claim: (claim.pattern, claim.dtypes))
    return {key: _make_cell(claims) for key, claims in groups.items()}


def _make_cell(claims: Sequence[ClaimResult]) -> Cell:
    distances = [claim.max_lsb for claim in claims if claim.max_lsb is not None]
    nonfinite = [value for value in ("nan", "inf") if value in distances]
    largest: Number | None = max((value for value in distances if not isinstance(value, str)), default=None)
    return Cell(
        verdict=Verdict.worst(claim.verdict for claim in claims),
        waived=pass_by_waiver(claims),
        claims=len(claims),
        max_lsb=nonfinite[0] if nonfinite else largest,
        seconds=sum(claim.seconds for claim in claims),
    )


def _collect_prints(runs: Sequence[Results]) -> dict[tuple[str, str], tuple[str, ...]]:
    properties = [
        {
            (row.subject, key): str(value)
            for row in run.measurements
            if row.topic == "fingerprint"
            for key, value in row.values.items()
        }
        for run in runs
    ]
    keys = sorted({key for each in properties for key in each})
    return {key: tuple(each.get(key, "") for each in properties) for key in keys}
