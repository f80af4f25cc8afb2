"""Waivers by finding or reason: what they cover; the text of a finding once, in paragraphs; never too much."""

from __future__ import annotations

from typing import Any

from fx_quant_conformance.reports.findings import LONGEST_FINDING, collect_waivers
from fx_quant_conformance.reports.html import build_report, render_html
from fx_quant_conformance.reports.results import Results
from tests.reports.pages import Page

TEXTS = {"e.md#1": "1. ELU\n\nSixteen\npieces.\n\n| a |\n|---|\n", "e.md#2": "2. Only a heading"}
CAPTION = "Accepted deviations, by finding or reason; the first to expire first"


def waived(runs: Any, made: Any, *waivers: dict[str, Any], **header: Any) -> Results:
    """A run with a claim for each of these waivers."""
    rows = [
        row
        for n, each in enumerate(waivers)
        for row in runs.refuted(f"c{n}", pattern=f"nn.Op{n}", waived=True, waiver=made.waiver | each)
    ]
    results: Results = runs.results(rows, **header)
    return results


def test_a_finding_is_one_row_and_so_is_a_reason_without_one(runs: Any, made: Any) -> None:
    named = {"reason": "by name", "findings": ["e.md#1"], "url": None}
    waivers = (
        {"max_lsb": 128.0},
        {"max_lsb": 255.0},
        {"max_lsb": None, "expires": "2026-12-31"},  # of one reason
        named,
        named | {"reason": "otherwise", "max_lsb": None, "expires": "2027-12-31"},
        {"reason": "by name", "max_lsb": "inf"},
    )
    results = waived(runs, made, *waivers, findings=TEXTS, started="2026-12-01T00:00:00+00:00")
    rows = list(collect_waivers(results).values())
    assert [(row.reasons, row.covered, row.bound, row.expires, row.days) for row in rows] == [
        (("issue 12: saturates",), 3, "255", "2026-12-31", 30),
        (("by name", "otherwise"), 2, "18", "2027-01-31", 61),
        (("by name",), 1, "inf", "2027-01-31", 61),
    ]
    assert [row.verdicts for row in rows] == [{"REFUTED": 3}, {"REFUTED": 2}, {"REFUTED": 1}]
    assert [row.what for row in rows] == ["nn.Op0, nn.Op1, nn.Op2", "nn.Op3, nn.Op4", "nn.Op5"]
    assert [row.urls for row in rows] == [(made.waiver["url"],), (), (made.waiver["url"],)]
    assert [[each.title for each in row.findings] for row in rows] == [[], ["1. ELU"], []]


def test_a_waivers_claims_are_one_group_and_the_filter_finds_them_by_the_rows_number(runs: Any, made: Any) -> None:
    report = build_report(waived(runs, made, {"max_lsb": 1.0}, {"reason": "other"}, {"max_lsb": 2.0}))
    [section] = report.others
    assert [(group.title, len(group.views)) for group in section.groups] == [("issue 12: saturates", 2), ("other", 1)]
    assert [view.waiver for view in report.views] == [1, 2, 1]


def test_a_text_stands_in_the_first_row_that_names_it(runs: Any, made: Any) -> None:
    names = (["e.md#1", "e.md#1"], ["e.md#2", "e.md#1"], ["gone.md"])
    rows = collect_waivers(waived(runs, made, *({"findings": each} for each in names), findings=TEXTS))
    found = [[(each.title, each.anchor, each.paragraphs) for each in row.findings] for row in rows.values()]
    assert len(found) == 3
    for row in (
        [("1. ELU", "finding-1", ("Sixteen pieces.", "| a |\n|---|"))],
        [("2. Only a heading", "", ()), ("1. ELU", "finding-1", ())],
        [("gone.md", "", ())],
    ):
        assert row in found


def test_texts_are_cut(runs: Any, made: Any) -> None:
    [row] = collect_waivers(waived(runs, made, {"findings": ["e"]}, findings={"e": "title\n\n" + "x" * 9000})).values()
    assert sum(map(len, row.findings[0].paragraphs)) < LONGEST_FINDING + 40


def test_the_row_of_a_waiver_has_the_text_folded_and_a_claim_leads_there(runs: Any, made: Any) -> None:
    evil = "Sums <script>saturate</script>"
    text = {"e.md#12": f"{evil}\n\nTwo products\nat {evil} most."}
    html = render_html(
        waived(runs, made, {"findings": ["e.md#12", "gone.md"]}, {"findings": ["e.md#12"]}, findings=text)
    )
    found = Page(html)
    assert [row[1] for row in found.tables[CAPTION]] == [
        "finding",
        f"{evil}Two products at {evil} most. gone.md",
        evil,
    ]
    assert '<details class="finding" id="finding-1"><summary>Sums &lt;script&gt;' in html
    assert found.links().count("#finding-1") == 1
    assert {"#waiver-1", "#waiver-2"} <= set(found.links()) and {"waiver-1", "waiver-2"} <= set(found.ids())


def test_waivers_without_findings_and_tickets_have_no_columns_for_them(runs: Any, made: Any) -> None:
    [header, _] = Page(render_html(waived(runs, made, {"url": None}))).tables[CAPTION]
    assert header == ["reason", "covers", "verdicts", "patterns and models", "up to LSB", "expires", "days left"]
