"""Runs under odd conditions: each judges everything, or is no PASS and gets no certificate."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fx_quant_conformance.reports.certificate import find_shortcomings
from fx_quant_conformance.reports.results import Results, ResultsError, read_results
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, clean_environment, command, run
from tests.hostile.test_processes import ONE, SITE, VENDORS

pytestmark = pytest.mark.slow

CLAIM = "test_claims.py::test_claim[nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A run under usual conditions: claims and models."""
    ran = run(tmp_path_factory.mktemp("whole"), "fakes:Good")
    assert ran.status == 0 and ran.results.models and not shortcomings(ran.results), ran.out
    return ran.results


def shortcomings(results: Results) -> list[str]:
    """Why the run gets no certificate, but for the state of this checkout."""
    return [reason for reason in find_shortcomings(results) if "clean checkout" not in reason]


def is_unaffected(ran: Ran, whole: Results) -> bool:
    """Tell whether a run judged all that a usual one judges; hold one that did not to show it."""
    try:
        results = read_results(ran.folder / "results.jsonl")
    except ResultsError:
        assert ran.status != 0, ran.out + ran.err
        return False
    if [row.id for row in results.judged] == [row.id for row in whole.judged]:
        passes = all(row.passes for row in results.judged)
        assert (results.outcome is Outcome.PASS, not shortcomings(results)) == (passes, passes), ran.out
        assert passes or ran.status != 0
        return True
    assert ran.status != 0 and results.outcome is not Outcome.PASS, ran.out + ran.err
    assert shortcomings(results)
    return False


LEAVING_OUT: dict[str, tuple[str, ...]] = {
    "-k": ("-k", "per_channel"),
    "--deselect": (f"--deselect={REPO / 'conformance'}/{CLAIM}", f"--deselect=conformance/{CLAIM}"),
    "-m": ("-m", "slow"),
    "--setup-plan": ("--setup-plan",),
    "python_functions": ("-o", "python_functions=test_claim"),
    "-n 1 -k": ("-n1", "-k", "not test_job"),
}


@pytest.mark.parametrize("name", LEAVING_OUT)
def test_what_pytest_is_told_to_leave_out_is_missed(tmp_path: Path, whole: Results, name: str) -> None:
    assert not is_unaffected(run(tmp_path, "fakes:Good", *LEAVING_OUT[name]), whole)


def test_options_of_the_environment_are_options(tmp_path: Path, whole: Results) -> None:
    ran = run(tmp_path, "fakes:Good", PYTEST_ADDOPTS="-k 'not test_job'")
    assert not is_unaffected(ran, whole)
    assert "left out by -k, --deselect, -m or the like; --claim selects what is run" in ran.out


def test_a_run_that_stops_early_is_incomplete(tmp_path: Path, whole: Results) -> None:
    ran = run(tmp_path, "fakes:LowerRaises", "-x")
    assert not is_unaffected(ran, whole) and ran.results.outcome is Outcome.INCOMPLETE
    assert ran.results.footer is not None and "INCOMPLETE" in ran.out


CONFTEST = """
import pytest

def pytest_collection_modifyitems(items):
    del items[1:]

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    session.exitstatus = 0
"""


@pytest.mark.parametrize("place", ["elsewhere", "above the suite"])
def test_what_lies_in_the_working_folder_is_not_read(tmp_path: Path, whole: Results, place: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -k 'not test_job'\n")
    (tmp_path / "suite").symlink_to(REPO)
    path = {"elsewhere": REPO, "above the suite": tmp_path / "suite"}[place] / "conformance"
    ran = run(tmp_path, "fakes:LowerRaises", path=str(path), cwd=tmp_path)
    assert is_unaffected(ran, whole) and ran.status == 1


def test_a_conftest_that_is_named_leaves_nothing_out_unseen(tmp_path: Path, whole: Results) -> None:
    (tmp_path / "dropping.py").write_text(CONFTEST)
    ran = run(tmp_path, "fakes:Good", "-p", "dropping", cwd=tmp_path)
    results = ran.results  # the plugin has the last word on the exit status, but none on the results
    assert results.outcome is not Outcome.PASS and shortcomings(results)


def run_anew(folder: Path, backend: str, *flags: str, handles: int | None = None, **variables: str) -> Ran:
    """Run the suite in a new interpreter, with these flags of Python's."""
    _, *words = command(folder, backend)

    def limit() -> None:
        if handles is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))

    done = subprocess.run(
        [sys.executable, *flags, *words],
        cwd=FAKES,
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=limit,
        check=False,
    )
    return Ran(status=done.returncode, out=done.stdout, err=done.stderr, folder=folder / "report")


def test_without_assertions_and_docstrings_what_is_wrong_is_found(tmp_path: Path, whole: Results) -> None:
    ran = run_anew(tmp_path, "fakes:FarOff", "-OO")
    assert is_unaffected(ran, whole) and ran.status == 1
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.REFUTED}


def test_warnings_as_errors_leave_nothing_out(tmp_path: Path, whole: Results) -> None:
    assert is_unaffected(run_anew(tmp_path, "fakes:Good", PYTHONWARNINGS="error"), whole)


@pytest.mark.parametrize(("handles", "suffice"), [(12, False), (32, True)])
def test_few_file_handles_leave_nothing_out_unseen(tmp_path: Path, whole: Results, handles: int, suffice: bool) -> None:
    """They suffice, or the run does not come to results."""
    assert is_unaffected(run_anew(tmp_path, "fakes:Good", handles=handles), whole) is suffice


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_no_process_has_threads_of_torch_when_it_forks(tmp_path: Path, workers: str) -> None:
    """What is forked from one that has would wait for its threads for ever. (OpenBLAS ends its own in a fork.)

    Processes are forked for the guards too: at the least there are a worker, its guard and a judge.
    """
    notes = tmp_path / "notes"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES), str(VENDORS), str(SITE)]),
        "NOTED_FORKS": str(notes),
        "JUDGE_PATCH": "noted_forks",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "2",
    }
    _, *words = command(tmp_path, "reference", workers, ONE)
    done = subprocess.run(
        [sys.executable, *words],
        env=clean_environment() | variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # nothing shows the execution
    forks = [tuple(map(int, line.split())) for line in notes.read_text().splitlines()]
    assert len(forks) >= 3 and {count - of_python for count, of_python in forks} == {0}
