"""UNSHOWN in every report: right numbers of which nothing shows that integers computed them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.certificate import CERTIFICATE
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.results import digest_ids
from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.verdicts import Outcome
from tests.support.reporting import main

ACCEPTS = {"options": {"backend": "npu", "without_execution_evidence": True}}
SILENT = {"verdict": "UNSHOWN", "execution": "none", "reason": "execution not shown: the backend does not say what ran"}
TEXT = "nothing shows that integers computed 2 of 3 claims and 1 of 1 model: they may run in float"
ACCEPTED = f"{TEXT}; the run accepts that (--without-execution-evidence)"


def rows_of(runs: Any, made: Any, *, accepted: bool) -> list[Any]:
    """Two claims and a model that nothing shows, and a claim that numbers show."""
    silent = SILENT | {"accepted": accepted}
    return [
        runs.claim("c0", execution="numbers", sureness="long sums are exact"),
        runs.claim("c1", **silent),
        runs.claim("c2", **silent),
        made.model(**silent),
    ]


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("accepted", [False, True])
def test_every_report_says_of_how_many_nothing_shows_the_execution(runs: Any, made: Any, accepted: bool) -> None:
    header = ACCEPTS if accepted else {}
    results = runs.results(rows_of(runs, made, accepted=accepted), **header)
    assert results.outcome is (Outcome.PASS if accepted else Outcome.FAIL) and not results.problems
    said, page, text = summary(results, "out.html", width=200), render_html(results), markdown(results)
    told = ACCEPTED if accepted else TEXT
    assert f"! {told}\n" in said and ("next: implement" in said) is not accepted
    block = said.partition("execution not shown, by reason:\n")[2].splitlines()
    assert block[2].split() == ["2", *SILENT["reason"].split()]
    assert "failing claims" not in said and "models that do not pass" not in said
    assert told in page and "1 shown by numbers, 2 not shown" in page and 'class="v UNSHOWN"' in page
    assert "### execution not shown, by reason" in text and told.partition(":")[0] in text


def test_a_row_cannot_accept_what_the_run_does_not(runs: Any, made: Any) -> None:
    results = runs.results(rows_of(runs, made, accepted=True))
    assert results.outcome is Outcome.FAIL
    assert "claim 'c1' is UNSHOWN and accepted; the run accepts nothing" in results.problems
    refuted = runs.results([runs.claim("c0", verdict="REFUTED", accepted=True)], **ACCEPTS)
    assert refuted.problems == ("claim 'c0' is REFUTED and accepted; the run accepts UNSHOWN only",)


def run_of(runs: Any, made: Any) -> Path:
    names = ("c0", "c1", "c2")
    header = {
        "claims_in_config": 3,
        "claims_sha256": digest_ids(names),
        "waivers": {},
        "started": "2026-11-25T03:04:05+00:00",
    } | ACCEPTS
    silent = {
        "stage": "execution",
        "verdict": "UNSHOWN",
        "outcome": "fail",
        "message": SILENT["reason"],
        "max_lsb": None,
    }
    checks = [runs.check("c0"), *(runs.check(name, **more) for name in names[1:] for more in ({}, silent))]
    path: Path = runs.lines([*checks, *rows_of(runs, made, accepted=True)], **header)
    return path


def test_a_certificate_is_refused_or_says_it_in_plain_words(runs: Any, made: Any, capsys: Any) -> None:
    path, folder = run_of(runs, made), runs.directory / "certificate"
    assert main(["certify", str(path), "-o", str(folder)]) == 1 and not folder.exists()
    assert "certify with --without-execution-evidence" in capsys.readouterr().err
    assert main(["certify", str(path), "-o", str(folder), "--without-execution-evidence"]) == 0
    assert f"WITHOUT EXECUTION EVIDENCE: {ACCEPTED}" in capsys.readouterr().out
    said = json.loads((folder / CERTIFICATE).read_text())["predicate"]
    assert said["counts"]["execution"] == {"shown by numbers": 1, "not shown": 2}
    assert said["without_execution_evidence"] == ACCEPTED
    assert main(["verify", str(folder)]) == 0
    assert f"WITHOUT EXECUTION EVIDENCE: {ACCEPTED}" in capsys.readouterr().out


def test_a_certificate_from_which_the_words_are_taken_does_not_hold(runs: Any, made: Any) -> None:
    folder = runs.directory / "certificate"
    assert main(["certify", str(run_of(runs, made)), "-o", str(folder), "--without-execution-evidence"]) == 0
    content = json.loads((folder / CERTIFICATE).read_text())
    content["predicate"]["without_execution_evidence"] = ""
    (folder / CERTIFICATE).write_text(json.dumps(content))
    assert main(["verify", str(folder)]) == 1


def test_results_from_before_say_nothing_of_it(runs: Any) -> None:
    results = runs.results([runs.claim()])
    assert results.format_execution() == "" and results.execution_counts == {}
    assert "xecution" not in summary(results, "out.html")
