"""The HTML report: complete, self-contained, failures first, and nothing a backend says becomes markup."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest

from reports.evidence import OUTPUTS_SHOWN
from reports.html import render_html
from reports.page import anchor
from reports.results import read_results
from tests.reports.pages import Page


def page(runs: Any, rows: Any, **changes: Any) -> Page:
    return Page(render_html(runs.results(rows, **changes)))


def test_the_strip_says_what_was_run(runs: Any) -> None:
    text = page(runs, [*runs.refuted(), runs.claim()]).text
    for words in (
        "FAIL qnnpack against qnnpack_config", "1 REFUTED 1 VERIFIED", "torch 2.13.0+cpu, Python 3.11.9",
        "Some CPU @ 2.60GHz", "avx2 avx512_vnni", "quick, seed 7", "took 1 min 16 s", "abababababab",
        "2 of 404 in the config", "allow_quality=true jobs=4", "qnnpack, QUANTIZED", "4fd1c0ffee4f",
    ):  # fmt: skip
        assert words in text


def test_a_failure_shows_its_evidence(runs: Any) -> None:
    text = page(runs, runs.refuted()).text
    for words in (
        "numerics · NUM-03 · fail", "largest distance 18 LSB (slack 0.5 beyond the rounding) · 24 cases",
        "the worst by 18 LSB",
        "[0, 3] 12.4996 30 +17.5004", "saturation: the accumulator is int16",
        "x int8 [4, 64], one row saturating",
        "input 0.0078125 3", "(64 values)", "%y : call_module[linear]", "Ran in float aten::addmm",
        "Decision log (1 row)", "linear true CFG-02", "pytest conformance --backend=qnnpack --claim='broken'",
    ):  # fmt: skip
        assert words in text, words


def test_evidence_of_any_shape_is_shown(runs: Any) -> None:
    evidence = {
        "expected": [1.5] * 99,
        "found": ["inf"] * 99,
        "other": {"a": [1]},
        "traceback": "Boom",
        "x": None,
    }
    check, claim = runs.refuted()
    text = page(runs, [check | {"evidence": evidence, "max_lsb": "inf", "cases": 1}, claim]).text
    assert f"first {OUTPUTS_SHOWN} of 99" in text
    assert 'Other { "a": [ 1 ] }' in text
    assert "Traceback Boom" in text
    assert "inf LSB" in text


def test_failures_come_before_everything_else_worst_first(runs: Any) -> None:
    rows = [
        runs.claim("fine"),
        *runs.refuted("wrong"),
        runs.claim("dead", verdict="CRASHED", reason="signal 11"),
    ]
    html = render_html(runs.results(rows))
    places = [html.index(f'id="{name}"') for name in (anchor("dead"), anchor("wrong"), "matrix", "unexercised")]
    assert places == sorted(places)
    assert "signal 11" in html


def test_columns_are_numbered_and_explained(runs: Any) -> None:
    rows = [runs.claim("a"), runs.claim("b", dtype_config="in=qint8[s>=2^-12]"), runs.claim("c", flow="qat")]
    found = page(runs, rows)
    assert "D1 in=quint8,w=qint8,out=quint8 D2 in=qint8[s>=2^-12]" in found.text
    assert {"D1", "D2"} <= set(found.ids())


def test_tables_have_scopes_and_captions(runs: Any) -> None:
    tags = page(runs, runs.large(60)).tags
    names = [tag for tag, _ in tags]
    assert names.count("table") == names.count("caption")
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in tags if tag == "th")


@pytest.mark.slow
def test_ids_are_unique_and_every_link_resolves(runs: Any) -> None:
    found = page(runs, runs.large())
    assert len(found.ids()) == len(set(found.ids()))
    assert {link.removeprefix("#") for link in found.links()} <= set(found.ids())
    assert {anchor(row["claim"]) for row in runs.large()} <= set(found.ids())


def test_the_anchor_is_the_digest_of_the_claim_id() -> None:
    assert anchor("é|ptq") == "c-" + hashlib.sha256("é|ptq".encode()).hexdigest()[:12]


def test_the_page_asks_for_nothing_from_outside(runs: Any) -> None:
    html = render_html(runs.results(runs.large(60)))
    assert not re.search(r"(https?:)?//[a-z]|url\(|@import", html.replace("sha256-", ""))
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


@pytest.mark.slow
def test_a_whole_config_is_a_small_page(runs: Any) -> None:
    assert len(render_html(runs.results(runs.large(404))).encode()) < 1_500_000


def test_the_page_depends_on_nothing_but_the_results(runs: Any) -> None:
    results = runs.results(runs.large(60))
    assert render_html(results) == render_html(results)


def test_nothing_from_a_backend_becomes_markup(runs: Any, made: Any) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`{{ 7*7 }}"
    check, claim = runs.refuted(evil)
    texts = {
        key: evil for key, value in claim.items() if isinstance(value, str) and key not in ("kind", "flow", "verdict")
    }
    check |= {"stage": evil, "rule": evil, "message": evil}
    check["evidence"] |= {"where": {"case": evil}, "attribution": evil, "graph": evil, evil: evil, "float_ops": [evil]}
    check["evidence"]["qparams"] = {evil: {evil: evil}}
    odd = runs.claim("u", verdict="UNEXERCISED", reason=evil)
    head = {
        "backend": evil,
        "cpu": evil,
        "versions": {evil: evil},
        "options": {evil: evil},
        "config_sha256": evil,
    }
    claim |= {"decisions": [{evil: evil}], "waived": True, "waiver": made.waiver | {"reason": evil, "url": evil}}
    others = [
        made.model(evil, reason=evil, evidence={evil: evil, "graph": evil}),
        made.measurement(evil, evil, **{evil: evil}),
    ]
    html = render_html(runs.results([check, claim | texts, odd, *others], **head))
    tags = [tag for tag, _ in Page(html).tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert "{{ 7*7 }}" in html
    assert not any(name.startswith("on") for _, attrs in Page(html).tags for name in attrs)


def test_an_incomplete_run_is_marked_so(runs: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    path.write_bytes(path.read_bytes()[:-9])
    text = Page(render_html(read_results(path))).text
    assert "INCOMPLETE qnnpack" in text
    assert "This run is incomplete." in text
    assert "no footer: the run stopped after 1 of 1 claims" in text
    assert "line 4 is cut and was left out" in text
    assert "PASS" not in text


def test_problems_are_listed(runs: Any) -> None:
    text = page(runs, [runs.claim()], claims=7).text
    assert "This results file cannot be taken as a pass. the header's claims: 7; the rows give 1" in text


def test_empty_parts_say_so(runs: Any) -> None:
    text = page(runs, [runs.claim()]).text
    assert "No claim that was judged fails." in text
    assert "Each of the selected claims was exercised." in text
    assert page(runs, []).text.startswith("FAIL: qnnpack")


def test_evidence_of_quality_and_waived_claims_is_kept(runs: Any) -> None:
    quality = runs.claim("q", verdict="QUALITY")
    shown = runs.check("q", verdict="QUALITY", outcome="pass", evidence={"attribution": "exact tie"})
    text = page(runs, [shown, quality, *runs.refuted(waived=True, reason="issue 12")]).text
    assert "Attribution exact tie" in text
    assert "WAIVED · REFUTED nn.Linear" in text
    assert "issue 12" in text


def test_a_waiver_says_why_how_long_and_how_much(runs: Any, made: Any) -> None:
    found = page(runs, runs.refuted(waived=True, waiver=made.waiver))
    told = "Waived issue 12: saturates · https://example.org/12 · until 2027-01-31 · up to 18 LSB"
    assert told in found.text and made.waiver["url"] in found.links()
    sly = made.waiver | {"url": "javascript:alert(1)", "expires": None, "max_lsb": None}
    found = page(runs, runs.refuted(waived=True, waiver=sly))
    assert "· javascript:alert(1)" in found.text and "javascript:alert(1)" not in found.links()


def test_models_are_shown_worst_first_with_their_evidence(runs: Any, made: Any) -> None:
    evidence = {"where": {"case": "batch of 2"}, "expected": [1.5], "found": [9], "node": "up1"}
    more = {"max_lsb": 7.5, "evidence": evidence, "float_db": ["inf", 31.25, "-inf"]}
    red = made.model("model/unet/ptq", verdict="REFUTED", reason="wrong in a branch", **more)
    waived = made.model("model/lstm/qat", verdict="CRASHED", waived=True, waiver=made.waiver, cases=None)
    accuracy = made.measurement("model/unet/ptq", "accuracy", top1=0.97)
    rows = [runs.header(pairs=1), runs.claim(), made.model(), waived, red, accuracy]
    found = Page(render_html(made.results(rows)))
    first = (
        "model/unet/ptq REFUTED 7.5 3 up1 -inf dB top1 0.97 wrong in a branch Evidence Case batch of 2 Outputs, as real"
    )
    order = [
        found.text.index(words) for words in (first, "model/lstm/qat WAIVED · CRASHED", "model/resnet/ptq VERIFIED")
    ]
    assert order == sorted(order)
    assert "Models 1 CRASHED, 1 REFUTED, 1 VERIFIED" in found.text
    assert "#models" in found.links() and anchor("model/unet/ptq") in found.ids()


def test_measurements_are_tables_by_topic(runs: Any, made: Any) -> None:
    rows = [
        made.measurement("b", ties="half_even"),
        made.measurement("c", "energy", runs="yes"),
        made.measurement("a", bits=31),
    ]
    found = page(runs, [runs.claim(), *rows])
    assert "Energy (1) Energy subject runs c yes" in found.text
    assert "Fingerprint (2) Fingerprint subject bits ties a 31 b half_even" in found.text
    assert "#measurements" in found.links()
    assert "#measurements" not in page(runs, [runs.claim()]).links()


def test_a_failing_claim_has_its_op_its_fingerprint_and_what_its_failing_cases_share(runs: Any, made: Any) -> None:
    check, claim = runs.refuted("broken", op="nn.Conv2d(16, 16, 7, padding=3, groups=16)(x)")
    check["evidence"] |= {"shared": ["groups > 1", "in_channels = 16"]}
    measured = made.measurement("conv2d, quint8", ties="half_up") | {"claims": ["broken", "another"]}
    text = page(runs, [check, claim, measured]).text
    assert "Op of the case shown nn.Conv2d(16, 16, 7, padding=3, groups=16)(x)" in text
    assert "All failing cases, and no other groups > 1 ; in_channels = 16" in text
    assert "Fingerprint: conv2d, quint8 How the kernels compute, measured property value ties half_up" in text
    assert "Shared" not in text, "it is not listed once more among other evidence"
    plain = page(runs, [*runs.refuted("broken"), made.measurement("conv2d, quint8", ties="half_up")]).text
    assert "Fingerprint:" not in plain and "Op of the case" not in plain and "All failing cases" not in plain


def test_notes_level_and_memory_are_shown(runs: Any, made: Any) -> None:
    waivers = {"file": "npu.toml", "sha256": "cd" * 32}
    limits = {"nn.Linear": {"bias": "True", "unbatched": "False"}}
    rows = [runs.header(isa="avx2", isolation="fork", waivers=waivers, pairs=1, limits=limits), runs.claim()]
    results = made.results(rows, notes=["nothing compared"], peak_mib=311.6)
    text = Page(render_html(results)).text
    assert "others were not tested nn.Linear : bias only True; unbatched only False" in text
    for words in ("nothing compared", "Level avx2", "file npu.toml sha256 cdcd", "took 4.0 s, at most 312 MiB"):
        assert words in text


def test_the_results_can_be_found_again_from_the_page(runs: Any) -> None:
    path = runs.lines([runs.claim()])
    digest = json.loads(path.read_text().splitlines()[-1])["sha256"]
    assert digest in Page(render_html(read_results(path))).text


def test_outputs_are_steps_only_where_a_grid_is_known(runs: Any) -> None:
    seen = {"index": [[0, 1]], "expected": [1.5], "found": [1.25]}
    fails = {"stage": "numerics", "outcome": "fail", "verdict": "REFUTED", "message": "off"}
    refuted = runs.claim(verdict="REFUTED")
    output = {"output": {"scale": 0.5, "zero_point": 0, "dtype": "quint8", "range": "0..255"}}
    for qparams, caption in (({}, "Outputs, as real numbers"), (output, "Outputs, in steps of the output's grid")):
        evidence = {**seen, "qparams": qparams} if qparams else seen
        assert caption in page(runs, [runs.check(**fails, evidence=evidence), refuted]).text
