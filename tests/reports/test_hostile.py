"""Hostile text in every field of a results file: it is shown, and does nothing, in every output."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fx_quant_conformance.reports.compare import render_board
from fx_quant_conformance.reports.diff import compare_runs, diff_text
from fx_quant_conformance.reports.digest import verdict_line
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.verdicts import VERDICTS, Outcome
from tests.reports.pages import Page

Row = dict[str, Any]
EVIL = (
    "</script></style></title></textarea><script>alert(1)</script><img src=x onerror=alert(1)><!-- ]]> \"'` onload=x "
    "javascript:alert(1) [x](http://x.invalid/) ![](http://x.invalid/) |a|b| {{ 7*7 }} {% raw %} ${x} &lt;b&gt; "
    "\x00\x07\x1b[2J\x1b]0;t\x07 \u202e\u2066\u200f \ud800 \ufffe line\nbreak\r\ttab\n::error::x\n ##[error]x"
)
HARMLESS = "x\ny"
"""Of two lines, as EVIL: of one line it would be a fact and not a text."""
KEPT = {"kind", "verdict", "outcome", "flow", "representation", "sha256", "schema", "sqnr_db", "claim", "model"}
"""Fields that are of a closed set, or are what rows know each other by: IDs are made hostile in all rows alike."""


FREE = {"versions", "options", "waivers", "limits", "evidence", "decisions", "graphs", "detection", "values", "qparams"}
"""Mappings with keys of anybody's choice, but those that the page lays out by name."""
KNOWN = {
    "where",
    "expected",
    "found",
    "index",
    "qparams",
    "attribution",
    "traceback",
    "float_ops",
    "graph",
    "node",
    "worst",
}


def spoiled(value: Any, text: str, key: str = "") -> Any:
    """The same shape with every text, keys of free mappings too, replaced; IDs keep what tells them apart."""
    if isinstance(value, dict):
        added = text if key in FREE else ""
        return {(n if n in KNOWN else n + added): spoiled(item, text, n) for n, item in value.items()}
    if isinstance(value, list):
        return [spoiled(item, text, key) for item in value]
    if not isinstance(value, str):
        return value
    return value + text if key in ("claim", "model") else value if key in KEPT else text


@pytest.fixture
def plain(made: Any) -> list[Row]:
    rows: list[Row] = json.loads(json.dumps(made.everything()))
    return rows


def read(made: Any, rows: list[Row], text: str, **header: Any) -> Results:
    """The run with this text everywhere, read back; lone surrogates get into the file as escapes."""
    rows = [spoiled(copy.deepcopy(row), text) for row in rows]
    results: Results = made.results([rows[0] | header, *rows[1:]], problems=[text], notes=[text])
    return results


def outputs(results: Results, other: Results) -> Iterator[tuple[str, str]]:
    yield "report", render_html(results)
    yield "report with baseline", render_html(results, other)
    yield "scoreboard", render_board([results])
    yield "markdown", markdown(results, other)
    yield "terminal", summary(results, "o.html", width=120)
    yield "diff", diff_text(compare_runs(other, results), 120)


def shape(html: str) -> list[tuple[str, tuple[str, ...]]]:
    """The elements of a page with the names of their attributes, but for places where an ID may break."""
    return [(tag, tuple(sorted(attrs))) for tag, attrs in Page(html).tags if tag != "wbr"]


@pytest.mark.parametrize("kind", ["report", "report with baseline", "scoreboard"])
def test_a_page_of_hostile_text_has_the_elements_of_a_page_of_harmless_text(
    made: Any, plain: list[Row], kind: str
) -> None:
    both = [dict(outputs(read(made, plain, text), read(made, plain[:1], text)))[kind] for text in (EVIL, HARMLESS)]
    assert shape(both[0]) == shape(both[1])
    page = Page(both[0])
    addresses = [attrs[name] or "" for _, attrs in page.tags for name in ("href", "src") if name in attrs]
    assert {address for address in addresses if not re.fullmatch(r"#[\w-]+", address)} == {"data:,"}
    assert page.text.count("alert(1)") > 3, "it is said"


@pytest.mark.parametrize("kind", ["report", "scoreboard", "markdown", "terminal", "diff"])
def test_no_character_steers_what_shows_it(made: Any, plain: list[Row], kind: str) -> None:
    text = dict(outputs(read(made, plain, EVIL), read(made, plain[:1], EVIL)))[kind]
    assert {c for c in text if not c.isprintable()} <= {"\n", "\t"}
    assert "\ud800" not in text and text.encode()


COMMANDS = "::error::owned ##[error]owned ##vso[task.complete]owned"


@pytest.mark.parametrize("kind", ["markdown", "terminal", "diff"])
def test_no_line_is_a_command_to_the_service_that_shows_the_log(made: Any, plain: list[Row], kind: str) -> None:
    text = dict(outputs(read(made, plain, COMMANDS), read(made, plain[:1], COMMANDS)))[kind]
    assert "owned" in text
    assert [line for line in text.splitlines() if line.strip().startswith("::") or re.search(r"##\w*\[", line)] == []


def test_a_waivers_address_is_a_link_only_if_it_leads_to_a_page(runs: Any, made: Any) -> None:
    for url, linked in (("https://example.org/12", True), ("javascript:alert(1)", False), ("data:text/html,x", False)):
        row = runs.claim("a", verdict="REFUTED", waived=True, waiver=made.waiver | {"url": url})
        assert (url in Page(render_html(runs.results([row]))).links()) is linked


@pytest.mark.slow
def test_a_megabyte_of_text_is_cut_wherever_it_stands(made: Any, plain: list[Row]) -> None:
    results = read(made, plain, "<&" * 500_000)
    for kind, output in outputs(results, results):
        assert len(output.encode()) <= (2**20 if kind == "markdown" else 5_000_000), kind
    assert "1000000 characters" in markdown(results)


@pytest.mark.parametrize("verdict", [verdict.value for verdict in VERDICTS])
@pytest.mark.parametrize("waived", [True, False])
def test_a_row_of_any_verdict_without_anything_else_is_shown(runs: Any, verdict: str, waived: bool) -> None:
    bare = {"reason": "", "repro": "", "max_lsb": "nan", "seconds": 0, "waived": waived, "failing": None}
    results = runs.results([runs.claim("", verdict=verdict, pattern="", dtype_config="", scheme="", **bare)])
    assert all(output for _, output in outputs(results, results))


def test_a_cut_file_is_incomplete_in_every_output(made: Any, plain: list[Row]) -> None:
    path = made.path(plain)
    whole = path.read_bytes()
    for share in (0.3, 0.6, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        results = read_results(path)
        assert results.outcome is Outcome.INCOMPLETE
        for output in (render_html(results), markdown(results), verdict_line(results)):
            assert "INCOMPLETE" in output
