"""Evidence without a table of its own as labelled facts; IDs that may break at separators; places to link to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fx_quant_conformance.reports.evidence import MOST_LISTED, format_decided, select_details
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.page import anchor
from tests.reports.pages import Page


def test_short_values_are_facts_under_labels_for_readers() -> None:
    found = select_details(
        {"change": "batch", "count": 3, "bound_lsb": 0.25, "nondeterministic": True, "cases not tried": 4, "off": False}
    )
    assert found.facts == {
        "Change": "batch",
        "Count": "3",
        "Bound of the whole model, in LSB": "0.25",
        "Varies by chance": "yes",
        "Cases not tried": "4",
    }
    assert found.folds == {}


def test_what_has_a_table_of_its_own_or_says_nothing_is_left_out() -> None:
    found = select_details({"expected": [1], "qparams": {"x": {}}, "worst": "w", "a": None, "b": "", "c": [], "d": {}})
    assert not found.facts and not found.folds


def test_lists_and_mappings_are_laid_out_entry_by_entry() -> None:
    assert select_details({"others": ["one", 2], "alone": {"conv1": "REFUTED", "n": None}}).folds == {
        "Other cases that fail (2)": "one\n2",
        "Patterns that fail alone": "conv1: REFUTED\nn: -",
    }
    [(label, text)] = select_details({"others": ["x"] * 70}).folds.items()
    assert label == "Other cases that fail (70)"
    assert text.splitlines() == [*"x" * MOST_LISTED, "… and 20 more, in results.jsonl"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two\nlines", "two\nlines"),
        ("x" * 161, "x" * 161),
        ([[1], 2], "[\n [\n  1\n ],\n 2\n]"),
        ({"a": {"b": 1}}, '{\n "a": {\n  "b": 1\n }\n}'),
    ],
)
def test_what_is_long_or_nested_is_text_as_ever(value: object, text: str) -> None:
    assert select_details({"traceback": value}).folds == {"Traceback": text}


# -- IDs and places ---------------------------------------------------------------------------------------------------


def test_an_id_may_break_behind_its_separators_and_is_copied_unchanged(runs: Any) -> None:
    name = "nn.Conv2d+F.relu/static:in=quint8,w=qint8/ptq/per_tensor<i>"
    html = render_html(runs.results(runs.refuted(name)))
    (shown,) = re.findall(r'<p class="quiet why"><code>(.*?)</code></p>', html)
    assert shown.startswith("nn.<wbr>Conv2d+<wbr>F.<wbr>relu/<wbr>static:<wbr>in=quint8,<wbr>w=qint8/<wbr>ptq/<wbr>")
    assert shown.endswith("tensor&lt;i&gt;")
    assert name in Page(html).text, "the words around a <wbr> are one word"
    (card, *_) = re.findall(r"<article.*?</article>", html, re.DOTALL)
    table = html.replace(card, "").partition('<h2 id="claims">')[2].partition("<h2")[0]
    assert name.partition("<")[0] in table and "<wbr>" not in table


def test_what_a_comment_may_point_at_has_an_id_and_a_link_to_itself(runs: Any, made: Any) -> None:
    rows = [*runs.refuted("broken", waived=True, waiver=made.waiver), made.model("model/unet/ptq")]
    found = Page(render_html(runs.results(rows)))
    links = {attrs["href"] for tag, attrs in found.tags if tag == "a" and attrs.get("class") == "here"}
    wanted = {"failures", "waivers", "models", "rules", "matrix", "waiver-1", "rule-NUM-03", anchor("model/unet/ptq")}
    assert {f"#{name}" for name in wanted} <= links
    assert {str(link).removeprefix("#") for link in links} <= set(found.ids())
    labels = [attrs.get("aria-label") for tag, attrs in found.tags if attrs.get("class") == "here"]
    assert all(labels) and len(labels) == len(set(labels)), "each says where it leads"


def test_what_of_a_model_is_decided_is_spelled_in_three_shares() -> None:
    assert format_decided({"decided": 0.125, "decided_alone": 1.0, "decided_within": 0.99996}) == "12.5% / 100% / 99.9%"
    assert format_decided({"decided": 1.0}) == "100% / - / -"
    assert format_decided({"decided_alone": 0.0}) == "- / 0% / -"
    assert format_decided({"node": "up1"}) == "-"
