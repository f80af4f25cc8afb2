"""Plots as data, in SVG's units: the page draws them with a title, a description, and a table of the same numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fx_quant_conformance.reports.measured import ModelPart
from fx_quant_conformance.reports.numbers import BINS, Number
from fx_quant_conformance.reports.results import Results, counts_of
from fx_quant_conformance.reports.schema import Check, ModelResult
from fx_quant_conformance.reports.text import cut_end, cut_middle, format_count, format_db, pluralize
from fx_quant_conformance.reports.verdicts import Verdict

SHAPES: Mapping[Verdict, str] = {
    Verdict.CRASHED: "m-3.5-3.5h7v7h-7z",
    Verdict.TIMEOUT: "m-4-3h8l-4 7z",
    Verdict.REFUTED: "m-3.2-3.2 6.4 6.4m0-6.4-6.4 6.4",
    Verdict.FALLBACK: "m-4 3h8l-4-7z",
    Verdict.UNEXERCISED: "m-3-3h6v6h-6z",
    Verdict.UNSHOWN: "m-3.2 0a3.2 3.2 0 1 0 6.4 0 3.2 3.2 0 1 0-6.4 0z",
    Verdict.TOLERATED: "m-4 0 4-4 4 4-4 4z",
    Verdict.VERIFIED: "m-3.2 0a3.2 3.2 0 1 0 6.4 0 3.2 3.2 0 1 0-6.4 0z",
}
"""The outline of a point, by verdict, from its place: colour is not all that tells verdicts apart."""
LIMIT = 0.5
"""The limit of correct rounding, in LSB. (NUM-03)"""
DECIBELS, MOST_BINS = 5, 40
"""Width of a bin of ratios, in dB; where there would be more bins, they are wider."""
_OTHERS: tuple[tuple[Number, str], ...] = (("-inf", "only error"), ("nan", "undefined"), ("inf", "no error"))
MOST_MODELS, MOST_PATTERNS = 6, 200
"""Largest number of models with a plot of their own, and of the patterns in a plot."""
WIDTH, LEFT, RIGHT = 640, 76, 16
_TOP, _FOOT = 38, 214
"""Where the bars of a histogram may begin, and where they stand."""
_EXACT, _HIGH, _LOW, _SILENT = 12, 32, 172, 192
"""Heights of patterns without an error, of the highest and the lowest ratio, and of patterns without a ratio."""
_MOST_NAMES, _LONGEST, _LETTER, _DIGIT = 40, 18, 5.4, 4.6
"""The names under the patterns: how many, and how long; size of a letter, and of a digit above a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Words at a place."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    kind: str = "tick"
    """The class of their look."""
    turns: bool = False
    """Whether they are read from below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar."""

    x: float
    y: float
    """The bar goes down from here."""
    width: float
    height: float
    label: str
    """Describes it."""
    kind: str = ""
    """The class of its look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with the shape and colour of a verdict."""

    x: float
    y: float
    verdict: Verdict
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawing."""

    name: str
    title: str
    description: str
    height: float
    columns: tuple[str, ...]
    """``columns`` and ``rows`` are its data table."""
    rows: tuple[tuple[str, ...], ...]
    texts: tuple[Text, ...]
    rules: tuple[float, ...]
    """The heights of the lines across it."""
    bars: tuple[Bar, ...]
    dots: tuple[Mark, ...] = ()
    legend: Mapping[Verdict, int] = field(default_factory=dict)
    """How many patterns are drawn, by verdict."""


def make_plots(results: Results) -> tuple[Plot, ...]:
    """Make the plots for which a run has data."""
    return (*plot_distances(results.checks), *plot_ratios(results.checks), *plot_models(results.models))


class Bin(NamedTuple):
    """A bin: its name, the number of elements in it, and the text under it ("" for none)."""

    name: str
    size: int
    label: str


def plot_distances(checks: Iterable[Check]) -> Iterator[Plot]:
    """Plot the distances of output elements from the exact result. (NUM-03)"""
    names = [*(f"≤ {end:g}" for end in BINS), f"> {BINS[-1]:g}"]
    counts = [0] * len(names)
    for check in checks:
        for place, number in enumerate(check.statistics.distances[: len(names)] if check.statistics else ()):
            counts[place] += number
    if not any(counts):
        return
    beyond = sum(counts[BINS.index(LIMIT) + 1 :])
    yield _plot_bins(
        [Bin(name, count, name) for name, count in zip(names, counts, strict=True)],
        name="distances",
        title="Distance of outputs from the exact result",
        description=f"{format_count(sum(counts))} output elements of all static claims by |q − v| in steps of the "
        f"output (LSB); {format_count(beyond)} are beyond {LIMIT:g}, the limit of correct rounding without the derived "
        "slack. The bins have unequal widths: each begins where the one before ends.",
        columns=("LSB", "output elements"),
    )


def plot_ratios(checks: Iterable[Check]) -> Iterator[Plot]:
    """Plot the signal-to-noise ratio of the outputs, claim by claim."""
    ratios = [check.statistics.sqnr_db for check in checks if check.statistics and check.statistics.sqnr_db is not None]
    if not ratios:
        return
    others = (Bin(name, ratios.count(value), name) for value, name in _OTHERS if value in ratios)
    numbers = [value for value in ratios if not isinstance(value, str)]
    span = max(numbers, default=0.0) - min(numbers, default=0.0)
    width = DECIBELS * max(1, math.ceil(span / DECIBELS / MOST_BINS))
    yield _plot_bins(
        [*_bin_ratios(numbers, width), *others],
        name="sqnr",
        title="Signal-to-quantization-noise ratio, claim by claim",
        description=f"{pluralize(len(ratios), 'claim')} by the ratio of the exact results' power to that of the error, "
        f"over all comparisons of a claim, in bins of {width} dB, by their lower ends. 8 bits over the whole range "
        "give some 50 dB. Claims without any error are on the right.",
        columns=("dB", "claims"),
    )


def _bin_ratios(ratios: Sequence[float], width: int) -> Iterator[Bin]:
    counts = Counter(math.floor(value / width) * width for value in ratios)
    starts = range(min(counts), max(counts) + width, width) if counts else range(0)
    named = starts[:: math.ceil(len(starts) / 12) or 1]
    for start in starts:
        yield Bin(f"{start} to {start + width}", counts[start], str(start) if start in named else "")


def _plot_bins(bins: Sequence[Bin], *, name: str, title: str, description: str, columns: tuple[str, str]) -> Plot:
    """Make a histogram: bars of equal width, each with its count."""
    most, width = max(each.size for each in bins), (WIDTH - LEFT - RIGHT) / len(bins)
    bars = []
    for number, each in enumerate(bins):
        height = max((_FOOT - _TOP) * each.size / most, 1.5 if each.size else 0)  # a few are to be seen beside many
        x, label = LEFT + width * number, f"{each.name}: {format_count(each.size)}"
        bars.append(Bar(x=x + 0.5, y=_FOOT - height, width=width - 1, height=height, label=label))
    return Plot(
        name=name,
        title=title,
        description=description,
        height=_FOOT + 66,
        columns=columns,
        rows=tuple((each.name, format_count(each.size)) for each in bins),
        texts=(
            *(text for each, bar in zip(bins, bars, strict=True) for text in _label_bin(each, bar)),
            Text(x=(LEFT + WIDTH - RIGHT) / 2, y=_FOOT + 62, text=columns[0], kind="axis"),
            Text(x=LEFT - 12, y=(_TOP + _FOOT) / 2, text=columns[1], kind="axis", turns=True),
        ),
        rules=(_FOOT,),
        bars=tuple(bars),
    )


def _label_bin(each: Bin, bar: Bar) -> Iterator[Text]:
    """Yield the text under a bin, and the count above its bar; both are turned where they have no room."""
    middle = bar.x + bar.width / 2
    if len(each.label) * _LETTER > bar.width and not each.label.lstrip("-").isdecimal():
        yield Text(x=middle + 3.5, y=_FOOT + 5, text=each.label, anchor="end", turns=True)
    elif each.label:
        yield Text(x=middle, y=_FOOT + 14, text=each.label)
    if each.size:
        count = shorten_count(each.size)
        turns = len(count) * _DIGIT > bar.width + 1
        x, anchor = (middle + 3, "start") if turns else (middle, "middle")
        yield Text(x=x, y=bar.y - 4, text=count, kind="count", anchor=anchor, turns=turns)


def shorten_count(number: int) -> str:
    """Return a number in at most six characters: ``1,234``, ``36.2k``, ``121.7M``."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= max(size, 10**4):
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return f"{number:,}"


# -- models, pattern by pattern ---------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """A pattern of a model."""

    node: str
    pattern: str
    verdict: Verdict | None
    """None where it runs in float, for a reason."""
    ratio: Number | None
    reason: str = ""


def plot_models(models: Iterable[ModelResult]) -> Iterator[Plot]:
    """Plot the patterns of the models that were judged pattern by pattern, the worst MOST_MODELS."""
    judged = [(model, model.statistics) for model in models if model.statistics and model.statistics.layers]
    judged.sort(key=lambda each: (each[0].verdict.rank, each[0].model))
    for number, (model, measured) in enumerate(judged[:MOST_MODELS], start=1):
        right = sum(layer.verdict is Verdict.VERIFIED for layer in measured.layers)
        yield _plot_patterns(
            [Pattern(layer.node, layer.pattern, layer.verdict, layer.sqnr_db) for layer in measured.layers],
            name=f"layers-{number}",
            title=f"Signal-to-noise ratio, layer by layer: {cut_middle(model.model, 120)}",
            description=f"The model is {model.verdict}. {right} of its {pluralize(len(measured.layers), 'pattern')} "
            "are VERIFIED, each alone, on the values of the reference model. They stand in the order of the graph. End "
            f"to end the ratio in dB is: {format_db(measured.sqnr_db)}.",
        )


def plot_parts(name: str, model: str, parts: Sequence[ModelPart]) -> Plot:
    """Plot a model that was handed in: the error that each pattern adds, and what runs in float."""
    return _plot_patterns(
        [
            Pattern(
                each.node,
                each.pattern,
                (each.verdict or Verdict.UNEXERCISED) if each.dtypes else None,
                each.alone_db,
                each.reason,
            )
            for each in parts
        ],
        name=name,
        title=f"What quantizing each pattern adds: {cut_middle(model, 120)}",
        description="The ratio of the float values to the error that quantizing each pattern alone adds, and the "
        "backend's verdict on it, in the order of the graph. A grey bar is an op that runs in float.",
    )


def _plot_patterns(patterns: Sequence[Pattern], *, name: str, title: str, description: str) -> Plot:
    """Make a plot of patterns in the order of the graph, each at the height of its ratio."""
    shown = patterns[:MOST_PATTERNS]
    known = [each.ratio for each in shown if isinstance(each.ratio, (int, float))]
    low, high = 20 * math.floor(min([*known, 0]) / 20), 20 * math.ceil(max([*known, 20]) / 20)
    width = (WIDTH - LEFT - RIGHT) / len(shown)
    more = f" The first {MOST_PATTERNS} of {len(patterns):,} are drawn." if len(patterns) > MOST_PATTERNS else ""

    def find_y(ratio: Number | None) -> float:
        if ratio is None:
            return _SILENT
        if isinstance(ratio, str):
            return _EXACT if ratio == "inf" else _LOW
        return _LOW - (_LOW - _HIGH) * (ratio - low) / (high - low)

    heights = {str(value): find_y(value) for value in range(low, high + 1, 20)}
    heights |= {"no error": _EXACT, "no ratio": _SILENT}
    places = [
        (LEFT + width * (number + 0.5), each, f"{cut_middle(each.node, 60)} ({cut_middle(each.pattern, 60)})")
        for number, each in enumerate(shown)
    ]
    named = [(x, cut_end(each.node, _LONGEST)) for x, each, _ in places[:: math.ceil(len(shown) / _MOST_NAMES)]]
    return Plot(
        name=name,
        title=title,
        description=description + more,
        height=_SILENT + 26 + _LETTER * max(len(text) for _, text in named),
        columns=("node", "pattern", "verdict", "dB"),
        rows=tuple((each.node, each.pattern, each.verdict or "float", format_db(each.ratio)) for each in shown),
        texts=(
            *(Text(x=LEFT - 5, y=y + 3.5, text=text, anchor="end") for text, y in heights.items()),
            *(Text(x=x + 3.5, y=_SILENT + 12, text=text, anchor="end", kind="strip", turns=True) for x, text in named),
            Text(x=11, y=(_HIGH + _LOW) / 2, text="result to error, dB", kind="axis", turns=True),
        ),
        rules=tuple(heights.values()),
        bars=tuple(
            Bar(
                x=x - width / 2,
                y=_EXACT,
                width=width,
                height=_SILENT - _EXACT,
                kind="float",
                label=f"{label} runs in float: {each.reason}",
            )
            for x, each, label in places
            if each.verdict is None
        ),
        dots=tuple(
            Mark(
                x=x,
                y=find_y(each.ratio),
                verdict=each.verdict,
                label=f"{label}: {format_db(each.ratio)} dB, {each.verdict}",
            )
            for x, each, label in places
            if each.verdict is not None
        ),
        legend=counts_of(each.verdict for each in shown if each.verdict is not None),
    )
