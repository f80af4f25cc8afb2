"""Histograms: counts on linear scales, with the bins that are empty, and each bar with its count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.numbers import BINS, Number
from reports.plots.axes import LIMIT, choose_step, choose_ticks
from reports.plots.drawing import WIDTH, Bar, Plot, Stroke, Text, shorten_count
from reports.schema import Check
from reports.text import pluralize, spell_count

DECIBELS = 5
"""Width of a bin of signal-to-noise ratios, in dB."""
MOST_BINS = 48
"""Largest number of such bins; where they would be more, they are wider."""
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 260, 64, 16, 38, 46
_FOOT, _INNER = _HEIGHT - _BOTTOM, _HEIGHT - _TOP - _BOTTOM
"""Size of a drawing and its margins; where the bars stand, and how high they may be."""
_GAP, _LETTER, _DIGIT = 20, 5.6, 4.6
"""Space between groups of bars, and widths of a character under and above them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bin:
    """A bin: its name, the number of elements in it, and the text under its lower end, or under all of it."""

    name: str
    count: int
    start: str = ""
    middle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A bin at its place."""

    x: float
    width: float
    of: _Bin


# -- what is counted --------------------------------------------------------------------------------------------------


def plot_distances(checks: Iterable[Check]) -> Plot | None:
    """Plot the distances of output elements from the exact result. (NUM-03)"""
    counts = [0] * (len(BINS) + 1)
    for check in checks:
        distances = check.statistics.distances if check.statistics else []
        for place, number in enumerate(distances[: len(counts)]):
            counts[place] += number
    total, right = sum(counts), BINS.index(LIMIT) + 1
    if not total:
        return None
    starts = ["0", *(f"{end:g}" for end in BINS)]
    names = [f"≤ {end:g}" for end in BINS] + [f"> {BINS[-1]:g}"]
    within = [_Bin(name=names[n], count=counts[n], start=starts[n]) for n in range(right)]
    beyond = [_Bin(name=names[n], count=counts[n], middle=names[n]) for n in range(right, len(counts))]
    return _make_plot(
        _place_bins([*within], beyond),
        (Text(x=_LEFT + _find_width(within, beyond) * right, y=_FOOT + 14, text=starts[right]),),
        name="distances",
        title="Distance of outputs from the exact result",
        description=f"{spell_count(total)} output elements of all static claims by |q − v| in steps of the output "
        f"(LSB); {spell_count(sum(counts[right:]))} are beyond {LIMIT:g}, the limit of correct rounding without the "
        f"derived slack. The axis is linear up to {LIMIT:g}. The bins on the right have unequal widths and are drawn "
        "equally wide: each begins where the one before ends.",
        across="LSB",
        upward="output elements",
    )


def plot_ratios(checks: Iterable[Check]) -> Plot | None:
    """Plot the signal-to-noise ratio of the outputs, claim by claim."""
    ratios = [check.statistics.sqnr_db for check in checks if check.statistics and check.statistics.sqnr_db is not None]
    if not ratios:
        return None
    numbers = [value for value in ratios if not isinstance(value, str)]
    width = _choose_width(numbers)
    bins = Counter(math.floor(value / width) * width for value in numbers)
    starts = range(min(bins), max(bins) + width, width) if bins else range(0)
    step = choose_step(len(starts) * width / 12)
    of_numbers = [
        _Bin(name=f"{start} to {start + width}", count=bins[start], start="" if start % step else str(start))
        for start in starts
    ]
    others = [_Bin(name=name, count=ratios.count(value), middle=name) for value, name in _list_others(ratios)]
    end = Text(x=_LEFT + _find_width(of_numbers, others) * len(starts), y=_FOOT + 14, text=str(starts.stop))
    return _make_plot(
        _place_bins(of_numbers, others),
        (end,) if starts and not starts.stop % step else (),
        name="sqnr",
        title="Signal-to-quantization-noise ratio, claim by claim",
        description=f"{pluralize(len(ratios), 'claim')} by the ratio of the exact results' power to that of the error, "
        f"over all comparisons of a claim, in bins of {width} dB. 8 bits over the whole range give some 50 dB. Claims "
        "without any error stand apart.",
        across="dB",
        upward="claims",
    )


def _choose_width(ratios: Sequence[float]) -> int:
    """Return the width of the bins: DECIBELS, or more if it takes more to keep them few."""
    span = max(ratios, default=0.0) - min(ratios, default=0.0)
    return max(DECIBELS, round(choose_step(span / (MOST_BINS - 1))))


def _list_others(ratios: Sequence[Number]) -> Iterator[tuple[Number, str]]:
    """Yield the ratios that are no numbers, with their names; the last two only if they occur."""
    yield "inf", "no error"
    names: tuple[tuple[Number, str], ...] = (("-inf", "only error"), ("nan", "undefined"))
    yield from ((value, name) for value, name in names if value in ratios)


# -- drawing ----------------------------------------------------------------------------------------------------------


def _make_plot(
    placed: Sequence[_Placed], further: Sequence[Text], *, name: str, title: str, description: str, across: str,
    upward: str,
) -> Plot:  # fmt: skip
    """Make a histogram of bins at their places, with further texts."""
    most = max(1, *(each.of.count for each in placed))
    ticks = [value for value in choose_ticks(0, most, 4) if value == int(value)]
    places = [(_FOOT - _INNER * value / most, shorten_count(int(value))) for value in ticks]
    return Plot(
        name=name,
        title=title,
        description=description,
        height=_HEIGHT,
        columns=(across, upward),
        rows=tuple((each.of.name, spell_count(each.of.count)) for each in placed),
        texts=(
            *(Text(x=_LEFT - 5, y=y + 3.5, text=text, anchor="end") for y, text in places),
            *(text for each in placed for text in _label(each, most)),
            *further,
            Text(x=(_LEFT + WIDTH - _RIGHT) / 2, y=_HEIGHT - 8, text=across, kind="axis"),
            Text(x=11, y=_FOOT - _INNER / 2, text=upward, kind="axis", turns=True),
        ),
        lines=(
            *(Stroke(x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y) for y, _ in places),
            *(Stroke(x1=each.x, x2=each.x + each.width, y1=_FOOT, y2=_FOOT, kind="base") for each in placed),
        ),
        bars=tuple(_make_bar(each, most) for each in placed),
    )


def _find_width(first: Sequence[_Bin], named: Sequence[_Bin]) -> float:
    """Return the width of each bin of the first group: of what the named bins beside it leave."""
    room = WIDTH - _LEFT - _RIGHT - _find_named_width(named) * len(named) - (_GAP if first else 0)
    return room / max(len(first), 1)


def _find_named_width(named: Iterable[_Bin]) -> float:
    return max(len(each.middle) for each in named) * _LETTER + 4


def _place_bins(first: Sequence[_Bin], named: Sequence[_Bin]) -> tuple[_Placed, ...]:
    """Place the bins of the first group side by side, and apart from them those with names."""
    narrow, wide = _find_width(first, named), _find_named_width(named)
    right = WIDTH - _RIGHT - wide * len(named)
    return (
        *(_Placed(x=_LEFT + narrow * number, width=narrow, of=each) for number, each in enumerate(first)),
        *(_Placed(x=right + wide * number, width=wide, of=each) for number, each in enumerate(named)),
    )


def _make_bar(each: _Placed, most: int) -> Bar:
    height = max(_INNER * each.of.count / most, 1.5 if each.of.count else 0)  # a few are to be seen beside many
    label = f"{each.of.name}: {spell_count(each.of.count)}"
    return Bar(x=each.x + 0.5, y=_FOOT - height, width=each.width - 1, height=height, label=label)


def _label(each: _Placed, most: int) -> Iterator[Text]:
    """Yield the text under a bin, if it has one, and the count above its bar, turned where that is narrow."""
    middle = each.x + each.width / 2
    if each.of.start:
        yield Text(x=each.x, y=_FOOT + 14, text=each.of.start)
    if each.of.middle:
        yield Text(x=middle, y=_FOOT + 14, text=each.of.middle)
    if each.of.count:
        text, top = shorten_count(each.of.count), _FOOT - _INNER * each.of.count / most - 4
        if len(text) * _DIGIT > each.width:
            yield Text(x=middle + 3, y=top, text=text, kind="count", turns=True, anchor="start")
        else:
            yield Text(x=middle, y=top, text=text, kind="count")
