"""The plots: each mark recomputed from the rows of the run, at the place that the drawing's own scale gives it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.measured import ModelPart
from fx_quant_conformance.reports.plots import MOST_PATTERNS, SHAPES, Bar, Plot, make_plots, plot_parts, shorten_count
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.verdicts import VERDICTS, Verdict
from tests.reports.pages import Page

Row = dict[str, Any]


def plot(results: Results) -> dict[str, Plot]:
    return {plot.name: plot for plot in make_plots(results)}


# -- histograms -------------------------------------------------------------------------------------------------------


def heights(bars: tuple[Bar, ...]) -> list[float]:
    """The heights of bars that stand side by side on one line."""
    assert len({round(bar.y + bar.height, 6) for bar in bars}) == 1
    assert all(after.x - before.x == pytest.approx(before.width + 1) for before, after in itertools.pairwise(bars))
    return [bar.height for bar in bars]


def test_bars_are_as_high_as_their_counts_and_empty_bins_keep_their_places(made: Any) -> None:
    rows = made.everything()
    drawing = plot(made.results(rows))["distances"]
    columns = zip(*(row["statistics"]["distances"] for row in rows if "statistics" in row), strict=True)
    counts = [sum(column) for column in columns]
    assert 0 in counts and [row[1] for row in drawing.rows] == [str(count) for count in counts]
    assert [bar.label for bar in drawing.bars] == [f"{name}: {count}" for name, count in drawing.rows]
    high = heights(drawing.bars)
    for height, count in zip(high, counts, strict=True):
        assert height == (pytest.approx(high[0] * count / counts[0]) if count else 0) or 0 < height < 2
    assert [text.text for text in drawing.texts if text.kind == "count"] == [str(count) for count in counts if count]
    names = [text.text for text in drawing.texts if text.kind == "tick"]
    assert names == [name for name, _ in drawing.rows] and names[4:6] == ["≤ 0.5", "≤ 0.501"] and names[-1] == "> 64"


def measured(runs: Any, *ratios: float | str) -> Plot:
    """The plot of the ratios of claims that have these."""
    checks = [runs.check(f"c{n}", statistics={"sqnr_db": ratio}) for n, ratio in enumerate(ratios)]
    return plot(runs.results([*checks, *(runs.claim(f"c{n}") for n, _ in enumerate(ratios))]))["sqnr"]


def test_ratios_have_a_bin_every_five_decibels_the_empty_ones_too(runs: Any) -> None:
    ratios = (-7.0, 12.0, 14.9, 15.0, 93.25, "inf", "inf", "-inf", "nan")
    drawing = measured(runs, *ratios)
    numbers = [value for value in ratios if not isinstance(value, str)]
    expected = {f"{low} to {low + 5}": sum(low <= v < low + 5 for v in numbers) for low in range(-10, 95, 5)}
    table = {name: int(count) for name, count in drawing.rows}
    assert table == expected | {"no error": 2, "only error": 1, "undefined": 1}
    assert sum(table.values()) == len(ratios) and list(table.values()).count(0) == 17
    labels = {text.text: text.x for text in drawing.texts if text.kind == "tick" and not text.turns}
    bars = {bar.label.partition(" ")[0]: bar.x + bar.width / 2 for bar in drawing.bars}
    assert len(labels) > 5 and all(x == pytest.approx(bars[name]) for name, x in labels.items())
    assert [text.text for text in drawing.texts if text.kind == "tick" and text.turns] == [
        "only error",
        "undefined",
        "no error",
    ]


def test_the_bins_of_ratios_that_lie_far_apart_are_wider_and_few(runs: Any) -> None:
    rows = measured(runs, -250.0, 10.0, 310.0).rows
    assert len(rows) <= 42 and [count for _, count in rows].count("1") == 3 and rows[0][0] == "-255 to -240"


def test_a_run_without_any_error_has_its_bar_and_one_without_numbers_no_plot(runs: Any) -> None:
    assert measured(runs, "inf", "inf").rows == (("no error", "2"),)
    assert plot(runs.results([runs.check(), runs.claim()])) == {}


def test_counts_above_bars_are_short() -> None:
    numbers = (0, 7, 999, 1234, 9999, 10_000, 36_218, 121_738_198, 50_000_000, 2_000_000_000)
    assert [shorten_count(number) for number in numbers] == [
        "0",
        "7",
        "999",
        "1,234",
        "9,999",
        "10k",
        "36.2k",
        "121.7M",
        "50M",
        "2G",
    ]


# -- models -----------------------------------------------------------------------------------------------------------

LAYERS: tuple[tuple[str, str, float | str | None], ...] = (
    ("stem", "VERIFIED", 52.5),
    ("pool", "VERIFIED", "inf"),
    ("deep", "REFUTED", 8.75),
    ("raises", "CRASHED", None),
    ("last", "VERIFIED", 41.0),
)


def model_of(made: Any, name: str, *layers: tuple[str, str, float | str | None], **changes: Any) -> Row:
    rows = [
        {"node": node, "pattern": "nn.Conv2d", "verdict": verdict, "sqnr_db": ratio} for node, verdict, ratio in layers
    ]
    row: Row = made.model(name, statistics={"sqnr_db": 44.5, "layers": rows}, **changes)
    return row


def scale(drawing: Plot) -> dict[str, float]:
    """Where the ticks of a plot of patterns stand."""
    return {text.text: text.y - 3.5 for text in drawing.texts if text.kind == "tick"}


def test_the_patterns_of_a_model_stand_in_order_at_their_ratios(made: Any) -> None:
    rows = [*made.everything(), model_of(made, "model/net/ptq", *LAYERS, verdict="REFUTED")]
    drawings = plot(made.results(rows))
    drawing, ticks = drawings["layers-1"], scale(drawings["layers-1"])
    assert "layers-2" not in drawings and len(drawing.dots) == len(LAYERS) and not drawing.bars
    step = (ticks["60"] - ticks["0"]) / 60
    for dot, (node, verdict, ratio) in zip(drawing.dots, LAYERS, strict=True):
        named = {"inf": ticks["no error"], None: ticks["no ratio"]}
        expected = ticks["0"] + step * ratio if isinstance(ratio, float) else named[ratio]
        assert dot.y == pytest.approx(expected), node
        assert dot.verdict == verdict and dot.label.startswith(f"{node} (nn.Conv2d): ")
    steps = {round(b.x - a.x, 6) for a, b in zip(drawing.dots, drawing.dots[1:], strict=False)}
    assert len(steps) == 1 and min(steps) > 50
    assert [text.text for text in drawing.texts if text.kind == "strip"] == [node for node, *_ in LAYERS]
    assert [row[3] for row in drawing.rows] == ["52.5", "exact", "8.8", "-", "41.0"]
    assert drawing.legend == {Verdict.CRASHED: 1, Verdict.REFUTED: 1, Verdict.VERIFIED: 3}
    assert "3 of its 5 patterns are VERIFIED" in drawing.description and "is: 44.5." in drawing.description


def test_the_worst_models_are_drawn(made: Any) -> None:
    models = [model_of(made, f"model/{n}", ("a", "VERIFIED", 30.0 + n)) for n in range(7)]
    models.append(model_of(made, "model/red", ("a", "REFUTED", 90.0), verdict="REFUTED"))
    drawings = plot(made.results([*made.everything(), *models]))
    shown = [drawings[f"layers-{n}"].title.rpartition(": ")[2] for n in range(1, 7)]
    assert shown == ["model/red", *(f"model/{n}" for n in range(5))] and "layers-7" not in drawings


def test_of_many_patterns_the_first_are_drawn_and_what_runs_in_float_is_a_bar() -> None:
    parts = [ModelPart(node=f"n{n}", pattern="nn.ReLU", reason="no pattern") for n in range(250)]
    drawing = plot_parts("parts-1", "model/x", parts)
    assert (
        len(drawing.bars) == MOST_PATTERNS and not drawing.dots and drawing.rows[0] == ("n0", "nn.ReLU", "float", "-")
    )
    assert drawing.bars[0].label == "n0 (nn.ReLU) runs in float: no pattern"
    assert drawing.description.endswith("The first 200 of 250 are drawn.")
    assert len([text for text in drawing.texts if text.kind == "strip"]) <= 40


def test_the_page_draws_what_the_plot_says_and_has_its_numbers_as_a_table(made: Any) -> None:
    results = made.results([*made.everything(), model_of(made, "model/net/ptq", *LAYERS, verdict="REFUTED")])
    page, plots = Page(render_html(results)), make_plots(results)
    for drawing in plots:
        assert page.tables[drawing.title] == [list(drawing.columns), *map(list, drawing.rows)]
    places = [attrs["d"] for tag, attrs in page.tags if tag == "path" and not (attrs["d"] or "").startswith("M0 0")]
    dots = [dot for drawing in plots for dot in drawing.dots]
    drawn = [place.partition("m")[0][1:].split() for place in places if place]
    assert [(float(x), float(y)) for x, y in drawn] == [(round(dot.x, 1), round(dot.y, 1)) for dot in dots] and dots
    assert all((place or "").endswith(SHAPES[dot.verdict]) for place, dot in zip(places, dots, strict=True))
    bars = [(attrs["x"] or "", attrs["y"] or "", attrs["height"] or "") for tag, attrs in page.tags if tag == "rect"]
    assert [tuple(map(float, bar)) for bar in bars] == [
        (round(bar.x, 1), round(bar.y, 1), round(bar.height, 1)) for drawing in plots for bar in drawing.bars
    ]
    assert len({SHAPES[verdict] for verdict in VERDICTS}) == len(VERDICTS) - 1, "UNSHOWN is an empty circle"
