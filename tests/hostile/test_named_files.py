"""Files that a user, a vendor or a device names: none hangs a run, none costs its footer, each is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fx_quant_conformance.conformance.run.device import CALLS, format_lost_calls
from fx_quant_conformance.conformance.vectors.files import LOST_CALLS
from fx_quant_conformance.reports.verdicts import Outcome
from tests.conformance.support.suite_runs import Ran, run
from tests.hostile.test_processes import ONE, run_hostile


def is_one_line(ran: Ran) -> bool:
    return len([line for line in ran.err.splitlines() if line]) == 1 and "Traceback" not in ran.out + ran.err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["waivers", "baseline", "resume", "junit-xml"])
def test_a_pipe_hangs_no_run(tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    ran = run(tmp_path, "fakes:Good", ONE, f"--{option}={tmp_path / 'pipe'}")
    assert ran.status == 4 and is_one_line(ran) and str(tmp_path / "pipe") in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_job_summary_that_is_no_file_costs_no_report(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/full") if kind == "a device" else tmp_path / "summary"
    if kind == "a pipe":
        os.mkfifo(path)
    ran = run(tmp_path, "fakes:Good", ONE, GITHUB_STEP_SUMMARY=str(path))
    assert ran.status == 0 and ran.results.outcome is Outcome.PASS and (ran.folder / "report.html").exists()
    assert f"job summary: {path} " in ran.out and "Traceback" not in ran.out + ran.err


@pytest.mark.slow
def test_files_that_cannot_be_written_cost_no_footer(tmp_path: Path) -> None:
    """As where a disk is full: the run fails, and says what is lost."""
    ran = run_hostile(tmp_path, "meddlers:TakesPlaces", HOSTILE_REPORT=str(tmp_path / "report"))
    assert ran.status == 1 and ran.results.outcome is Outcome.FAIL and "Traceback" not in ran.out + ran.err
    assert any(problem.endswith(".py cannot be written: File exists") for problem in ran.results.problems)
    assert f"! {ran.folder / 'report.html'} cannot be written: Is a directory" in ran.out


GARBAGE = ("garbage", "[]", "{}", '{"cases": 3, "code": 1}', '{"cases": [[]], "code": 1}', "[" * 100_000)


@pytest.mark.parametrize("line", [*GARBAGE, '{"cases": [], "code": []}'])
def test_a_log_of_calls_that_a_device_wrote_to_is_a_note(tmp_path: Path, line: str) -> None:
    for number, text in enumerate(('{"cases": ["a"], "code": 3}', line)):
        (tmp_path / CALLS / f"000{number}").mkdir(parents=True)
        (tmp_path / CALLS / f"000{number}" / LOST_CALLS).write_text(f"{text}\n")
    told = format_lost_calls(tmp_path)
    assert told.startswith("1 calls of the command did not end with status 0 (3), of 1 cases")
    assert f"0001/{LOST_CALLS} has a line that is no call: {line[:60]!r}" in told


def test_a_pipe_in_the_place_of_the_log_is_a_note(tmp_path: Path) -> None:
    (tmp_path / CALLS / "0000").mkdir(parents=True)
    os.mkfifo(tmp_path / CALLS / "0000" / LOST_CALLS)
    assert "is no regular file: not all calls are counted" in format_lost_calls(tmp_path)
