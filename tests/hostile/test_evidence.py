"""Float backends that get no certificate: what nothing shows does not pass, and lying reports are found. (LOW-04)"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.workplace import WorkResult
from fx_quant_conformance.conformance.run.judging import rows_of
from fx_quant_conformance.conformance.run.opening import open_run
from fx_quant_conformance.conformance.run.session import Run
from fx_quant_conformance.conformance.run.setup import Setup
from fx_quant_conformance.reports.results import digest_ids, read_results
from fx_quant_conformance.reports.schema import Check, ClaimResult
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.fake_backends import fakes
from tests.conformance.support.suite_runs import Ran, options, run
from tests.mutants.evidence_faults import MUTANTS
from tests.mutation.gate import Task, run_mutant
from tests.mutation.mutant import Mutant
from tests.support.reporting import main

pytestmark = pytest.mark.slow

OPTION = "--without-execution-evidence"
INTEGERS = "tests.mutants.integer_kernels:SilentIntegers"


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if "float16" not in each.name], ids=str)
def test_lying_evidence_is_found(mutant: Mutant) -> None:
    """Numbers of 16 bits are wrong whatever is reported."""
    found = run_mutant(mutant, Task(mutant=mutant.name, profile="quick"))
    assert found.units and not found.open, found.open
    assert found.failures and found.lead.verdict in (Verdict.REFUTED, Verdict.FALLBACK)
    assert found.lead.rule in mutant.rules


# -- without evidence -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("silent"), "fakes:Silent")


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("accepted"), "fakes:Silent", OPTION)


@pytest.mark.rule("LOW-04")
def test_a_float_backend_that_says_nothing_is_unshown_and_does_not_pass(silent: Ran) -> None:
    results = silent.results
    assert (silent.status, results.outcome, results.problems) == (1, Outcome.FAIL, ())
    assert {row.verdict for row in results.judged} == {Verdict.UNSHOWN}
    assert {(row.execution, row.accepted) for row in results.judged} == {("none", False)}
    assert all("it sums in floating point" in claim.sureness for claim in results.claims)
    assert len(results.models) > 1
    assert (
        "silent: FAIL because 1 claim does not show its execution and "
        f"{len(results.models)} models do not show their execution; " in silent.out
    )
    assert "! nothing shows that integers computed 1 of 1 claim" in silent.out
    assert "implement the backend's execution()" in silent.out and OPTION in silent.out
    page = (silent.folder / "report.html").read_text()
    assert "Execution not shown." in page and "they may run in float" in page


def test_the_run_may_accept_that_and_says_so_everywhere(accepted: Ran) -> None:
    results = accepted.results
    assert (accepted.status, results.outcome, results.problems) == (0, Outcome.PASS, ())
    assert {(row.verdict, row.accepted) for row in results.judged} == {(Verdict.UNSHOWN, True)}
    assert results.header.options["without_execution_evidence"] is True
    assert all(OPTION in claim.repro for claim in results.claims)
    told = f"they may run in float; the run accepts that ({OPTION})"
    assert told in accepted.out and told in (accepted.folder / "report.html").read_text()
    assert "next: implement" not in accepted.out


@pytest.mark.rule("LOW-04")
def test_floats_that_the_numbers_show_are_not_accepted(tmp_path: Path) -> None:
    """They were UNSHOWN, and so let pass."""
    ran = run(tmp_path, "fakes:SilentFloats", OPTION, "--claim=nn.Linear/*")
    [claim] = ran.results.claims
    assert (ran.status, claim.verdict) == (1, Verdict.FALLBACK)
    assert "come back wrong, as in float32" in claim.reason


@pytest.mark.parametrize(
    ("otherwise", "accepts", "passes_then"),
    [
        (Verdict.VERIFIED, True, True),
        (Verdict.VERIFIED, False, False),
        (Verdict.TOLERATED, True, True),
        (Verdict.TOLERATED, False, False),
    ],
)
def test_no_lesser_verdict_hides_behind_it(
    tmp_path: Path, otherwise: Verdict, accepts: bool, passes_then: bool
) -> None:
    chosen = options(tmp_path, without_execution_evidence=accepts)
    run = Run.of(Setup(options=chosen, text=""), open_run(chosen, fakes.Silent()).make_outline())
    claim, check = run.outline.units[-1], partial(Check, claim=run.outline.units[-1].id, rule="LOW-04", outcome="fail")
    sent = (
        check(stage="execution", verdict=Verdict.UNSHOWN),
        check(stage="numerics", verdict=otherwise, outcome="pass"),
    )
    work = WorkResult(messages=sent, ending=Ending.DONE, seconds=0.0, peak_mib=0.0, message="", text="")
    row = rows_of(run, claim, work)[-1]
    assert isinstance(row, ClaimResult) and row.verdict is Verdict.UNSHOWN
    assert row.accepted is passes_then and row.passes is passes_then


def test_an_honest_integer_machine_is_shown_by_its_numbers(tmp_path: Path) -> None:
    claims = [f"--claim={pattern}/static:in=quint8*/ptq/*" for pattern in ("nn.Linear", "nn.Conv2d+nn.ReLU", "nn.ReLU")]
    ran = run(tmp_path, INTEGERS, *claims)
    found = {claim.claim: (claim.verdict, claim.execution) for claim in ran.results.claims}
    assert len(found) == 5 and ran.status == 1
    shown = {state for name, state in found.items() if not name.startswith("nn.ReLU")}
    assert shown == {(Verdict.VERIFIED, "numbers")}
    assert {state for name, state in found.items() if name.startswith("nn.ReLU")} == {(Verdict.UNSHOWN, "none")}


# -- forged rows and certificates -------------------------------------------------------------------------------------


def test_rows_cannot_accept_for_a_run_that_does_not(tmp_path: Path, silent: Ran) -> None:
    lines = (silent.folder / "results.jsonl").read_text().splitlines()
    forged = [
        json.dumps(json.loads(line) | {"accepted": True}) if '"kind": "claim"' in line else line for line in lines
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{line}\n" for line in forged))
    problems = read_results(path).problems
    assert any("is UNSHOWN and accepted; the run accepts nothing" in problem for problem in problems)


def test_a_certificate_needs_evidence_or_says_that_there_is_none(tmp_path: Path, runs: Any) -> None:
    rows = [
        runs.check("a"),
        runs.claim("a", execution="numbers"),
        runs.check("b", verdict="UNSHOWN", outcome="fail"),
        runs.claim("b", verdict="UNSHOWN", execution="none", accepted=True),
    ]
    path = runs.lines(
        rows,
        options={"without_execution_evidence": True},
        claims_in_config=2,
        claims_sha256=digest_ids("ab"),
        started="2026-11-25T03:04:05+00:00",
    )
    assert main(["certify", str(path), "-o", str(tmp_path / "none")]) == 1 and not (tmp_path / "none").exists()
    folder = tmp_path / "certificate"
    assert main(["certify", str(path), "-o", str(folder), OPTION]) == 0
    said = json.loads((folder / "certificate.json").read_text())["predicate"]
    assert said["without_execution_evidence"].startswith("nothing shows that integers computed 1 of 2 claims")
    assert said["counts"]["execution"] == {"shown by numbers": 1, "not shown": 1}
    assert main(["verify", str(folder)]) == 0


def test_a_run_of_which_nothing_is_shown_gets_none(tmp_path: Path, accepted: Ran, capsys: Any) -> None:
    """Though it passes, by its option: nothing in it is VERIFIED."""
    assert main(["certify", str(accepted.folder / "results.jsonl"), "-o", str(tmp_path / "none"), OPTION]) == 1
    assert "no claim is VERIFIED" in capsys.readouterr().err
