"""The scoreboard: runs of several backends side by side, op by op and dtype config by dtype config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports.page import render_page
from reports.results import Results, ResultsError
from reports.schema import ClaimResult, Number
from reports.verdicts import Outcome, Verdict

_CONSTRAINTS = re.compile(r"\[[^]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one backend does with one op and dtypes: the worst verdict, the largest error, the time of its claims."""

    verdict: Verdict
    waived: bool
    claims: int
    max_lsb: Number | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One run, and what it covers; `rate` is in claims per second of the run."""

    name: str
    results: Results
    verdicts: Mapping[Verdict, int]
    ops: int
    rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of the board: an op and its dtypes, without the constraints that backends put on them."""

    pattern: str
    dtypes: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Print:
    """A property of kernels of one kind, as each backend has it; `differs`: not all that have it agree."""

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
    """The runs side by side, in the order of their names."""
    for run in runs:
        if run.outcome is Outcome.INCOMPLETE or run.header.shard:
            raise ResultsError(
                f"{run.header.backend}: the run of {run.header.started} is not whole: it shows too little"
            )
    ordered = sorted(runs, key=lambda run: (run.header.backend, run.header.isa, run.header.started))
    names = _names(ordered)
    columns = tuple(map(_column, names, ordered))
    cells = [_cells(run) for run in ordered]
    keys = sorted({key for each in cells for key in each})
    lines = tuple(
        Line(pattern=pattern, dtypes=dtypes, cells=tuple(each.get((pattern, dtypes)) for each in cells))
        for pattern, dtypes in keys
    )
    return Board(columns=columns, lines=lines, prints=_prints(ordered))


def _names(runs: Sequence[Results]) -> list[str]:
    """The backends' names, with what tells two runs of one backend apart. Raises ResultsError where nothing does."""
    names = [run.header.backend for run in runs]
    for more in ("isa", "profile", "started"):
        count = Counter(names)
        names = [
            f"{name} {getattr(run.header, more)}" if count[name] > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ResultsError(f"{twice[0]}: two results files are of the same run; give each once")
    return names


def _column(name: str, run: Results) -> Column:
    seconds = run.footer.seconds if run.footer else 0.0
    patterns = {claim.pattern for claim in run.claims}
    rate = len(run.claims) / seconds if seconds else None
    return Column(name=name, results=run, verdicts=run.counts, ops=len(patterns), rate=rate)


def _cells(run: Results) -> dict[tuple[str, str], Cell]:
    groups: dict[tuple[str, str], list[ClaimResult]] = {}
    for claim in run.claims:
        groups.setdefault((claim.pattern, _CONSTRAINTS.sub("", claim.dtype_config)), []).append(claim)
    return {key: _cell(claims) for key, claims in groups.items()}


def _cell(claims: Sequence[ClaimResult]) -> Cell:
    verdict = Verdict.worst(claim.verdict for claim in claims)
    distances = [claim.max_lsb for claim in claims if claim.max_lsb is not None]
    spelled = [value for value in ("nan", "inf") if value in distances]
    largest: Number | None = max((value for value in distances if not isinstance(value, str)), default=None)
    return Cell(
        verdict=verdict,
        waived=any(claim.waived for claim in claims if claim.verdict is verdict),
        claims=len(claims),
        max_lsb=spelled[0] if spelled else largest,
        seconds=sum(claim.seconds for claim in claims),
    )


def _prints(runs: Sequence[Results]) -> tuple[Print, ...]:
    found = [
        {(fact.subject, key): str(value) for fact in run.measurements if fact.topic == "fingerprint"
         for key, value in fact.values.items()}
        for run in runs
    ]  # fmt: skip
    keys = sorted({key for each in found for key in each})
    return tuple(
        Print(subject=subject, key=key, values=tuple(each.get((subject, key), "") for each in found))
        for subject, key in keys
    )
