"""Plots as data: the page draws them as inline SVG with a title, a description, and a table of the same numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.results import Results
from reports.schema import BINS, Check, Number
from reports.text import pluralize

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 12, 46
"""Size of a drawing and of the margins around its axes, in SVG's units."""
DECIBELS = 5
"""Width of a bin of signal-to-noise ratios, in dB."""
MOST_ROWS = 100
"""Largest number of rows in the data table of a plot of claims."""
Bin = tuple[str, str, int]
"""Text of the tick under a bin, name of the bin, and number of elements in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A bar (`height` from `y` down) or a point (`height` 0) in SVG's units; `label` describes it."""

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


def make_plots(results: Results) -> tuple[Plot, ...]:
    """Make the plots for which a run has data."""
    checks = [check for check in results.checks if check.statistics]
    candidates = (_plot_distances(checks), _plot_ratios(checks), _plot_errors(checks))
    return tuple(plot for plot in candidates if plot is not None)


def _plot_distances(checks: Iterable[Check]) -> Plot | None:
    """Plot the distances of output elements from the exact result. (NUM-03)"""
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
    return _plot_bars(
        "distances", "Distance of outputs from the exact result", list(zip(ends, ends, counts, strict=True)),
        f"{total} output elements of all static claims by |q − v| in steps of the output (LSB); {beyond} are beyond "
        "0.5, the limit of correct rounding without the derived slack. The scale of the counts is logarithmic.",
        "LSB, upper end of the bin", "output elements",
    )  # fmt: skip


def _plot_ratios(checks: Iterable[Check]) -> Plot | None:
    """Plot the signal-to-noise ratio of the outputs, claim by claim."""
    ratios = [check.statistics.sqnr_db for check in checks if check.statistics and check.statistics.sqnr_db is not None]
    numbers = [value for value in ratios if not isinstance(value, str)]
    if not ratios:
        return None
    bins = Counter(math.floor(value / DECIBELS) * DECIBELS for value in numbers)
    lowest, highest = min(bins, default=0), max(bins, default=0)
    starts: Sequence[int] = range(lowest, highest + 1, DECIBELS)
    starts = starts if len(starts) <= 40 else sorted(bins)
    rows = [(str(start), f"{start} to {start + DECIBELS}", bins[start]) for start in starts]
    rows += [("no error", "no error", sum(value == "inf" for value in ratios))]
    return _plot_bars(
        "sqnr", "Signal-to-quantization-noise ratio, claim by claim", rows,
        f"{pluralize(len(ratios), 'claim')} by the ratio of the exact results' power to that of the error, over all "
        "comparisons of a claim, in dB. 8 bits over the whole range give some 50 dB. The scale of the counts is "
        "logarithmic.",
        "dB", "claims",
    )  # fmt: skip


def _plot_errors(checks: Iterable[Check]) -> Plot | None:
    """Plot the largest errors against the range of the results."""
    points = [
        (span, size, check)
        for check in checks
        if check.statistics and (span := _get_finite(check.statistics.span_lsb)) is not None
        if (size := _get_finite(check.max_lsb)) is not None
    ]
    if not points:
        return None
    widest = max(max(span for span, _, _ in points), 1.0)
    largest = max(max(size for _, size, _ in points), 1.0)
    inner = WIDTH - LEFT - RIGHT
    places: dict[tuple[int, int, str], list[str]] = {}
    for span, size, check in points:
        place = round(LEFT + inner * span / widest), round(_find_y(_scale_log(size, largest))), check.verdict.value
        places.setdefault(place, []).append(f"{size:.6g} LSB over {span:.6g} steps")
    marks = (
        Mark(x=x, y=y, width=0, height=0, kind=kind, label=f"{pluralize(len(labels), 'claim')} {kind}: {labels[0]}")
        for (x, y, kind), labels in places.items()
    )
    rows = [(check.claim, check.verdict.value, f"{span:.6g}", f"{size:.6g}") for span, size, check in points]
    rows.sort(key=lambda row: -float(row[3]))
    more = f" The table has the {MOST_ROWS} largest." if len(rows) > MOST_ROWS else ""
    return Plot(
        name="errors",
        title="Largest error against the range of the results",
        description=f"{pluralize(len(points), 'claim')}, each with its largest distance from the exact result and the "
        "range of that exact result in steps of the output. Correct kernels stay within 0.5 at any range, plus "
        f"the derived slack (of a bias held in int32, or of a function that jumps).{more}",
        across="steps between the lowest and the highest exact result",
        upward="largest distance, LSB",
        marks=tuple(marks),
        across_ticks=tuple(Tick(at=LEFT + inner * part / 4, text=f"{widest * part / 4:.4g}") for part in range(5)),
        upward_ticks=tuple(_make_log_ticks(largest, (0.0, 0.5, 2.0, 8.0, 32.0, 128.0, 1024.0, 1e6))),
        columns=("claim", "verdict", "steps", "LSB"),
        rows=tuple(rows[:MOST_ROWS]),
    )


def _plot_bars(name: str, title: str, data: Sequence[Bin], description: str, across: str, upward: str) -> Plot:
    """Make a histogram with counts on a logarithmic scale."""
    room = (WIDTH - LEFT - RIGHT) / len(data)
    most = max(max(count for _, _, count in data), 1)
    marks = []
    for place, (_, label, count) in enumerate(data):
        top = _find_y(_scale_log(count, most))
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
            Tick(at=LEFT + room * (place + 0.5), text=tick)
            for place, (tick, _, _) in enumerate(data) if place % step == 0
        ),
        upward_ticks=tuple(_make_log_ticks(most, [0.0, *(10.0**power for power in range(12))])),
        columns=(across, upward),
        rows=tuple((label, str(count)) for _, label, count in data),
    )  # fmt: skip


def _scale_log(value: float, most: float) -> float:
    """Return the place of a value between 0 and `most`, as a part of 1, on a logarithmic scale that includes 0."""
    return math.log1p(max(value, 0.0)) / math.log1p(most)


def _find_y(part: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part


def _make_log_ticks(most: float, values: Iterable[float]) -> Iterator[Tick]:
    for value in values:
        if value <= most:
            yield Tick(at=_find_y(_scale_log(value, most)), text=f"{value:g}")


def _get_finite(value: Number | None) -> float | None:
    """Return a finite number, or None."""
    return None if value is None or isinstance(value, str) else float(value)
