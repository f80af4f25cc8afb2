"""Plots of whole models: the signal-to-noise ratio of each pattern, in the order of the graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from reports.measured import ModelPart
from reports.numbers import Number
from reports.plots.axes import choose_ticks
from reports.plots.drawing import WIDTH, Bar, Cell, Link, Mark, Plot, Stroke, Text
from reports.results import counts_of
from reports.schema import Layer, ModelResult
from reports.text import cut_end, cut_middle, pluralize, spell_count, spell_number
from reports.verdicts import Verdict

MOST_MODELS = 6
"""Largest number of models that are drawn."""
MOST_LAYERS = 200
"""Largest number of patterns of a model that are drawn."""
_LEFT, _RIGHT, _MOST_NAMES, _LONGEST, _LETTER = 76, 16, 40, 18, 5.4
"""Margins; the names below: how many, how long at most, and how high a character of them is."""
_EXACT, _TOP, _FOOT, _SILENT = 12, 32, 172, 192
"""Heights of patterns without an error, of the highest and the lowest ratio, and of patterns without a ratio."""


def plot_models(models: Iterable[ModelResult]) -> tuple[Plot, ...]:
    """Plot the patterns of the models that were judged pattern by pattern, the worst models first."""
    judged = [(model, model.statistics.layers) for model in models if model.statistics and model.statistics.layers]
    judged.sort(key=lambda each: (*_rank(*each), each[0].model))
    cut = f" Of {pluralize(len(judged), 'model')} judged by patterns, the {MOST_MODELS} worst are drawn."
    return tuple(
        _plot_model(f"layers-{number}", model, layers, cut if len(judged) > MOST_MODELS else "")
        for number, (model, layers) in enumerate(judged[:MOST_MODELS], start=1)
    )


def _rank(model: ModelResult, layers: Sequence[Layer]) -> tuple[bool, int, float]:
    """Rank a model: by its verdict and its lowest ratio; one of which hardly a pattern has a ratio comes last."""
    known = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None]
    ratios = [-math.inf if ratio == "nan" else float(ratio) for ratio in known]
    return 2 * len(ratios) <= len(layers), model.verdict.rank, min(ratios, default=math.inf)


def _plot_model(name: str, model: ModelResult, layers: Sequence[Layer], more: str) -> Plot:
    shown = layers[:MOST_LAYERS]
    scale = _make_scale(shown)
    names = [(number, cut_end(shown[number].node, _LONGEST)) for number in _choose_named(len(shown))]
    return Plot(
        name=name,
        title=f"Signal-to-noise ratio, layer by layer: {cut_middle(model.model, 120)}",
        description=_describe(model, layers) + more,
        height=_SILENT + 18 + _LETTER * max(len(text) for _, text in names),
        columns=("node", "pattern", "verdict", "dB"),
        rows=(
            *((layer.node, layer.pattern, layer.verdict.value, _spell(layer.sqnr_db)) for layer in shown),
            _make_last_row(model),
        ),
        texts=(*_label_scale(scale), *_label_patterns(names, scale)),
        lines=tuple(_rule(shown, scale)),
        dots=tuple(_make_dot(number, layer, scale) for number, layer in enumerate(shown)),
        legend=counts_of(layer.verdict for layer in shown),
    )


def plot_parts(name: str, model: str, parts: Sequence[ModelPart]) -> Plot:
    """Plot a model that was handed in: the error that each pattern adds, and what runs in float."""
    shown = parts[:MOST_LAYERS]
    layers = [
        Layer(node=part.node, pattern=part.pattern, verdict=part.verdict or Verdict.UNEXERCISED, sqnr_db=part.alone_db)
        for part in shown
    ]
    scale = _make_scale(layers)
    names = [(number, cut_end(shown[number].node, _LONGEST)) for number in _choose_named(len(shown))]
    quantized = [number for number, part in enumerate(shown) if part.dtypes]
    half = (WIDTH - _LEFT - _RIGHT) / len(shown) / 2
    more = f" The first {MOST_LAYERS} of {spell_count(len(parts))} are drawn." if len(parts) > MOST_LAYERS else ""
    return Plot(
        name=name,
        title=f"What quantizing each pattern adds: {cut_middle(model, 120)}",
        description="The ratio of the float values to the error that quantizing each pattern alone adds, and the "
        f"backend's verdict on it, in the order of the graph. A grey bar is an op that runs in float.{more}",
        height=_SILENT + 26 + _LETTER * max(len(text) for _, text in names),
        columns=("node", "pattern", "verdict", "dB"),
        rows=tuple(
            (part.node, part.pattern, part.verdict.value if part.verdict else "float", _spell(part.alone_db))
            for part in shown
        ),
        texts=(*_label_scale(scale), *_label_patterns(names, scale)),
        lines=tuple(_rule([], scale)),
        bars=tuple(
            Bar(x=scale.find_x(number) - half, y=_EXACT, width=2 * half, height=_SILENT - _EXACT, kind="float",
                label=f"{cut_middle(part.node, 60)} ({cut_middle(part.pattern, 60)}) runs in float: {part.reason}")
            for number, part in enumerate(shown) if not part.dtypes
        ),
        dots=tuple(_make_dot(number, layers[number], scale) for number in quantized),
        legend=counts_of(layers[number].verdict for number in quantized),
        is_wide=len(shown) > _MOST_NAMES,
    )  # fmt: skip


def _make_last_row(model: ModelResult) -> tuple[Cell, ...]:
    whole = model.statistics.sqnr_db if model.statistics else None
    return "end to end", Link(text=model.model, target=model.model), model.verdict.value, _spell(whole)


def _describe(model: ModelResult, layers: Sequence[Layer]) -> str:
    silent = sum(layer.sqnr_db is None for layer in layers)
    wrong = sum(layer.verdict is not Verdict.VERIFIED for layer in layers)
    whole = model.statistics.sqnr_db if model.statistics else None
    parts = [
        f"The model is {model.verdict}. Its {pluralize(len(layers), 'pattern')}, in the order of the graph, ran each "
        f"alone, on the values of the reference model: {spell_count(len(layers) - wrong)} of them VERIFIED."
    ]
    parts += [f"{pluralize(silent, 'pattern')} gave nothing to compare."] if silent else []
    parts += [f"End to end the ratio is {_spell(whole)} dB."] if whole is not None else []
    parts += [f"The first {MOST_LAYERS} are drawn."] if len(layers) > MOST_LAYERS else []
    return " ".join(parts)


def _spell(ratio: Number | None) -> str:
    return spell_number(ratio, ".1f")


# -- drawing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Places of ratios between two round numbers of dB, and of patterns by their number."""

    low: float
    high: float
    patterns: int

    def find_x(self, number: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (number + 0.5) / self.patterns

    def find_y(self, ratio: Number | None) -> float:
        """Return the height of a ratio; an undefined one, or that of nothing but error, is at the foot."""
        if ratio is None:
            return _SILENT
        if isinstance(ratio, str):
            return _EXACT if ratio == "inf" else _FOOT
        return _FOOT - (_FOOT - _TOP) * (ratio - self.low) / (self.high - self.low)


def _make_scale(layers: Sequence[Layer]) -> _Scale:
    ratios = [layer.sqnr_db for layer in layers if layer.sqnr_db is not None and not isinstance(layer.sqnr_db, str)]
    low, high = 10 * math.floor(min(ratios, default=0) / 10), 10 * math.ceil(max(ratios, default=0) / 10)
    return _Scale(low=low, high=max(high, low + 10), patterns=len(layers))


def _choose_named(patterns: int) -> range:
    """Return the numbers of the patterns that are named below: all, or as many as have room."""
    return range(0, patterns, math.ceil(patterns / _MOST_NAMES))


def _label_scale(scale: _Scale) -> Iterator[Text]:
    ticks = [(scale.find_y(value), f"{value:g}") for value in choose_ticks(scale.low, scale.high)]
    for y, text in (*ticks, (_EXACT, "no error"), (_SILENT, "no ratio")):
        yield Text(x=_LEFT - 5, y=y + 3.5, text=text, anchor="end")
    yield Text(x=11, y=(_TOP + _FOOT) / 2, text="result to error, dB", kind="axis", turns=True)


def _label_patterns(names: Iterable[tuple[int, str]], scale: _Scale) -> Iterator[Text]:
    for number, name in names:
        x = scale.find_x(number) + 3.5
        yield Text(x=x, y=_SILENT + 12, text=name, anchor="end", kind="strip", turns=True)


def _rule(layers: Sequence[Layer], scale: _Scale) -> Iterator[Stroke]:
    """Yield the lines of the scale, and those between ratios that follow each other."""
    for y in (*map(scale.find_y, choose_ticks(scale.low, scale.high)), _EXACT, _SILENT):
        yield Stroke(x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y)
    for number, (layer, following) in enumerate(itertools.pairwise(layers)):
        if layer.sqnr_db is not None and following.sqnr_db is not None:
            first, second = scale.find_y(layer.sqnr_db), scale.find_y(following.sqnr_db)
            yield Stroke(x1=scale.find_x(number), x2=scale.find_x(number + 1), y1=first, y2=second, kind="path")


def _make_dot(number: int, layer: Layer, scale: _Scale) -> Mark:
    ratio = "no ratio" if layer.sqnr_db is None else f"{_spell(layer.sqnr_db)} dB"
    label = f"{cut_middle(layer.node, 60)} ({cut_middle(layer.pattern, 60)}): {ratio}, {layer.verdict}"
    return Mark(x=scale.find_x(number), y=scale.find_y(layer.sqnr_db), verdict=layer.verdict, label=label)
