"""The heat map and the list of claims, recounted from the lines of the results file by code of their own."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from fx_quant_conformance.reports.html import MOST_EVIDENCE, MOST_ROWS, build_report, render_html
from fx_quant_conformance.reports.page import anchor
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS, Verdict
from tests.reports.pages import Page

Row = dict[str, Any]
WORST_FIRST = ["CRASHED", "TIMEOUT", "REFUTED", "FALLBACK", "UNEXERCISED", "UNSHOWN", "TOLERATED", "VERIFIED"]
CAPTION = "Worst verdict of each pair, and how many claims of a row or column are VERIFIED"


@pytest.fixture
def claims(rows: list[Row]) -> list[Row]:
    return sorted((row for row in rows if row["kind"] == "claim"), key=lambda claim: str(claim["claim"]))


def share(claims: list[Row]) -> str:
    return f"{sum(claim['verdict'] == 'VERIFIED' for claim in claims)}/{len(claims)}"


def test_a_cell_is_the_worst_verdict_of_its_pair_and_leads_to_its_claim(claims: list[Row], page: Page) -> None:
    pairs: dict[tuple[str, str], list[Row]] = {}
    for claim in claims:
        pairs.setdefault((claim["pattern"], claim["dtype_config"]), []).append(claim)
    cells = [attrs for tag, attrs in page.tags if tag == "a" and (attrs.get("class") or "").startswith("mark ")]
    assert len(cells) == len(pairs)
    by_link = {attrs["href"]: attrs for attrs in cells}
    for pair in pairs.values():
        unwaived = [
            claim for claim in pair if not claim["waived"] and claim["verdict"] not in ("VERIFIED", "TOLERATED")
        ]
        worst = min((claim["verdict"] for claim in pair), key=WORST_FIRST.index)
        shown = min(unwaived or pair, key=lambda claim: WORST_FIRST.index(claim["verdict"]))
        cell = by_link[f"#{anchor(shown['claim'])}"]
        waived = sum(claim["waived"] for claim in pair)
        assert cell["class"] == f"mark {worst}" + (" waived" if waived and not unwaived else "")
        counts = Counter(claim["verdict"] for claim in pair)
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in WORST_FIRST if counts[verdict])
        words += f"; {waived} claim{'s' if waived > 1 else ''} waived" if waived else ""
        assert cell["title"] == cell["aria-label"] == words


def test_cells_stand_in_the_row_and_column_of_their_pair(claims: list[Row], page: Page) -> None:
    [head, *rows, foot] = page.tables[CAPTION]
    configs = list(dict.fromkeys(claim["dtype_config"] for claim in claims))
    heads = [f"{config.replace(':', ': ').replace(',', ', ')} D{n}" for n, config in enumerate(configs, start=1)]
    assert head == ["pattern", *heads, "verified"]
    patterns = list(dict.fromkeys(claim["pattern"] for claim in claims))
    assert [row[0] for row in rows] == patterns
    for pattern, row in zip(patterns, rows, strict=True):
        for config, text in zip(configs, row[1:-1], strict=True):
            pair = [c["verdict"] for c in claims if c["pattern"] == pattern and c["dtype_config"] == config]
            assert text == (VERDICT_TEXTS[Verdict(min(pair, key=WORST_FIRST.index))].glyph if pair else "")
        assert row[-1] == share([claim for claim in claims if claim["pattern"] == pattern])
    by_config = [share([claim for claim in claims if claim["dtype_config"] == config]) for config in configs]
    assert foot == ["verified", *by_config, share(claims)]


def test_a_crash_that_is_waived_does_not_hide_a_fault_that_is_not(runs: Any) -> None:
    rows = [*runs.refuted("open"), runs.claim("known", verdict="CRASHED", waived=True)]
    page = Page(render_html(runs.results(rows)))
    [cell] = [attrs for tag, attrs in page.tags if tag == "a" and (attrs.get("class") or "").startswith("mark ")]
    assert (cell["class"], cell["href"]) == ("mark CRASHED", f"#{anchor('open')}")
    assert cell["title"] == "1 CRASHED, 1 REFUTED; 1 claim waived"


@pytest.mark.slow
def test_a_long_list_is_a_table_where_there_is_no_script(runs: Any) -> None:
    rows = [row for row in runs.large(MOST_ROWS + 1) if row.get("stage", "numerics") == "numerics"]
    html = render_html(runs.results(rows))
    part = re.search(r'<noscript id="long">(.*?)</noscript>', html, re.DOTALL)
    assert part is not None
    table = Page(part[1]).tables["Every claim of the run; a stage has the worst outcome of its checks"]
    claims = sorted((row for row in rows if row["kind"] == "claim"), key=lambda claim: claim["claim"])
    assert [(row[0], row[2], row[3], row[4].removeprefix("WAIVED · ")) for row in table[1:]] == [
        (row["claim"], row["flow"], row["scheme"], row["verdict"]) for row in claims
    ]
    page = Page(html)
    assert {anchor(claim["claim"]) for claim in claims} <= set(page.ids())
    assert {link.removeprefix("#") for link in page.links()} <= set(page.ids())
    assert '<noscript id="long">' not in render_html(runs.results([runs.claim()]))


@pytest.mark.slow
def test_no_text_of_a_claim_ends_the_list_without_a_script(runs: Any) -> None:
    rows = [row for row in runs.large(MOST_ROWS) if row["kind"] == "claim"]
    odd = runs.claim("odd\tname\n<b>", verdict="UNEXERCISED", reason='a\tb\nc</a></noscript><a id="x">& d')
    html = render_html(runs.results([*rows, odd]))
    assert html.count("</noscript>") == 1 and html.index('id="long"') < html.index(anchor(odd["claim"]) + '"><th')
    [row] = [row for row in Page(html).tables[LISTED] if row[0].startswith("odd")]
    assert row[0] == "odd name <b>" and row[-1] == 'no checksa b c</a></noscript><a id="x">& d'


LISTED = "Every claim of the run; a stage has the worst outcome of its checks"


@pytest.mark.slow
def test_evidence_is_that_of_the_first_claims_and_each_cause_has_one(runs: Any) -> None:
    """The rest is named, and is in results.jsonl."""
    names = [f"{n:04}" for n in range(MOST_EVIDENCE + 60)]
    rows = [row for name in names for row in runs.refuted(name)]
    rows += runs.refuted("zz another", rule="NUM-99")
    rows[-2] |= {"rule": "NUM-99"}
    report = build_report(runs.results(rows))
    assert report.failures.total == MOST_EVIDENCE + 61 and len(report.detailed) == MOST_EVIDENCE
    assert report.detailed == {*names[: MOST_EVIDENCE - 1], "zz another"}
    html = render_html(report.results)
    assert html.count("<article") == MOST_EVIDENCE
    assert f"61 claims more; the page has the evidence of {MOST_EVIDENCE} claims, the rest is in results.jsonl" in html
