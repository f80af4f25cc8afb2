"""Findings beside their waivers: the text once, in paragraphs; names where there is none; never too much."""

from __future__ import annotations

from typing import Any

from reports.findings import LONGEST_FINDING, MOST_TEXT, lay_out_findings
from reports.html import render_html
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
