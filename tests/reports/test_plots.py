"""The plots: each mark recomputed from the rows of the run, at the place that the drawing's own ticks give it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from reports.html import render_html
from reports.page import anchor
from reports.plots.axes import choose_ticks, make_distance_axis
from reports.plots.drawing import shorten_count
from reports.plots.points import name_op
from tests.reports.drawings import Drawing, Drawings
from tests.reports.pages import Page

Row = dict[str, Any]


def along(ticks: Mapping[str, float], first: str, second: str) -> Callable[[float], float]:
    """The linear scale that two ticks make."""
    low, high = float(first), float(second)
    return lambda value: ticks[first] + (ticks[second] - ticks[first]) * (value - low) / (high - low)


def spell(html: str) -> dict[str, Drawing]:
    return Drawings(html).found


def claims_at(runs: Any, *distances: float | str, **changes: Any) -> list[Row]:
    """Claims of one op, with these largest distances."""
    return [runs.claim(f"claim{number}", max_lsb=each, **changes) for number, each in enumerate(distances)]


# -- strips -----------------------------------------------------------------------------------------------------------


def place_of(ticks: Mapping[str, float], lsb: float | str) -> float:
    """Where a distance belongs by the ticks: two linear parts, and one place for the rest."""
    if isinstance(lsb, str) or lsb > 256:
        return ticks["> 256"]
    return along(ticks, "0", "2")(lsb) if lsb <= 2 else along(ticks, "64", "256")(lsb)


def test_each_point_of_the_strips_is_a_claim_at_its_distance_with_its_verdict(made: Any) -> None:
    rows = [*made.everything()]
    far = [row | {"max_lsb": lsb, "claim": f"far{lsb}", "verdict": verdict, "waived": True, "waiver": made.waiver}
           for row in rows[-20:] if row["kind"] == "claim" and row["pattern"] == "nn.Conv1d"
           for lsb, verdict in ((254.5, "REFUTED"), (2068.2, "FALLBACK"), ("inf", "CRASHED"), ("nan", "TIMEOUT"))
           ]  # fmt: skip
    assert len(far) == 4
    html = render_html(made.results([*rows, *far]))
    drawing, ids = spell(html)["strips"], Page(html).ids()
    measured = {anchor(row["claim"]): row for row in [*rows, *far] if row.get("max_lsb") is not None
                if row["kind"] == "claim"}  # fmt: skip
    ticks = drawing.ticks("x")
    names = {text: float(a["y"] or "") for a, text in drawing.texts if a["class"] == "strip"}
    assert Counter(dot.link for dot in drawing.dots) == Counter(f"#{name}" for name in measured)  # none at one place
    for dot in drawing.dots:
        row = measured[dot.link.removeprefix("#")]
        assert dot.link.removeprefix("#") in ids
        assert dot.attributes["class"] == f"dot {row['verdict']}"
        assert dot.words.startswith(f"{row['verdict']} ")
        assert dot.place[0] == pytest.approx(place_of(ticks, row["max_lsb"]), abs=0.11), row
        nearest = min(names, key=lambda name: abs(names[name] - 3.5 - dot.place[1]))
        assert nearest == row["pattern"].rpartition(".")[2].lower()
    shapes = {dot.attributes["class"]: re.sub(r"^M[\d. -]+", "", str(dot.attributes["d"])) for dot in drawing.dots}
    assert len(set(shapes.values())) == len(shapes) == 6


def test_the_table_of_the_strips_has_the_link_of_each_point(runs: Any) -> None:
    html = render_html(runs.results(runs.large(404)))
    page, drawing = Page(html), spell(html)["strips"]
    [header, *table] = page.tables["Largest distance of each claim, op by op"]
    claims = [row for row in runs.large(404) if row["kind"] == "claim" and row["max_lsb"] is not None]
    assert header == ["op", "verdict", "LSB", "claims", "claim"]
    assert len(table) == len(drawing.dots)
    assert {f"#{anchor(row[4])}" for row in table} == {dot.link for dot in drawing.dots}
    counted = Counter[str]()
    for _, verdict, _, count, _ in table:
        counted[verdict] += int(count)
    assert counted == Counter(claim["verdict"] for claim in claims)


def test_claims_at_one_place_are_one_point_that_counts_them(runs: Any) -> None:
    drawing = spell(render_html(runs.results(claims_at(runs, 0.5, 0.5, 0.500001, 1.5))))["strips"]
    [three, one] = sorted(drawing.dots, key=lambda dot: dot.place[0])
    assert three.words == "VERIFIED 0.500001 LSB: claim2 and 2 claims more here"
    assert one.words == "VERIFIED 1.5 LSB: claim3" and one.link == f"#{anchor('claim3')}"
    assert three.attributes["class"] == one.attributes["class"] == "dot VERIFIED"


def test_an_axis_has_only_the_parts_that_it_needs(runs: Any) -> None:
    for distances, last in (((0.1, 2.0), "2"), ((0.1, 2.1), "256"), ((0.1, 257.0), "> 256"), ((0.1, "nan"), "> 256")):
        drawing = spell(render_html(runs.results(claims_at(runs, *distances))))["strips"]
        ticks = drawing.ticks("x")
        assert max(ticks, key=ticks.__getitem__) == last
        assert ("64" in ticks) == (2.1 in distances) and "0.5" in ticks


def test_the_worst_ops_have_strips_and_a_sentence_has_the_others(runs: Any) -> None:
    rows = [runs.claim(f"c{n}", pattern=f"nn.Op{n}", max_lsb=n / 100) for n in range(50)]
    rows.append(runs.claim("red", pattern="nn.Red", max_lsb=0.0, verdict="REFUTED"))
    rows.append(runs.claim("silent", pattern="nn.Silent", max_lsb=None, verdict="UNEXERCISED"))
    drawing = spell(render_html(runs.results(rows)))["strips"]
    names = [text for a, text in drawing.texts if a["class"] == "strip"]
    assert names == ["red", *(f"op{n}" for n in range(49, 10, -1))]
    assert len(drawing.dots) == 40
    assert (
        "Of 51 ops the 40 worst are drawn. The others have 11 claims (11 VERIFIED), the largest" in drawing.description
    )
    assert "0.1 LSB" in drawing.description


@pytest.mark.parametrize(("claims", "most"), [(2000, 600), (4000, 200)])
def test_many_points_are_drawn_coarser_and_none_is_lost(runs: Any, claims: int, most: int) -> None:
    rows = [runs.claim(f"c{n}", pattern=f"nn.Op{n % 40}", max_lsb=n / 2000) for n in range(claims)]
    drawing = spell(render_html(runs.results(rows)))["strips"]
    more = [re.search(r"and ([\d,]+) claims? more here$", dot.words) for dot in drawing.dots]
    assert 100 < len(drawing.dots) <= most
    assert sum(1 + (int(found[1]) if found else 0) for found in more) == claims


@pytest.mark.parametrize(
    ("pattern", "op"),
    [("nn.Conv2d", "conv2d"), ("F.conv2d+F.relu", "conv2d"), ("nniqat.ConvBnReLU2d", "conv2d"),
     ("nni.LinearBn1d", "linear"), ("nni.BNReLU3d", "batchnorm3d"), (".relu_", "relu"), ("torch.conv_transpose1d",
     "convtranspose1d"), ("torch.add(nn.Conv2d,*)+nn.ReLU", "add"), ("own.Layer + nn.ReLU", "layer"), ("", "")],
)  # fmt: skip
def test_ops_are_named_alike_however_they_are_written(pattern: str, op: str) -> None:
    assert name_op(pattern) == op


def test_points_are_no_stops_of_the_tab_key_and_their_drawing_is_no_image(runs: Any) -> None:
    html = render_html(runs.results(runs.large(60)))
    drawing = spell(html)["strips"]
    links = [attrs for tag, attrs in Page(html).tags if tag == "a" and "tabindex" in attrs]
    assert drawing.attributes["role"] == "group" and drawing.title and drawing.description
    assert len(links) == len(drawing.dots) and {attrs["tabindex"] for attrs in links} == {"-1"}


# -- errors -----------------------------------------------------------------------------------------------------------


def test_each_point_of_the_errors_stands_at_its_range_and_distance(made: Any) -> None:
    rows = made.everything()
    drawing = spell(render_html(made.results(rows)))["errors"]
    measured = {f"#{anchor(row['claim'])}": row for row in rows if "statistics" in row}
    across, upward = drawing.ticks("x", 270), drawing.ticks("y", 59)
    assert {dot.link for dot in drawing.dots} == set(measured) and len(drawing.dots) == len(measured) == 3
    for dot in drawing.dots:
        row = measured[dot.link]
        assert dot.attributes["class"] == f"dot {row['verdict']}"
        x, y = along(across, "0", "250")(row["statistics"]["span_lsb"]), along(upward, "0", "2")(row["max_lsb"])
        assert dot.place == pytest.approx((x, y - 3.5), abs=0.11)


# -- bars -------------------------------------------------------------------------------------------------------------


def heights(drawing: Drawing, foot: float) -> list[float]:
    assert all(bar.number("y") + bar.number("height") == pytest.approx(foot, abs=0.11) for bar in drawing.bars)
    return [bar.number("height") for bar in drawing.bars]


def test_bars_are_as_high_as_their_counts_and_empty_bins_keep_their_places(made: Any) -> None:
    rows = made.everything()
    html = render_html(made.results(rows))
    drawing = spell(html)["distances"]
    table = Page(html).tables["Distance of outputs from the exact result"][1:]
    counts = [sum(column) for column in zip(*(r["statistics"]["distances"] for r in rows if "statistics" in r),
                                            strict=True)]  # fmt: skip
    assert [row[1] for row in table] == [str(count) for count in counts]
    assert [bar.words for bar in drawing.bars] == [f"{row[0]}: {row[1]}" for row in table]
    high = heights(drawing, 214)
    assert 0 in counts
    for height, count in zip(high, counts, strict=True):
        assert height == (pytest.approx(high[0] * count / counts[0], abs=0.11) if count else 0) or 0 < height < 2
    labels = [text for a, text in drawing.texts if a["class"] == "count"]
    assert labels == [str(count) for count in counts if count]


def test_up_to_half_a_step_bins_stand_where_the_axis_has_them(made: Any) -> None:
    drawing = spell(render_html(made.results(made.everything())))["distances"]
    scale = along(drawing.ticks("x", 228), "0", "0.5")
    edges = [(bar.number("x") - 0.5, bar.number("x") + bar.number("width") + 0.5) for bar in drawing.bars]
    for number, edge in enumerate(edges[:5]):
        assert edge == pytest.approx((scale(number / 10), scale((number + 1) / 10)), abs=0.11)
    assert edges[5][0] > edges[4][1] + 10  # the others stand apart
    assert len({round(right - left) for left, right in edges[5:]}) == 1


def measured(runs: Any, *ratios: float | str) -> str:
    """A report of claims with these ratios."""
    checks = [runs.check(f"c{n}", statistics={"sqnr_db": ratio}) for n, ratio in enumerate(ratios)]
    return render_html(runs.results([*checks, *(runs.claim(f"c{n}") for n, _ in enumerate(ratios))]))


def test_ratios_have_a_bin_every_five_decibels_the_empty_ones_too(runs: Any) -> None:
    ratios = (-7.0, 12.0, 14.9, 15.0, 93.25, "inf", "inf", "-inf", "nan")
    html = measured(runs, *ratios)
    drawing = spell(html)["sqnr"]
    table = {row[0]: int(row[1]) for row in Page(html).tables[drawing.title][1:]}
    numbers = [value for value in ratios if not isinstance(value, str)]
    expected = {f"{low} to {low + 5}": sum(low <= v < low + 5 for v in numbers) for low in range(-10, 95, 5)}
    assert table == expected | {"no error": 2, "only error": 1, "undefined": 1}
    assert sum(table.values()) == len(ratios) and list(table.values()).count(0) == 17
    scale = along(drawing.ticks("x", 228), "0", "80")
    for number, bar in enumerate(drawing.bars[:21]):
        assert bar.number("x") - 0.5 == pytest.approx(scale(5 * number - 10), abs=0.11)
    assert drawing.attributes["role"] == "img"


def test_the_bins_of_ratios_that_lie_far_apart_are_wider_and_few(runs: Any) -> None:
    html = measured(runs, -250.0, 10.0, 310.0)
    table = Page(html).tables[spell(html)["sqnr"].title][1:]
    assert len(table) <= 49 and [row[1] for row in table].count("1") == 3
    assert table[0][0] == "-260 to -240"


def test_a_run_without_any_error_has_its_bar(runs: Any) -> None:
    html = measured(runs, "inf", "inf")
    assert Page(html).tables[spell(html)["sqnr"].title][1:] == [["no error", "2"]]
    assert [bar.words for bar in spell(html)["sqnr"].bars] == ["no error: 2"]


# -- models -----------------------------------------------------------------------------------------------------------


def model_of(made: Any, name: str, *layers: tuple[str, str, float | str | None], **changes: Any) -> Row:
    rows = [
        {"node": node, "pattern": "nn.Conv2d", "verdict": verdict, "sqnr_db": ratio} for node, verdict, ratio in layers
    ]
    row: Row = made.model(name, statistics={"sqnr_db": 44.5, "layers": rows}, **changes)
    return row


LAYERS: tuple[tuple[str, str, float | str | None], ...] = (
    ("stem", "VERIFIED", 52.5), ("pool", "VERIFIED", "inf"), ("deep", "REFUTED", 8.75), ("raises", "CRASHED", None),
    ("last", "VERIFIED", 41.0),
)  # fmt: skip


def test_the_patterns_of_a_model_stand_in_order_at_their_ratios(made: Any) -> None:
    rows = [*made.everything(), model_of(made, "model/net/ptq", *LAYERS, verdict="REFUTED", waived=False)]
    html = render_html(made.results(rows))
    drawing, page = spell(html)["layers-1"], Page(html)
    upward = drawing.ticks("y", 71)
    places = [dot.place for dot in drawing.dots]
    assert len(places) == len(LAYERS) and "layers-2" not in spell(html)
    steps = [b[0] - a[0] for a, b in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.2) and steps[0] > 50
    for (_, y), (node, verdict, ratio), dot in zip(places, LAYERS, drawing.dots, strict=True):
        name = {"inf": "no error", None: "no ratio"}.get(ratio) if not isinstance(ratio, float) else ""
        expected = upward[name] if name else along(upward, "0", "60")(float(ratio or 0))
        assert y == pytest.approx(expected - 3.5, abs=0.11), node
        assert dot.attributes["class"] == f"dot {verdict}" and dot.words.startswith(f"{node} (nn.Conv2d): ")
    assert [text for a, text in drawing.texts if a["class"] == "strip"] == [node for node, *_ in LAYERS]
    [header, *table] = page.tables[drawing.title]
    assert header == ["node", "pattern", "verdict", "dB"]
    assert [row[3] for row in table] == ["52.5", "inf", "8.8", "-", "41.0", "44.5"]
    assert table[-1][1] == "model/net/ptq" and anchor("model/net/ptq") in page.ids()
    assert "1 pattern gave nothing to compare. End to end the ratio is 44.5 dB." in drawing.description
    assert "3 of them VERIFIED" in drawing.description


def test_the_worst_models_are_drawn(made: Any) -> None:
    models = [model_of(made, f"model/{n}", ("a", "VERIFIED", 30.0 + n)) for n in range(7)]
    models += [model_of(made, "model/red", ("a", "REFUTED", 90.0), verdict="REFUTED")]
    models += [model_of(made, "model/raises", ("a", "REFUTED", None), verdict="REFUTED")]
    drawings = spell(render_html(made.results([*made.everything(), *models])))
    shown = [drawings[f"layers-{n}"].title.rpartition(": ")[2] for n in range(1, 7)]
    assert shown == ["model/red", *(f"model/{n}" for n in range(5))] and "layers-7" not in drawings
    assert "Of 9 models judged by patterns, the 6 worst are drawn." in drawings["layers-1"].description


def test_a_model_of_an_older_file_has_no_drawing(made: Any) -> None:
    assert not any(name.startswith("layers") for name in spell(render_html(made.results(made.everything()))))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_counts_above_bars_are_short() -> None:
    numbers = (0, 7, 999, 1234, 9999, 10_000, 36_218, 121_738_198, 50_000_000, 2_000_000_000)
    assert [shorten_count(number) for number in numbers] == [
        "0", "7", "999", "1,234", "9,999", "10k", "36.2k", "121.7M", "50M", "2G",
    ]  # fmt: skip


def test_ticks_are_round_numbers() -> None:
    assert choose_ticks(0, 137, 4) == (0, 50, 100)
    assert choose_ticks(-10, 60) == (0, 20, 40, 60)
    assert choose_ticks(0, 1, 4) == (0, 0.5, 1)


def test_an_axis_of_distances_is_in_order_and_starts_and_ends_where_it_was_told() -> None:
    axis = make_distance_axis([0.25, 100.0, "inf"], 300, 20)
    places = [axis.place(value) for value in (0.0, 1.0, 2.0, 2.0001, 256.0, 300.0)]
    assert places == sorted(places, reverse=True) and places[0] == 300 and places[-1] > 20
    assert make_distance_axis([0.25], 10, 110).place(2.0) == pytest.approx(110)
