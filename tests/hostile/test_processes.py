"""A vendor's code that ends processes, harms them or meddles with what judges it: told, never green, never a hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, run, run_with_errors
from tests.support.warm_python import NEW_CHILDREN

VENDORS = Path(__file__).resolve().parent / "vendors"
SITE = VENDORS.parent / "site"
USAGE_ERROR = 4
ONE = "--claim=nn.Linear/*/per_tensor_symmetric"


def run_hostile(folder: Path, backend: str, *options: str, **variables: str) -> Ran:
    path = os.pathsep.join([str(REPO), str(FAKES), str(VENDORS)])
    return run(folder, backend, ONE, *options, cwd=VENDORS, PYTHONPATH=path, **variables)


HARMED = {
    "segfault": "the judge's process (in fuse) was killed by SIGSEGV (Segmentation fault)",
    "hang": "the judge's process (in fuse) did not end within 4 s (--claim-timeout)",
}


def run_harmed(folder: Path, way: str, *options: str, **variables: str) -> Ran:
    """Run two claims of a right backend; the judge of one is harmed."""
    path = os.pathsep.join([str(REPO), str(FAKES), str(VENDORS), str(SITE)])
    words = ("--claim=nn.Linear/*", "--claim-timeout=4", *options)
    harm = {"JUDGE_PATCH": "harmed_judge", "HARMED_CLAIM": "per_tensor_symmetric", "HARMED_WAY": way}
    return run_with_errors(
        folder, "fakes:Good", *words, cwd=VENDORS, PYTHONPATH=path, **NEW_CHILDREN, **harm, **variables
    )


@pytest.mark.slow
@pytest.mark.parametrize(("way", "workers"), [("segfault", "-n0"), ("hang", "-n0"), ("segfault", "-n1")])
def test_a_judge_that_dies_or_hangs_costs_a_claim_and_names_the_suite(tmp_path: Path, way: str, workers: str) -> None:
    ran = run_harmed(tmp_path, way, workers)
    assert ran.status == 1 and ran.results.outcome is Outcome.FAIL, ran.said
    harmed, *others = sorted(ran.results.claims, key=lambda claim: "per_tensor_symmetric" not in claim.claim)
    assert others and {claim.verdict for claim in others} == {Verdict.VERIFIED}
    assert harmed.verdict is Verdict.UNEXERCISED
    assert harmed.reason.endswith(f": internal error of the suite: {HARMED[way]}")
    (check,) = [check for check in ran.results.checks if check.claim == harmed.claim and check.outcome == "error"]
    assert "in run_harmed" in str(check.evidence["printed"])


@pytest.mark.slow
@pytest.mark.parametrize("way", HARMED)
def test_a_claim_whose_judge_died_or_hung_is_tried_again(tmp_path: Path, way: str) -> None:
    ran = run_harmed(tmp_path, way, HARMED_ONCE=str(tmp_path / "once"))
    assert (tmp_path / "once").exists()
    assert ran.status == 0 and {claim.verdict for claim in ran.results.claims} == {Verdict.VERIFIED}, ran.said


TOLD = {"exit 0": "the process exited with status 0", "segfault": "SIGSEGV", "odd": "KeyboardInterrupt: odd"}


@pytest.mark.parametrize(
    ("place", "way"),
    [
        *(("constructor", way) for way in TOLD),
        ("unavailable_reason", "exit 0"),
        ("backend_config", "segfault"),
        ("capabilities", "odd"),
        ("versions", "exit 0"),
    ],
)
def test_a_backend_that_ends_before_the_run_is_a_usage_error(tmp_path: Path, place: str, way: str) -> None:
    ran = run_hostile(tmp_path, "ends:Ends", HOSTILE_PLACE=place, HOSTILE_WAY=way)
    assert ran.status == USAGE_ERROR, ran.said
    assert TOLD[way] in ran.err and "ends:Ends" in ran.err
    assert not (ran.folder / "results.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("place", "way"), [("constructor", "hang"), ("backend_config", "stop the parent")])
def test_a_backend_that_hangs_before_the_run_is_a_usage_error(tmp_path: Path, place: str, way: str) -> None:
    ran = run_hostile(tmp_path, "ends:Ends", "--claim-timeout=2", HOSTILE_PLACE=place, HOSTILE_WAY=way)
    assert ran.status == USAGE_ERROR, ran.said
    assert "did not answer within 2 s" in ran.err
    assert "in misbehave" in ran.err or way == "stop the parent"  # it tells where


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hang", "stop the parent", "segfault"])
def test_a_warm_up_that_does_not_return_costs_nothing_but_warmth(tmp_path: Path, way: str) -> None:
    ran = run_hostile(tmp_path, "ends:Ends", "--claim-timeout=8", HOSTILE_PLACE="warm_up", HOSTILE_WAY=way)
    assert ran.status == 0 and [claim.verdict for claim in ran.results.claims] == [Verdict.VERIFIED], ran.said
    end = "SIGSEGV" if way == "segfault" else "the process did not answer within 8 s (--claim-timeout)"
    assert f"backend ends:Ends: warm_up() did not return: {end}" in ran.out.replace("the process was killed by ", "")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "verdict"), [("exit 0", Verdict.CRASHED), ("stop the parent", Verdict.TIMEOUT)])
def test_a_backend_that_leaves_or_stops_its_parent_costs_its_claim(tmp_path: Path, way: str, verdict: Verdict) -> None:
    ran = run_hostile(tmp_path, "ends:Ends", "--claim-timeout=2", HOSTILE_PLACE="lower", HOSTILE_WAY=way)
    assert ran.status == 1, ran.said
    (claim,) = ran.results.claims
    assert claim.verdict is verdict and ran.results.outcome is Outcome.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("place", ["constructor", "lower"])
def test_a_backend_that_kills_its_parent_harms_no_process_of_the_suite(tmp_path: Path, place: str) -> None:
    """What it kills has imported it: the run goes on with a new one, or says that there is none."""
    way = {"HOSTILE_PLACE": place, "HOSTILE_WAY": "kill the parent"}
    ran = run_hostile(tmp_path, "ends:Ends", "--claim-timeout=5", **way)
    assert ran.status in (0, 1, USAGE_ERROR), ran.said
    if ran.status == 0:  # it is a fault of manners only: the numbers are right
        assert place == "lower" and [claim.verdict for claim in ran.results.claims] == [Verdict.VERIFIED]
    elif ran.status == 1:
        assert ran.results.outcome is Outcome.FAIL


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["ends:LeavesWithZero", "meddlers:PatchesJudge", "meddlers:PatchesWriter", "meddlers:WalksStack"]
)
def test_what_runs_in_the_vendors_process_changes_no_verdict(tmp_path: Path, backend: str) -> None:
    ran = run_hostile(tmp_path, backend)
    assert ran.status == 1, ran.said
    (claim,) = ran.results.claims
    assert claim.verdict is Verdict.REFUTED and ran.results.outcome is Outcome.FAIL
