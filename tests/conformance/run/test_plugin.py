"""The suite as a vendor runs it: one process per run, miniature backends; exit statuses, files and rows."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.conformance.machine import isa
from fx_quant_conformance.conformance.machine.environment import CPUINFO, read_cpu
from fx_quant_conformance.conformance.stages.state import stages_of
from fx_quant_conformance.reports.levels import FLAGS
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, clean_environment, command, run
from tests.support.comparable import comparable
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("good"), "fakes:Good")


def test_a_good_backend_passes(good: Ran) -> None:
    results = good.results
    assert good.status == 0, good.out
    assert results.outcome is Outcome.PASS and not results.problems
    assert {claim.verdict for claim in results.claims} == {Verdict.VERIFIED}
    names = [claim.claim for claim in results.claims]
    assert [(c.claim, c.stage) for c in results.checks] == [(name, stage) for name in names for stage in STAGES]
    assert (good.folder / "report.html").stat().st_size > 1000
    assert "good: PASS" in good.out and str(good.folder / "report.html") in good.out


def test_the_header_says_what_was_run(good: Ran) -> None:
    header = good.results.header
    assert (header.backend, header.config_name, header.representation) == ("good", "good config", "QUANTIZED")
    assert header.versions == {"good_compiler": "1.2"}
    assert header.options == {
        "backend": "fakes:Good",
        "claim": [],
        "model": [],
        "claim_timeout": 60.0,
        "isa": None,
        "outputs": None,
        "max_examples": None,
        "without_execution_evidence": False,
    }
    assert (header.profile, header.waivers) == ("quick", {})
    assert header.isa and good.results.footer and good.results.footer.peak_mib
    assert header.claims == header.claims_in_config == len(good.results.claims) == 2 and header.pairs == 1


def test_list_claims_prints_ids_and_nothing_else(tmp_path: Path, good: Ran) -> None:
    ran = run(tmp_path, "fakes:Good", "--list-claims")
    assert ran.status == 0 and not ran.folder.exists()
    assert sorted(ran.said) == [claim.claim for claim in good.results.claims]


@pytest.mark.parametrize(
    "options", [["-n2", "--import-mode=importlib"], ["-p", "no:xdist", "-p", "no:terminal"]], ids=" ".join
)
def test_other_processes_import_modes_and_folders_leave_the_same_rows(
    tmp_path: Path, good: Ran, options: list[str]
) -> None:
    ran = run(tmp_path, "fakes:Good", *options, cwd=Path("/"))
    assert ran.status == 0, ran.out + ran.err
    assert comparable(ran.results) == comparable(good.results)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_npu.py").write_text("from fakes import Good as Npu\n")
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    executable = Path(sys.executable).parent / "pytest"
    arguments = [
        str(REPO / "conformance"),
        "--backend=my_npu:Npu",
        "--profile=quick",
        "--claim=nn.Linear/*per_tensor*",
        f"--report-dir={tmp_path / 'report'}",
    ]
    done = subprocess.run(
        [executable, "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_repro_command_runs_that_claim(tmp_path: Path, good: Ran) -> None:
    claim = good.results.claims[1]
    program, pyargs, path, *options = shlex.split(claim.repro)
    assert (program, pyargs, path) == ("pytest", "--pyargs", "fx_quant_conformance")
    ran = run(tmp_path, None, pyargs, *options, path=path, cwd=REPO)
    assert ran.status == 0, ran.out + ran.err
    assert [c.claim for c in ran.results.claims] == [claim.claim]
    assert (ran.results.header.claims, ran.results.header.claims_in_config) == (1, len(good.results.claims))


@pytest.mark.parametrize(
    ("backend", "options", "parts"),
    [
        (None, [], ["needs a backend", "--backend=NAME"]),
        ("broken_import:Npu", ["-n1"], ["'broken_import' does not import: ImportError: libnpu.so"]),
        ("fakes:Good", ["--report-dir=/dev/null/report"], ["--report-dir: cannot write to /dev/null/report"]),
        ("fakes:Good", ["--junit-xml=/dev/null/x.xml"], ["--junit-xml: /dev/null/x.xml cannot be written"]),
    ],
)
def test_usage_errors_are_one_clear_message(
    tmp_path: Path, backend: str | None, options: list[str], parts: list[str]
) -> None:
    ran = run(tmp_path, backend, *options)
    assert ran.status == 4, ran.out + ran.err
    (line,) = ran.said
    assert line.startswith("ERROR: ") and [part for part in parts if part not in line] == []
    assert not ran.folder.exists()


def test_an_unavailable_backend_is_skipped_with_its_reason(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Unavailable")
    assert ran.status == 5
    assert ran.said == ["backend unavailable skipped: no NPU found"]
    assert not ran.folder.exists()


CLAIMS = "nn.{op}/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"
ENDS = {
    "Linear": (Verdict.VERIFIED, ""),
    "Conv1d": (Verdict.CRASHED, "the process was killed by SIGSEGV (Segmentation fault)"),
    "Conv2d": (Verdict.TIMEOUT, "lower did not end within 6 s (--claim-timeout)"),
    "Conv3d": (Verdict.CRASHED, "the process was killed by SIGABRT (Aborted)"),
    "ConvTranspose1d": (Verdict.CRASHED, "the process exited with status 0"),
    "ConvTranspose2d": (Verdict.CRASHED, "the process was killed by SIGKILL (Killed, as when memory runs out)"),
}


def test_a_crash_or_hang_costs_its_own_claim_alone(tmp_path: Path) -> None:
    marker = tmp_path / "process"
    ran = run(tmp_path, "fakes:Misbehaves", "-n1", "--claim-timeout=6", "--claim=nn.*", FAKE_MARKER=str(marker))
    results = ran.results
    assert (ran.status, results.outcome, results.problems) == (1, Outcome.FAIL, ())
    assert all(": " in claim.reason for claim in results.claims if claim.verdict is not Verdict.VERIFIED), "the case"
    found = {claim.claim: (claim.verdict, claim.reason.rpartition(": ")[2]) for claim in results.claims}
    assert found == {CLAIMS.format(op=op): end for op, end in ENDS.items()}
    assert all(len(checks) == len(STAGES) for checks in results.checks_by_claim().values())
    told = {check.claim: check for check in results.checks if check.outcome == "error"}
    assert {check.stage for check in told.values()} == {"lower"}
    printed = told[CLAIMS.format(op="Conv3d")].evidence["printed"]
    assert "npu: internal compiler error" in printed and "fakes.py" in printed
    assert "in _hang" in told[CLAIMS.format(op="Conv2d")].evidence["printed"]
    assert not _runs(int(marker.read_text())), "what the backend had started went on"
    assert "largest process" in ran.out


def test_no_claim_pays_for_what_another_left_behind(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:OneOpPerProcess", "--claim=nn.Conv?d/*")
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.VERIFIED}
    assert ran.status == 0 and len(ran.results.claims) == 3


@pytest.mark.parametrize(("how", "workers"), [("SIGINT to all", "-n0"), ("SIGTERM", "-n1")])
def test_an_interrupt_ends_the_run_and_keeps_what_was_judged(tmp_path: Path, how: str, workers: str) -> None:
    """As a terminal sends SIGINT, to all processes of the command; as `kill` and a service manager send SIGTERM."""
    marker = tmp_path / "process"
    words = command(tmp_path, "fakes:Misbehaves", workers, "--claim=nn.*")
    process = subprocess.Popen(
        words,
        cwd=FAKES,
        env=clean_environment() | {"FAKE_MARKER": str(marker)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # a background job of a shell ignores interrupts, and its children with it
    _until(lambda: marker.exists() and marker.read_text() != "")
    _until(lambda: '"kind": "claim"' in (tmp_path / "report" / "results.jsonl").read_text())
    name, *to_all = how.split(maxsplit=1)
    (os.killpg if to_all else os.kill)(process.pid, signal.Signals[name])
    out, _ = process.communicate(timeout=60)
    results = read_results(tmp_path / "report" / "results.jsonl")
    assert process.returncode == 2 and results.outcome is Outcome.INCOMPLETE
    assert results.footer and results.claims
    assert "INCOMPLETE" in out and (tmp_path / "report" / "report.html").exists()
    _until(lambda: not _runs(int(marker.read_text())))


def test_a_run_is_held_to_a_level_of_instruction_sets(tmp_path: Path) -> None:
    if isa.find_own_level() not in isa.LEVELS:
        pytest.skip("this CPU has none of the levels")
    lowest, lacking = next(iter(isa.LEVELS)), [level for level in isa.LEVELS if not _has(level)]
    ran = run(tmp_path, "fakes:Good", f"--isa={lowest}", "--claim=nn.*")
    assert ran.status == 0 and ran.results.header.isa == lowest
    assert ran.out.count("test session starts") == 1 and f"--isa={lowest} " in ran.results.claims[0].repro
    for level in lacking[-1:]:
        refused = run(tmp_path, "fakes:Good", f"--isa={level}")
        assert refused.status == 4 and f"--isa={level}: this CPU lacks" in refused.err


def test_a_backend_that_cannot_start_in_a_worker_costs_its_claims(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:DiesInWorkers", "-n1", "--claim=nn.*")
    assert ran.status == 1 and ran.results.outcome is Outcome.FAIL
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.CRASHED}
    assert all("the device is in use" in claim.reason for claim in ran.results.claims)


def test_an_old_report_does_not_outlive_a_new_run(tmp_path: Path, good: Ran) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("results.jsonl", "report.html"):
        (folder / name).write_bytes((good.folder / name).read_bytes())
    ran = run(tmp_path, "fakes:Good", "-k", "no_such_claim")
    assert ran.status == 5 and "no claim was tested" in ran.out
    assert not (folder / "report.html").exists() and not (folder / "results.jsonl").read_bytes()


def test_collecting_writes_nothing(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", "--collect-only", "-q")
    assert ran.status == 0 and not ran.folder.exists()
    assert any("::test_claim[nn.Linear/" in line for line in ran.said) and "NOTSET" not in ran.out


def test_without_its_own_path_the_suite_says_how_it_is_run(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-p", "no:cacheprovider", str(REPO), f"--ignore={REPO / 'tests'}")
    done = run_python(*words, cwd=tmp_path, environment=clean_environment())
    assert done.returncode != 0
    assert "pytest --pyargs fx_quant_conformance --backend=NAME" in done.stdout + done.stderr


def _until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def _has(level: str) -> bool:
    return FLAGS[level] <= set(read_cpu(CPUINFO)[1])


def _runs(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
