"""What rounds otherwise than declared does not pass, but where a tolerance of one step is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import Ran, run

LINEAR = "--claim=nn.Linear/static:in=quint8*/ptq/per_channel_symmetric"
SIGMOID = "--claim=nn.Sigmoid/*/ptq/*"


def ran(folder: Path, backend: str, *options: str) -> Ran:
    return run(folder, f"tests.hostile.rounding_backends:{backend}", *options)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_floor_that_is_not_declared_is_refuted(tmp_path: Path) -> None:
    found = ran(tmp_path, "FLOORS_UNLIKE_DECLARED", LINEAR)
    assert found.status == 1
    assert {claim.verdict for claim in found.results.claims} == {Verdict.REFUTED}
    assert all(
        "looks like truncation (floor); declare Capabilities.requantize" in c.reason for c in found.results.claims
    )


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_floor_that_is_declared_is_verified_and_the_report_says_so(tmp_path: Path) -> None:
    found = ran(tmp_path, "FLOORS_AS_DECLARED", LINEAR)
    assert found.status == 0, found.out
    assert found.results.header.capabilities["requantize"] == "float32, down"
    assert "<code>requantize=float32, down</code>" in (found.folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_floor_that_is_declared_of_one_op_is_verified_there_alone(tmp_path: Path) -> None:
    conv = LINEAR.replace("Linear", "Conv2d")
    found = ran(tmp_path, "FLOORS_AS_DECLARED_OF_LINEAR", LINEAR, conv)
    verdicts = {claim.pattern: claim.verdict for claim in found.results.claims}
    assert verdicts == {"nn.Linear": Verdict.VERIFIED, "nn.Conv2d": Verdict.REFUTED}
    assert found.results.header.capabilities["requantize_of"] == "nn.Linear: float32, down"


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_function_within_a_step_is_refuted_where_no_tolerance_is_declared(tmp_path: Path) -> None:
    found = ran(tmp_path, "ROUGH_SIGMOID", SIGMOID)
    [claim] = {(claim.verdict, found.status) for claim in found.results.claims}
    assert claim == (Verdict.REFUTED, 1)
    assert all("within one step, which Capabilities.tolerance does not grant" in c.reason for c in found.results.claims)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_what_is_within_a_declared_tolerance_passes_and_is_counted(tmp_path: Path) -> None:
    found = ran(tmp_path, "TOLERATED_SIGMOID", SIGMOID)
    results = found.results
    assert found.status == 0, found.out
    assert {claim.verdict for claim in results.claims} == {Verdict.TOLERATED} and not results.problems
    assert results.outcome is Outcome.PASS and f"PASS with {len(results.claims)} TOLERATED" in found.out
    assert "0 of " in found.out.rpartition("TOLERATED")[2]  # none is verified
    counted = r"[\d,]+ of [\d,]+ results beyond the nearest, as declared, the largest 0\.[5-9]\d* LSB off; "
    assert all(re.match(counted, claim.reason) for claim in results.claims), results.claims[0].reason
    assert results.header.capabilities["tolerance"] == "nn.Sigmoid: 0.95 LSB"
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "<code>tolerance=nn.Sigmoid: 0.95 LSB</code>" in page and "within the declared tolerance" in page


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_a_tolerance_covers_the_ops_that_it_names_and_one_step_alone(tmp_path: Path) -> None:
    conv = LINEAR.replace("Linear", "Conv2d")
    found = ran(tmp_path, "FLOORS_WITHIN_A_TOLERANCE", LINEAR, conv)
    verdicts = {claim.pattern: claim.verdict for claim in found.results.claims}
    assert verdicts == {"nn.Linear": Verdict.TOLERATED, "nn.Conv2d": Verdict.REFUTED}
    found = ran(tmp_path / "wrong", "WRONG_WITHIN_A_TOLERANCE", LINEAR, conv, "--profile=full")  # quick's clip it
    assert {claim.verdict for claim in found.results.claims} == {Verdict.REFUTED}
