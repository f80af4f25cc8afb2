"""What rounds otherwise than declared does not pass; a function within a step passes where that is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import Ran, run

LINEAR = "--claim=nn.Linear/static:in=quint8*/ptq/per_channel_symmetric"
SIGMOID = "--claim=nn.Sigmoid/*/ptq/*"


def ran(folder: Path, backend: str, *options: str) -> Ran:
    return run(folder, f"tests.hostile.rounding_backends:{backend}", *options)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("backend", ("FLOORS", "FLOORS_UNLIKE_DECLARED"))
def test_a_floor_that_is_not_declared_is_refuted(backend: str, tmp_path: Path) -> None:
    found = ran(tmp_path, backend, LINEAR)
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
@pytest.mark.parametrize(("options", "status"), (((), 1), (("--strict",), 1), (("--allow-quality",), 0)))
def test_a_function_within_a_step_passes_only_where_that_is_allowed(
    options: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    found = ran(tmp_path, "ROUGH_SIGMOID", SIGMOID, *options)
    results = found.results
    assert found.status == status, found.out
    assert {claim.verdict for claim in results.claims} == {Verdict.QUALITY}
    assert results.outcome is (Outcome.FAIL if status else Outcome.PASS) and not results.problems
    assert {claim.allowed for claim in results.claims} == {status == 0}
    assert ("ALLOWED" in found.out) is (status == 0)


@pytest.mark.slow
def test_a_waiver_is_as_good_and_both_options_are_too_many(tmp_path: Path) -> None:
    waivers = tmp_path / "waivers.toml"
    entry = 'glob = "nn.Sigmoid/*"\nverdict = "QUALITY"\nrule = "NUM-03"\nreason = "a table"\nexpires = 2100-01-01\n'
    waivers.write_text(f"[[waiver]]\n{entry}", encoding="utf-8")
    assert ran(tmp_path, "ROUGH_SIGMOID", SIGMOID, f"--waivers={waivers}").status == 0
    both = ran(tmp_path, "ROUGH_SIGMOID", SIGMOID, "--strict", "--allow-quality")
    assert both.status == 4 and any("give one of the two" in line for line in both.said)
