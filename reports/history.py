"""The history of backends: verdict counts of the runs of each, from commit to commit, as bars and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from reports.compare import refuse_parts
from reports.decision import count_verified
from reports.diff import Change, compare_runs
from reports.page import render_page
from reports.plots.drawing import Bar, Text
from reports.results import Results, ResultsError
from reports.schema import ClaimResult
from reports.text import pluralize
from reports.verdicts import VERDICTS, Verdict

LEFT, TOP, BAR, SLOT, HEIGHT = 48, 10, 64, 116, 240
"""Margins of a drawing, width of a bar and of its place, and height of the highest bar, in SVG's units."""
LABELS = 52
"""Height of the three lines under a bar."""
LEAST = 13
"""Height from which on a part of a bar has its glyph and number in it."""
CHANGES = (Change.REGRESSED, Change.IMPROVED, Change.ADDED, Change.REMOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One run of a backend; `changes` counts what differs from the run before, and is None for the first."""

    results: Results
    changes: Mapping[Change, int] | None

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Number of claims with each verdict."""
        return self.results.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing of stacked bars, one for each run, the worst verdict on top."""

    width: int
    height: int
    parts: tuple[Bar, ...]
    ticks: tuple[Text, ...]
    places: tuple[float, ...]
    """The middle of each bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The runs of one backend in one profile and at one level, the earliest first."""

    backend: str
    profile: str
    level: str
    moments: tuple[Moment, ...]
    verdicts: tuple[Verdict, ...]
    """The verdicts that occur, worst first."""
    chart: Chart

    @property
    def name(self) -> str:
        """Backend, profile and level, as far as there is one."""
        return " ".join(filter(None, (self.backend, self.profile, self.level)))

    @property
    def description(self) -> str:
        """What the drawing shows, in words."""
        first, last = (count_verified(self.moments[place].results.claims).percent for place in (0, -1))
        text = f"{pluralize(len(self.moments), 'run')}, the earliest first; a bar is as high as the run has claims."
        return f"{text} The share verified was {first}, and is {last}."


def render_history(runs: Sequence[Results]) -> str:
    """Return the history of backends as one HTML file. A pure function of the runs.

    Runs of other backends, profiles or levels stand apart. Raises ResultsError for a run that is incomplete or a shard,
    or that is given twice.
    """
    return render_page("history.html.j2", trends=build_history(runs), changes=CHANGES, least=LEAST)


def build_history(runs: Sequence[Results]) -> tuple[Trend, ...]:
    """Arrange runs by backend, profile and level, and those of each by their start."""
    refuse_parts(runs)
    ordered = sorted(runs, key=lambda run: (*_find_trend(run), run.header.started))
    for before, run in pairwise(ordered):
        if (*_find_trend(before), before.header.started) == (*_find_trend(run), run.header.started):
            name = f"{run.header.backend}: the run of {run.header.started}"
            raise ResultsError(f"{name}: two results files are of the same run; give each once")
    return tuple(_make_trend(key, list(group)) for key, group in groupby(ordered, key=_find_trend))


def _find_trend(run: Results) -> tuple[str, str, str]:
    return run.header.backend, run.header.profile, run.header.isa


def _make_trend(key: tuple[str, str, str], runs: Sequence[Results]) -> Trend:
    backend, profile, level = key
    changes = (None, *(_count_changes(before, run) for before, run in pairwise(runs)))
    moments = tuple(Moment(results=run, changes=change) for run, change in zip(runs, changes, strict=True))
    verdicts = tuple(verdict for verdict in VERDICTS if any(verdict in run.counts for run in runs))
    return Trend(
        backend=backend, profile=profile, level=level, moments=moments, verdicts=verdicts, chart=_draw(moments)
    )


def _count_changes(before: Results, run: Results) -> Mapping[Change, int]:
    """Count how the claims differ from those of the run before; models are not counted, as in the bars."""
    rows = compare_runs(before, run).rows
    return Counter(row.change for row in rows if isinstance(row.new or row.old, ClaimResult))


def _draw(moments: Sequence[Moment]) -> Chart:
    most = max(1, *(len(moment.results.claims) for moment in moments))
    lefts = [LEFT + SLOT * place + (SLOT - BAR) / 2 for place in range(len(moments))]
    parts = [part for left, moment in zip(lefts, moments, strict=True) for part in _stack(moment, left, most)]
    return Chart(
        width=LEFT + SLOT * len(moments),
        height=TOP + HEIGHT + LABELS,
        parts=tuple(parts),
        ticks=tuple(_make_ticks(most)),
        places=tuple(left + BAR / 2 for left in lefts),
    )


def _stack(moment: Moment, left: float, most: int) -> Iterator[Bar]:
    """Yield the parts of a bar, from above: the worst verdict is on top, what is VERIFIED stands on the axis."""
    y = TOP + HEIGHT * (1 - len(moment.results.claims) / most)
    for verdict, count in moment.counts.items():
        height = HEIGHT * count / most
        yield Bar(x=left, y=y, width=BAR, height=height, kind=verdict, label=f"{count} {verdict}")
        y += height


def _make_ticks(most: int) -> Iterator[Text]:
    """Mark the axis at 0, the middle, and the highest bar."""
    for count in sorted({0, most // 2, most}):
        yield Text(x=LEFT - 8, y=TOP + HEIGHT * (1 - count / most), text=f"{count:,}", anchor="end")
