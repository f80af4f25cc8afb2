"""Backends whose later run writes over the result of an earlier one: a result belongs to the caller. (NUM-07)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.small_bench import Altered, claim_on, small_bench
from tests.conformance.support.suite_runs import FAKES, REPO, clean_environment
from tests.hostile.test_processes import VENDORS, run_hostile
from tests.mutants.integer_kernels import IntegerBackend
from tests.mutants.reference_run_faults import keep_in_turn
from tests.support.warm_python import run_python

pytestmark = pytest.mark.rule("NUM-07")


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_result_that_the_next_runs_overwrite_is_refuted(buffers: int) -> None:
    """Each number is right when it is returned."""

    def lower(model: Any, example: Any) -> Any:
        return keep_in_turn(IntegerBackend().lower(model, example), buffers)

    messages = run_claim(small_bench(Altered(lower=lower)), claim_on("nn.Linear"))
    [check] = [each for each in messages if isinstance(each, Check) and each.stage == "numerics"]
    assert (check.verdict, check.rule) == (Verdict.REFUTED, "NUM-07"), check.message
    assert "was overwritten by the run on" in check.message and "a result belongs to the caller" in check.message
    assert "nondeterministic" not in check.evidence


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Reuses", "ReusesTwo"])
def test_so_it_is_in_a_process_of_its_own(tmp_path: Path, name: str) -> None:
    ran = run_hostile(tmp_path, f"reuses:{name}", "--claim=model/*")
    rows = ran.results.judged
    assert ran.status == 1 and len(rows) > 1
    assert {row.verdict for row in rows} == {Verdict.REFUTED}
    assert all("was overwritten by the run on" in row.reason for row in rows), [row.reason for row in rows]
    assert {check.rule for check in ran.results.checks if check.failed} == {"NUM-07"}
    script = ran.results.claims[0].script
    assert is_fault(script) and not is_fault(script.replace(f"reuses:{name}", "reference"))


def is_fault(script: str) -> bool:
    """Tell whether a script shows its fault."""
    path = os.pathsep.join([str(REPO), str(FAKES), str(VENDORS)])
    done = run_python("-c", script, cwd=VENDORS, environment=clean_environment() | {"PYTHONPATH": path})
    return done.returncode != 0
