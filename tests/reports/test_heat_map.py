"""The heat map and the list of claims, recounted from the lines of the results file by code of their own."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from reports.html import MOST_ROWS, render_html
from reports.page import anchor
from reports.results import read_results
from reports.verdicts import VERDICT_TEXTS, Verdict
from tests.reports.pages import Page

Row = dict[str, Any]
WORST_FIRST = ["CRASHED", "TIMEOUT", "REFUTED", "FALLBACK", "UNEXERCISED", "UNSHOWN", "QUALITY", "VERIFIED"]
CAPTION = "Worst verdict of each pair, and how many claims of a row or column are VERIFIED"


@pytest.fixture(params=["everything", "large"])
def path(request: Any, made: Any, runs: Any) -> Path:
    found: Path = made.path(made.everything()) if request.param == "everything" else runs.lines(runs.large())
    return found


@pytest.fixture
def claims(path: Path) -> list[Row]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((row for row in rows if row["kind"] == "claim"), key=lambda claim: str(claim["claim"]))


@pytest.fixture
def page(path: Path) -> Page:
    return Page(render_html(read_results(path)))


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
        unwaived = [claim for claim in pair if not claim["waived"] and claim["verdict"] not in ("VERIFIED", "QUALITY")]
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


def test_a_long_list_has_a_line_for_each_claim_where_there_is_no_script(runs: Any) -> None:
    rows = [row for row in runs.large(MOST_ROWS + 1) if row.get("stage", "numerics") == "numerics"]
    html = render_html(runs.results(rows))
    part = re.search(r'<noscript id="lines">(.*?)</noscript>', html, re.DOTALL)
    assert part is not None
    lines = re.findall(r"^<a (id=|href=#)(c-\w+)>(.*)</a>$", part[1], re.MULTILINE)
    claims = sorted((row for row in rows if row["kind"] == "claim"), key=lambda claim: claim["claim"])
    assert [name for _, name, _ in lines] == [anchor(claim["claim"]) for claim in claims]
    rules = {row["claim"]: row["rule"] for row in rows if row["kind"] == "check" and row["outcome"] == "fail"}
    for claim, (kind, name, text) in zip(claims, lines, strict=True):
        fields = unescape(text).split("\t")
        assert (fields[0], fields[2], fields[3]) == (claim["claim"], claim["flow"], claim["scheme"])
        assert fields[4] == ("WAIVED · " if claim["waived"] else "") + claim["verdict"]
        assert len(fields) == 12 and fields[10] == rules.get(claim["claim"], fields[10])
        assert (f'<article class="claim edge-{claim["verdict"]}" id="{name}">' in html) == (kind == "href=#")


def test_no_text_of_a_claim_ends_its_line_or_its_field(runs: Any) -> None:
    rows = [row for row in runs.large(MOST_ROWS) if row["kind"] == "claim"]
    reason = 'a\tb\nc</a></noscript><a id="x">& d'
    odd = runs.claim("odd\tname\n<b>", verdict="UNEXERCISED", reason=reason)
    html = render_html(runs.results([*rows, odd]))
    [line] = [line for line in html.splitlines() if line.startswith(f"<a id={anchor(odd['claim'])}>")]
    fields = unescape(line.partition(">")[2].removesuffix("</a>")).split("\t")
    assert len(fields) == 12
    assert (fields[0], fields[9]) == ("odd name <b>", 'a b c</a></noscript><a id="x">& d')
