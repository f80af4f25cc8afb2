"""The scoreboard: runs of several backends side by side, op by op and dtype config by dtype config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.decision import passes_by_leave, spell_decision, spell_share
from reports.page import render_page
from reports.results import Results, ResultsError
from reports.schema import ClaimResult, Number
from reports.verdicts import Outcome, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The claims of one backend on one op and dtypes: worst verdict, largest error, and time."""

    verdict: Verdict
    waived: bool
    claims: int
    max_lsb: Number | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One run and its coverage; `rate` is in claims per second of the run."""

    name: str
    results: Results
    verdicts: Mapping[Verdict, int]
    ops: int
    rate: float | None

    @property
    def decision(self) -> str:
        """The outcome with its reason."""
        return spell_decision(self.results)

    @property
    def passes_by_leave(self) -> bool:
        """Whether the run passes by what it lets pass besides VERIFIED."""
        return passes_by_leave(self.results)

    @property
    def share(self) -> str:
        """The share of the claims that is VERIFIED, in percent."""
        return spell_share(self.verdicts.get(Verdict.VERIFIED, 0), len(self.results.claims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of the board: an op and its dtypes, without the backends' constraints on these."""

    pattern: str
    dtypes: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """A property of kernels of one kind, with its value for each backend ("" if not measured)."""

    subject: str
    key: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether two backends that have the property have different values."""
        return len({value for value in self.values if value}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Everything the page shows."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    prints: tuple[Print, ...]


def render_board(runs: Sequence[Results]) -> str:
    """Return the scoreboard as one HTML file: runs of several backends side by side. A pure function of the runs.

    Raises ResultsError for a run that is incomplete or a shard, or that is given twice.
    """
    return render_page("scoreboard.html.j2", board=build_board(runs))


def build_board(runs: Sequence[Results]) -> Board:
    """Arrange the runs side by side, in the order of their names."""
    for run in runs:
        if run.outcome is Outcome.INCOMPLETE or run.header.shard:
            raise ResultsError(f"{run.header.backend}: the run of {run.header.started} is incomplete or a shard")
    ordered = sorted(runs, key=lambda run: (run.header.backend, run.header.isa, run.header.started))
    names = _name_runs(ordered)
    columns = tuple(map(_make_column, names, ordered))
    cells = [_make_cells(run) for run in ordered]
    keys = sorted({key for each in cells for key in each})
    lines = tuple(
        Line(pattern=pattern, dtypes=dtypes, cells=tuple(each.get((pattern, dtypes)) for each in cells))
        for pattern, dtypes in keys
    )
    return Board(columns=columns, lines=lines, prints=_make_prints(ordered))


def _name_runs(runs: Sequence[Results]) -> list[str]:
    """Name runs by backend, and by what distinguishes runs of one backend. Raises ResultsError if nothing does."""
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


def _make_column(name: str, run: Results) -> Column:
    seconds = run.footer.seconds if run.footer else 0.0
    patterns = {claim.pattern for claim in run.claims}
    rate = len(run.claims) / seconds if seconds else None
    return Column(name=name, results=run, verdicts=run.counts, ops=len(patterns), rate=rate)


def _make_cells(run: Results) -> dict[tuple[str, str], Cell]:
    groups: dict[tuple[str, str], list[ClaimResult]] = {}
    for claim in run.claims:
        groups.setdefault((claim.pattern, claim.dtypes), []).append(claim)
    return {key: _make_cell(claims) for key, claims in groups.items()}


def _make_cell(claims: Sequence[ClaimResult]) -> Cell:
    verdict = Verdict.worst(claim.verdict for claim in claims)
    distances = [claim.max_lsb for claim in claims if claim.max_lsb is not None]
    nonfinite = [value for value in ("nan", "inf") if value in distances]
    largest: Number | None = max((value for value in distances if not isinstance(value, str)), default=None)
    return Cell(
        verdict=verdict,
        waived=any(claim.waived for claim in claims if claim.verdict is verdict),
        claims=len(claims),
        max_lsb=nonfinite[0] if nonfinite else largest,
        seconds=sum(claim.seconds for claim in claims),
    )


def _make_prints(runs: Sequence[Results]) -> tuple[Print, ...]:
    properties = [
        {(fact.subject, key): str(value) for fact in run.measurements if fact.topic == "fingerprint"
         for key, value in fact.values.items()}
        for run in runs
    ]  # fmt: skip
    keys = sorted({key for each in properties for key in each})
    return tuple(
        Print(subject=subject, key=key, values=tuple(each.get((subject, key), "") for each in properties))
        for subject, key in keys
    )
