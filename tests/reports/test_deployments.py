"""The section of models that were handed in: what is quantized, what that costs, and what the backend adds."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.reports.html import build_report, render_html
from tests.reports.pages import Page

NAME = "model/own/nets:make/ptq"
STEM = {
    "node": "stem",
    "pattern": "nn.Conv2d",
    "dtypes": "in=quint8",
    "multiplications": 900,
    "alone_db": 41.26,
    "accumulated_db": 40.0,
    "verdict": "VERIFIED",
}
BEND = {"node": "bend", "pattern": "nn.Softsign", "reason": "no pattern of the config", "alone_db": 44.0}
LAST = {
    "node": "last",
    "pattern": "nn.Linear",
    "dtypes": "in=quint8",
    "multiplications": 100,
    "alone_db": 52.0,
    "accumulated_db": "inf",
    "verdict": "REFUTED",
}
DEPLOYMENT = {
    "qconfigs": "the model's own QConfigMapping",
    "parts": [STEM, BEND, LAST],
    "output_db": [38.04],
    "metrics": [
        {"name": "top-1", "floating": 0.75, "reference": 0.7, "backend": 0.5},
        {"name": "loss", "floating": "nan", "reference": 2},
    ],
    "seconds": {"float": 0.5, "reference": 2.0, "backend": 0.125},
    "notes": ["the error of x was not measured: it is <b>bold</b>"],
}


def render(made: Any, **changes: Any) -> Page:
    model = made.model(NAME, verdict="REFUTED", reason="last differs", deployment=DEPLOYMENT | changes)
    return Page(render_html(made.results([*made.everything(), model])))


def test_the_facts_say_how_much_is_quantized_and_how_long_it_takes(made: Any) -> None:
    page = render(made)
    assert "last differs 2 of its 3 patterns" in page.text
    assert "2 of its 3 patterns and ops are quantized, 100.0 % of its 1,000 multiply-accumulates." in page.text
    assert "Its QConfigs are the model's own QConfigMapping." in page.text
    assert "Its outputs, float to the reference model's error: 38.0 dB." in page.text
    assert "0.25 times (the backend, with the way to its process) and 4.00 times (the reference model)" in page.text
    assert "the error of x was not measured: it is <b>bold</b>" in page.text


def test_a_difference_is_divided_between_quantization_and_backend(made: Any) -> None:
    tables = render(made).tables
    [caption] = [each for each in tables if each.startswith(f"Metrics of {NAME}: what part of the difference is ")]
    header, *rows = tables[caption]
    assert header[1:] == ["float", "reference", "backend", "quantization's part", "the backend's part"]
    assert rows == [["top-1", "0.75", "0.7", "0.5", "-0.05", "-0.2"], ["loss", "nan", "2", "-", "-", "-"]]


def test_the_worst_patterns_come_first(made: Any) -> None:
    worst = f"The worst patterns of {NAME}: by verdict, then by the error that quantizing each alone adds"
    tables = render(made).tables
    assert [row[0] for row in tables[worst]] == ["node", "last", "stem"]
    assert tables[worst][1:] == [
        ["last", "nn.Linear", "in=quint8", "REFUTED", "52.0", "exact", "10.0 %"],
        ["stem", "nn.Conv2d", "in=quint8", "VERIFIED", "41.3", "40.0", "90.0 %"],
    ]
    everything = tables[f"Patterns and ops of {NAME}"]
    assert everything[2] == ["bend", "nn.Softsign", "float", "-", "44.0", "-", "-", "no pattern of the config"]


def test_the_picture_has_a_point_for_each_pattern_and_a_bar_for_each_float_op(made: Any) -> None:
    model = made.model(NAME, deployment=DEPLOYMENT)
    [view] = build_report(made.results([*made.everything(), model])).deployments
    assert view.plot is not None and [dot.verdict for dot in view.plot.dots] == ["VERIFIED", "REFUTED"]
    assert [bar.label for bar in view.plot.bars] == ["bend (nn.Softsign) runs in float: no pattern of the config"]


def test_a_model_without_parts_has_no_picture_and_a_run_without_such_models_no_section(made: Any) -> None:
    assert "Its QConfigs are" in render(made, parts=[], metrics=[]).text
    assert "Your models" not in Page(render_html(made.results(made.everything()))).text
