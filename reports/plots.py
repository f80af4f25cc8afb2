"""Plots as data: what the page draws as inline SVG, with a title, a description, and a table of the same numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.results import Results
from reports.schema import BINS, Check, Number
from reports.text import counted

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 12, 46
"""Size of a drawing and of the margins around its axes, in SVG's units."""
DECIBELS = 5
"""Width of a bin of signal-to-noise ratios, in dB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A bar (`height` from `y` down) or a point (`height` 0) in SVG's units; `label` says what it stands for."""

    x: float
    y: float
    width: float
    height: float
    label: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A label at an axis: `at` is the place along it, in SVG's units."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawing; `columns` and `rows` are its data table."""

    name: str
    title: str
    description: str
    across: str
    upward: str
    marks: tuple[Mark, ...]
    across_ticks: tuple[Tick, ...]
    upward_ticks: tuple[Tick, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def plots(results: Results) -> tuple[Plot, ...]:
    """The plots that a run has data for."""
    checks = [check for check in results.checks if check.statistics]
    made = (_distances(checks), _ratios(checks), _errors(checks))
    return tuple(plot for plot in made if plot is not None)


def _distances(checks: Iterable[Check]) -> Plot | None:
    """How far output elements are from the exact result. (NUM-03)"""
    counts = [0] * (len(BINS) + 1)
    for check in checks:
        distances = check.statistics.distances if check.statistics else []
        for place, count in enumerate(distances[: len(counts)]):
            counts[place] += count
    total = sum(counts)
    if not total:
        return None
    ends = [f"≤ {end:g}" for end in BINS] + [f"> {BINS[-1]:g}"]
    beyond = total - sum(counts[: BINS.index(0.5) + 1])
    return _bars(
        "distances", "Distance of outputs from the exact result", list(zip(ends, counts, strict=True)),
        f"{total} output elements of all static claims by |q − v| in steps of the output (LSB); {beyond} are beyond "
        "0.5, which correct rounding does not exceed but by the derived slack. The scale of the counts is logarithmic.",
        "LSB, upper end of the bin", "output elements",
    )  # fmt: skip


def _ratios(checks: Iterable[Check]) -> Plot | None:
    """How strong the exact results are beside the error of the outputs, claim by claim."""
    found = [check.statistics.sqnr_db for check in checks if check.statistics and check.statistics.sqnr_db is not None]
    numbers = [value for value in found if not isinstance(value, str)]
    if not found:
        return None
    bins = Counter(math.floor(value / DECIBELS) * DECIBELS for value in numbers)
    lowest, highest = min(bins, default=0), max(bins, default=0)
    rows = [(f"{start} to {start + DECIBELS}", bins[start]) for start in range(lowest, highest + 1, DECIBELS)]
    rows = rows if len(rows) <= 40 else [(f"{start} to {start + DECIBELS}", bins[start]) for start in sorted(bins)]
    rows += [("no error", sum(value == "inf" for value in found))]
    return _bars(
        "sqnr", "Signal-to-quantization-noise ratio, claim by claim", rows,
        f"{counted(len(found), 'claim')} by the ratio of the exact results' power to that of the error, over all "
        "comparisons of a claim, in dB. 8 bits over the whole range give some 50 dB. The scale of the counts is "
        "logarithmic.",
        "dB", "claims",
    )  # fmt: skip


def _errors(checks: Iterable[Check]) -> Plot | None:
    """Whether errors grow with the range of the results."""
    points = [
        (span, size, check)
        for check in checks
        if check.statistics and (span := _plain(check.statistics.span_lsb)) is not None
        if (size := _plain(check.max_lsb)) is not None
    ]
    if not points:
        return None
    widest = max(max(span for span, _, _ in points), 1.0)
    largest = max(max(size for _, size, _ in points), 1.0)
    inner = WIDTH - LEFT - RIGHT
    places: dict[tuple[int, int, str], list[str]] = {}
    for span, size, check in points:
        at = round(LEFT + inner * span / widest), round(_height(_log(size, largest))), check.verdict.value
        places.setdefault(at, []).append(f"{size:.6g} LSB over {span:.6g} steps")
    marks = (
        Mark(x=x, y=y, width=0, height=0, kind=kind, label=f"{counted(len(told), 'claim')} {kind}: {told[0]}")
        for (x, y, kind), told in places.items()
    )
    rows = [(check.claim, check.verdict.value, f"{span:.6g}", f"{size:.6g}") for span, size, check in points]
    rows.sort(key=lambda row: -float(row[3]))
    more = f" The table has the {MOST_ROWS} largest." if len(rows) > MOST_ROWS else ""
    return Plot(
        name="errors",
        title="Largest error against the range of the results",
        description=f"{counted(len(points), 'claim')}, each at the largest distance from the exact result and in how "
        "many steps of the output the exact result lies there. Right kernels stay at 0.5 wherever they are, but for "
        f"the derived slack: of a bias held in int32, of a function that jumps.{more}",
        across="steps between the lowest and the highest exact result",
        upward="largest distance, LSB",
        marks=tuple(marks),
        across_ticks=tuple(Tick(at=LEFT + inner * part / 4, text=f"{widest * part / 4:.4g}") for part in range(5)),
        upward_ticks=tuple(_log_ticks(largest, (0.0, 0.5, 2.0, 8.0, 32.0, 128.0, 1024.0, 1e6))),
        columns=("claim", "verdict", "steps", "LSB"),
        rows=tuple(rows[:MOST_ROWS]),
    )


MOST_ROWS = 100
"""How many rows the data table of a plot of claims has."""


def _bars(name: str, title: str, data: Sequence[tuple[str, int]], description: str, across: str, upward: str) -> Plot:
    """A histogram with counts on a logarithmic scale."""
    room = (WIDTH - LEFT - RIGHT) / len(data)
    most = max(max(count for _, count in data), 1)
    marks = []
    for place, (label, count) in enumerate(data):
        top = _height(_log(count, most))
        marks.append(
            Mark(x=LEFT + room * place + 1, y=top, width=max(room - 2, 1), height=HEIGHT - BOTTOM - top,
                 label=f"{label}: {count}")
        )  # fmt: skip
    step = math.ceil(len(data) / 14)
    return Plot(
        name=name,
        title=title,
        description=description,
        across=across,
        upward=upward,
        marks=tuple(marks),
        across_ticks=tuple(
            Tick(at=LEFT + room * (place + 0.5), text=label.partition(" to ")[0])
            for place, (label, _) in enumerate(data) if place % step == 0
        ),
        upward_ticks=tuple(_log_ticks(most, [0.0, *(10.0**power for power in range(12))])),
        columns=(across, upward),
        rows=tuple((label, str(count)) for label, count in data),
    )  # fmt: skip


def _log(value: float, most: float) -> float:
    """Where a value is between 0 and `most`, as a part of 1, on a scale that has a place for 0."""
    return math.log1p(max(value, 0.0)) / math.log1p(most)


def _height(part: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part


def _log_ticks(most: float, values: Iterable[float]) -> Iterator[Tick]:
    for value in values:
        if value <= most:
            yield Tick(at=_height(_log(value, most)), text=f"{value:g}")


def _plain(value: Number | None) -> float | None:
    """A finite number, or None."""
    return None if value is None or isinstance(value, str) else float(value)
