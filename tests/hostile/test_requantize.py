"""What rounds otherwise than declared does not pass; a function within a step passes where that is allowed."""

from __future__ import annotations

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
@pytest.mark.parametrize(("option", "status"), (("--strict", 1), ("--allow-quality", 0)))
def test_a_function_within_a_step_passes_only_where_that_is_allowed(option: str, status: int, tmp_path: Path) -> None:
    found = ran(tmp_path, "ROUGH_SIGMOID", SIGMOID, option)
    results = found.results
    assert found.status == status, found.out
    assert {claim.verdict for claim in results.claims} == {Verdict.QUALITY}
    assert results.outcome is (Outcome.FAIL if status else Outcome.PASS) and not results.problems
    assert {claim.allowed for claim in results.claims} == {status == 0}
    assert ("ALLOWED" in found.out) is (status == 0)
