"""Findings beside their waivers: the text once, in paragraphs; names where there is none; never too much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reports.against_suite import compare_with_suite
from reports.description import Opened, RunDescription
from reports.findings import LONGEST_FINDING, MOST_TEXT, lay_out_findings
from reports.html import render_html
from reports.schema import Waiver
from tests.reports.pages import Page

TEXTS = {"e.md#1": "1. ELU\n\nSixteen\npieces.\n\n| a |\n|---|\n", "e.md#2": "2. Only a heading"}


def test_a_text_stands_with_the_first_waiver_that_names_it() -> None:
    first, second, third = lay_out_findings([["e.md#1", "e.md#1"], ["e.md#2", "e.md#1"], []], TEXTS)
    assert [(each.title, each.anchor, each.paragraphs) for each in first] == [
        ("1. ELU", "finding-1", ("Sixteen pieces.", "| a |\n|---|"))
    ]
    assert [(each.title, each.anchor, each.paragraphs) for each in second] == [
        ("2. Only a heading", "", ()), ("1. ELU", "finding-1", ()),
    ]  # fmt: skip
    assert third == ()


def test_texts_are_cut_and_no_longer_shown_where_they_are_too_many() -> None:
    names = [f"e.md#{number}" for number in range(100)]
    rows = lay_out_findings([[name] for name in names], dict.fromkeys(names, "title\n\n" + "x" * 9000))
    sizes = [sum(map(len, finding.paragraphs)) for (finding,) in rows]
    assert max(sizes) < LONGEST_FINDING + 40 and MOST_TEXT * 0.9 < sum(sizes) <= MOST_TEXT
    assert rows[-1][0].title == "e.md#99" and not rows[-1][0].anchor


def test_the_row_of_a_waiver_has_the_text_folded_and_a_claim_leads_there(runs: Any, made: Any) -> None:
    evil = "Sums <script>saturate</script>"
    rows = [
        *runs.refuted("a", waived=True, waiver=made.waiver | {"findings": ["e.md#12", "gone.md"]}),
        *runs.refuted("b", waived=True, waiver=made.waiver | {"findings": ["e.md#12"], "max_lsb": 20.0}),
    ]
    html = render_html(runs.results(rows, findings={"e.md#12": f"{evil}\n\nTwo products\nat {evil} most."}))
    found = Page(html)
    table = found.tables["Accepted deviations, the first to expire first"]
    assert [row[1] for row in table] == ["finding", f"{evil}Two products at {evil} most. gone.md", evil]
    assert '<details class="finding" id="finding-1"><summary>Sums &lt;script&gt;' in html
    assert found.links().count("#finding-1") == 1
    assert {"#waiver-1", "#waiver-2"} <= set(found.links()) and {"waiver-1", "waiver-2"} <= set(found.ids())


def test_waivers_of_an_older_run_have_no_findings(runs: Any, made: Any) -> None:
    assert "findings" not in made.waiver
    found = Page(render_html(runs.results(runs.refuted(waived=True, waiver=made.waiver))))
    assert found.tables["Accepted deviations, the first to expire first"][1][1] == "-"


def test_a_text_that_is_another_here_is_said_and_not_held_against_a_certificate(runs: Any, made: Any) -> None:
    waiver = made.waiver | {"findings": ["e.md#1"]}
    waivers = {"file": "w.toml", "sha256": "ab"}
    results = runs.results(runs.refuted(waived=True, waiver=waiver), findings={"e.md#1": "a"}, waivers=waivers)
    opened = Opened(
        header=results.header, claims=[], jobs=[], waivers={"broken": Waiver(**waiver)}, allowed=[], problems=[]
    )
    said = RunDescription(
        suite_version="0.1.0", suite_commit="4fd1c0ffee" * 4, detection={}, stages=["numerics"], random=0, opened=opened
    )
    results = replace(results, header=replace(results.header, options={"backend": "qnnpack"}))

    def unchecked(texts: dict[str, str]) -> list[str]:
        there = replace(opened, header=replace(opened.header, findings=texts))
        return compare_with_suite(results, replace(said, opened=there)).unchecked

    assert unchecked({"e.md#1": "a", "e.md#2": "b"}) == []
    assert unchecked({"e.md#1": "b"}) == ["the texts of 1 finding are others here: e.md#1"]
    assert unchecked({}) == ["the texts of 1 finding are not here: e.md#1"]
