"""The HTML report: its links, its size, and what the golden page does not show."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from fx_quant_conformance.reports.evidence import OUTPUTS_SHOWN
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.page import anchor
from fx_quant_conformance.reports.results import read_results
from tests.reports.pages import Page


def page_of(runs: Any, rows: Any, **changes: Any) -> Page:
    return Page(render_html(runs.results(rows, **changes)))


def test_evidence_of_any_shape_is_shown(runs: Any) -> None:
    evidence = {
        "expected": [1.5] * 99,
        "found": ["inf"] * 99,
        "other": {"a": [1]},
        "traceback": "Boom",
        "x": None,
    }
    check, claim = runs.refuted()
    text = page_of(runs, [check | {"evidence": evidence, "max_lsb": "inf", "cases": 1}, claim]).text
    assert f"first {OUTPUTS_SHOWN} of 99" in text
    assert 'Other { "a": [ 1 ] }' in text
    assert "Traceback Boom" in text
    assert "inf LSB" in text


def test_tables_have_scopes_and_captions(page: Page) -> None:
    names = [tag for tag, _ in page.tags]
    assert names.count("table") == names.count("caption")
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in page.tags if tag == "th")


def test_ids_are_unique_and_every_link_resolves(rows: list[dict[str, Any]], page: Page) -> None:
    assert len(page.ids()) == len(set(page.ids()))
    assert {link.removeprefix("#") for link in page.links() if link.startswith("#")} <= set(page.ids())
    assert {anchor(row["claim"]) for row in rows if row["kind"] == "claim"} <= set(page.ids())


def test_the_anchor_is_the_digest_of_the_claim_id() -> None:
    assert anchor("é|ptq") == "c-" + hashlib.sha256("é|ptq".encode()).hexdigest()[:12]


def test_the_page_asks_for_nothing_from_outside(runs: Any) -> None:
    html = render_html(runs.results(runs.large(60)))
    assert not re.search(r"(https?:)?//[a-z]|url\(|@import", html.replace("sha256-", ""))
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


@pytest.mark.slow
def test_a_whole_config_is_a_small_page(runs: Any) -> None:
    assert len(render_html(runs.results(runs.large(404))).encode()) < 1_500_000


def test_an_incomplete_run_is_marked_so(runs: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    path.write_bytes(path.read_bytes()[:-9])
    text = Page(render_html(read_results(path))).text
    assert "INCOMPLETE qnnpack" in text
    assert "This run is incomplete." in text
    assert "no footer: the run stopped after 1 of 1 claims" in text
    assert "line 4 is cut and was left out" in text
    assert "PASS" not in text


def test_empty_parts_say_so(runs: Any) -> None:
    text = page_of(runs, [runs.claim()]).text
    assert "No claim that was judged fails." in text
    assert "Each of the selected claims was exercised." in text
    assert page_of(runs, []).text.startswith("FAIL: qnnpack")
    unruled = [runs.check(rule="", outcome="fail", verdict="REFUTED"), runs.claim(verdict="REFUTED")]
    assert "numerics · no rule · fail" in page_of(runs, unruled).text


def test_measurements_are_tables_by_topic(runs: Any, made: Any) -> None:
    rows = [
        made.measurement("b", ties="half_even"),
        made.measurement("c", "energy", runs="yes"),
        made.measurement("a", bits=31),
    ]
    found = page_of(runs, [runs.claim(), *rows])
    assert "Energy (1) Energy subject runs c yes" in found.text
    assert "Fingerprint (2) Fingerprint subject bits ties a 31 b half_even" in found.text
    assert "#measurements" in found.links()
    assert "#measurements" not in page_of(runs, [runs.claim()]).links()


def test_outputs_are_steps_only_where_a_grid_is_known(runs: Any) -> None:
    seen = {"index": [[0, 1]], "expected": [1.5], "found": [1.25]}
    fails = {"stage": "numerics", "outcome": "fail", "verdict": "REFUTED", "message": "off"}
    refuted = runs.claim(verdict="REFUTED")
    output = {"output": {"scale": 0.5, "zero_point": 0, "dtype": "quint8", "range": "0..255"}}
    for qparams, caption in (({}, "Outputs, as real numbers"), (output, "Outputs, in steps of the output's grid")):
        evidence = {**seen, "qparams": qparams} if qparams else seen
        assert caption in page_of(runs, [runs.check(**fails, evidence=evidence), refuted]).text
