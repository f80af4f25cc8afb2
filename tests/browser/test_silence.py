"""Pages load and run nothing beside themselves, whatever the text in them asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.compare import render_board
from fx_quant_conformance.reports.html import render_html

pytestmark = pytest.mark.slow

EVIL = (
    "</script><script>window.hit = 1</script></style><style>* { background: url(http://x.invalid/a) }</style>"
    "<img src=http://x.invalid/b onerror='window.hit = 1'><svg onload='window.hit = 1'></svg>"
    "<link rel=stylesheet href=http://x.invalid/c><base href=http://x.invalid/><iframe src=http://x.invalid/d></iframe>"
    "<meta http-equiv=refresh content='0; url=http://x.invalid/e'>\"' onmouseover='window.hit = 1' style='color: red'"
    " url(http://x.invalid/f) @import 'http://x.invalid/g'; --> ]]> {{ 7*7 }} `${window.hit = 1}`"
)
URLS = (
    "javascript:window.hit=1",
    " javascript:window.hit=1",
    "JaVaScRiPt:window.hit=1",
    "file:///etc/passwd",
    "data:text/html,<script>window.hit=1</script>",
    "//x.invalid/h",
    "https://x.invalid/' onmouseover='window.hit = 1",
)


def _hostile(runs: Any) -> list[dict[str, Any]]:
    """Rows with such a text wherever a text may stand."""
    check, claim = runs.refuted(EVIL)
    texts = ("attribution", "graph", "worst", "traceback", "script", EVIL)
    evidence: dict[str, Any] = dict.fromkeys(texts, EVIL)
    evidence |= {"where": dict.fromkeys(("case", "input", "change", "detail"), EVIL)}
    evidence |= {"expected": [1.5], "found": ["inf"], "float_ops": [EVIL], "qparams": {EVIL: {EVIL: EVIL}}}
    statistics = {"distances": [1, 2, 3], "sqnr_db": 40.0}
    check |= {"stage": EVIL, "rule": EVIL, "message": EVIL, "evidence": evidence, "statistics": statistics}
    claim |= dict.fromkeys(("pattern", "dtype_config", "scheme", "reason", "repro", "script"), EVIL)
    claim |= {"graphs": {EVIL: EVIL}, "decisions": [{EVIL: EVIL}]}
    waived = []
    for number, url in enumerate(URLS):
        waiver = {"reason": EVIL, "url": url, "expires": EVIL, "max_lsb": 9.0}
        waived += runs.refuted(f"{EVIL} {number}", waived=True, waiver=waiver)
    model = {
        "kind": "model",
        "model": EVIL,
        "verdict": "REFUTED",
        "waived": False,
        "reason": EVIL,
        "max_lsb": 1.0,
        "cases": 1,
        "seconds": 1.0,
        "evidence": evidence | {"node": EVIL},
        "rule": EVIL,
        "script": EVIL,
    }
    measurements = [
        {"kind": "measurement", "topic": t, "subject": EVIL, "values": {EVIL: EVIL}} for t in (EVIL, "fingerprint")
    ]
    odd = runs.claim(f"{EVIL} odd", verdict="UNEXERCISED", reason=EVIL)
    return [check, claim, *waived, odd, model, *measurements, {**measurements[0], "topic": "accuracy"}]


@pytest.fixture
def hostile(runs: Any) -> dict[str, Path]:
    texts = ("backend", "cpu", "torch", "platform", "engine", "config_name", "isa", "started")
    head: dict[str, Any] = dict.fromkeys(texts, EVIL)
    head |= {"versions": {EVIL: EVIL}, "options": {EVIL: EVIL}, "cpu_flags": [EVIL], "limits": {EVIL: {EVIL: EVIL}}}
    run = runs.results(_hostile(runs), **head)
    before = runs.results([runs.claim(EVIL)])
    pages = {"report": render_html(run, before), "scoreboard": render_board([run, before])}
    paths = {name: runs.directory / f"{name}.html" for name in pages}
    for name, path in paths.items():
        path.write_text(pages[name], encoding="utf-8")
    return paths


@pytest.mark.parametrize("name", ["report", "scoreboard"])
def test_hostile_text_stays_text_and_asks_for_nothing(opened: Any, hostile: dict[str, Path], name: str) -> None:
    page = opened(hostile[name].as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    page.locator("[data-sorts] thead button").first.click()
    page.locator("[data-filtered] thead button").first.click()
    page.fill("#filter", "<script> url(")
    page.locator("footer").scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    assert page.noted == [hostile[name].as_uri()], "one request and no complaint"
    assert page.evaluate("window.hit") is None
    assert page.locator("script").count() == page.locator("style").count() == 1
    assert page.locator("img, iframe, base, [style], meta[http-equiv=refresh], link[rel=stylesheet]").count() == 0
    handlers = "all => all.flatMap(e => e.getAttributeNames()).filter(name => name.startsWith('on'))"
    assert page.eval_on_selector_all("*", handlers) == []
    for word in ("<script>window.hit = 1</script>", "<img src=http://x.invalid/b", "url(http://x.invalid/a)"):
        assert page.locator("table", has_text=word).count()


def test_no_link_runs_or_reads_anything(opened: Any, hostile: dict[str, Path]) -> None:
    page = opened(hostile["report"].as_uri())
    links = page.eval_on_selector_all("a:not([href^='#'])", "all => all.map((a) => [a.protocol, a.host, a.rel])")
    assert {tuple(link) for link in links} == {("https:", "x.invalid", "noreferrer")}
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    for url in URLS:
        assert page.locator("#waived", has_text=url.strip()).count()


def test_the_page_lets_no_other_script_run(opened: Any, report: Path, tmp_path: Path) -> None:
    text = report.read_text(encoding="utf-8")
    added = "<p onclick='window.hit = 1' id=bait>x</p><script>window.hit = 1</script><img src='http://x.invalid/'>"
    tampered = tmp_path / "tampered.html"
    tampered.write_text(text.replace("</main>", f"{added}</main>"), encoding="utf-8")
    page = opened(tampered.as_uri())
    page.locator("#bait").click()
    assert page.evaluate("window.hit") is None
    refused = [text for text in page.noted if "Content Security Policy" in text]
    assert len(refused) == 3
    assert page.evaluate("document.images[0].naturalWidth") == 0
