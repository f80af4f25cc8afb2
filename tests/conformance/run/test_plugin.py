"""The suite as a vendor runs it: one process per run, miniature backends; exit statuses, files and rows."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from backends.reference import ReferenceBackend
from conformance.machine import isa
from conformance.machine.environment import CPUINFO, read_cpu
from conformance.stages.stage import stages_of
from reports.levels import FLAGS
from reports.results import read_results
from reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, clean_environment, command, run
from tests.support.comparable import comparable
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

STAGES = stages_of(ReferenceBackend())  # it gives no Quantizer

BOTH = pytest.mark.parametrize("workers", ["-n0", "-n1"])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("good")
    return run(folder, "fakes:Good", f"--junit-xml={folder / 'junit.xml'}", "-o", "junit_family=xunit1")


@pytest.fixture(scope="module")
def claim_ids(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run(tmp_path_factory.mktemp("list"), "fakes:Good", "--list-claims").out.split()


def test_a_good_backend_passes(good: Ran, claim_ids: Sequence[str]) -> None:
    results = good.results
    assert good.status == 0, good.out
    assert results.outcome is Outcome.PASS and not results.problems
    assert [claim.claim for claim in results.claims] == sorted(claim_ids)
    assert {claim.verdict for claim in results.claims} == {Verdict.VERIFIED}
    assert [(c.claim, c.stage) for c in results.checks] == [(c, stage) for c in sorted(claim_ids) for stage in STAGES]


def test_the_header_says_what_was_run(good: Ran, claim_ids: Sequence[str]) -> None:
    header = good.results.header
    assert (header.backend, header.config_name, header.representation) == ("good", "good config", "QUANTIZED")
    assert header.versions == {"good_compiler": "1.2"}
    assert header.options == {
        "backend": "fakes:Good", "claim": [], "model": [], "claim_timeout": 60.0, "isa": None, "outputs": None,
        "max_examples": None,
        "allow_quality": False,
        "without_execution_evidence": False,
    }  # fmt: skip
    assert (header.profile, header.isolation, header.waivers) == ("quick", "fork", {})
    assert header.isa and good.results.footer and good.results.footer.peak_mib
    assert header.claims == header.claims_in_config == len(claim_ids) and header.pairs == 1


def test_report_and_summary_are_written(good: Ran) -> None:
    assert (good.folder / "report.html").stat().st_size > 1000
    assert "good: PASS" in good.out and str(good.folder / "report.html") in good.out


def test_junit_has_claim_and_verdict(good: Ran, claim_ids: Sequence[str]) -> None:
    found = ElementTree.parse(good.folder.parent / "junit.xml").iter("property")
    properties = [(item.get("name"), item.get("value")) for item in found]
    assert [value for name, value in properties if name == "claim"] == list(claim_ids)
    assert {value for name, value in properties if name == "verdict"} <= set(Verdict)


def test_list_claims_prints_ids_and_nothing_else(tmp_path: Path, claim_ids: Sequence[str]) -> None:
    ran = run(tmp_path, "fakes:Good", "--list-claims", "--claim=nn.*per_channel*")
    assert ran.status == 0 and not ran.folder.exists()
    assert ran.said == [claim for claim in claim_ids if "per_channel" in claim]
    assert len(set(claim_ids)) == len(claim_ids) >= 2


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
        "-n2",
        "--profile=quick",
        f"--report-dir={tmp_path / 'report'}",
    ]
    done = subprocess.run(
        [executable, "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_repro_command_runs_that_claim(tmp_path: Path, good: Ran) -> None:
    claim = good.results.claims[1]
    program, pyargs, path, *options = shlex.split(claim.repro)
    assert (program, pyargs, path) == ("pytest", "--pyargs", "conformance")
    ran = run(tmp_path, None, pyargs, *options, path=path, cwd=REPO)
    assert ran.status == 0, ran.out + ran.err
    assert [c.claim for c in ran.results.claims] == [claim.claim]
    assert (ran.results.header.claims, ran.results.header.claims_in_config) == (1, len(good.results.claims))


@pytest.mark.parametrize(
    ("backend", "options", "parts"),
    [
        (None, [], ["needs a backend", "--backend=NAME"]),
        ("qnpack", [], ["unknown backend 'qnpack'", "did you mean 'qnnpack'?"]),
        ("broken_import:Npu", ["-n2"], ["'broken_import' does not import: ImportError: libnpu.so"]),
        ("fakes:NotABackend", [], ["not a Backend", "class NotABackend"]),
        ("fakes:ConstructorRaises", ["-n2"], ["OSError: driver not loaded"]),
        ("fakes:ConfigRaises", [], ["good: backend_config() raised KeyError: 'linear table'"]),
        (
            "fakes:Good",
            ["--claim=nn.Linaer/*"],
            ["--claim 'nn.Linaer/*' matches no claim", "nearest: nn.Linear/"],
        ),
        ("fakes:Good", ["--report-dir=/dev/null/report"], ["--report-dir: cannot write to /dev/null/report"]),
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


@BOTH
def test_an_unavailable_backend_is_skipped_with_its_reason(tmp_path: Path, workers: str) -> None:
    ran = run(tmp_path, "fakes:Unavailable", workers)
    assert ran.status == 5
    assert ran.said == ["backend unavailable skipped: no NPU found"]
    assert not ran.folder.exists()


def test_a_lowering_that_raises_is_refuted(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:LowerRaises")
    assert ran.status == 1
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.REFUTED}
    assert all("no such kernel" in claim.reason for claim in ran.results.claims)
    assert ran.results.outcome is Outcome.FAIL and not ran.results.problems


@BOTH
def test_integers_of_any_size_are_reported(tmp_path: Path, workers: str) -> None:
    ran = run(tmp_path, "fakes:FarOff", workers)
    assert ran.status == 1 and {claim.verdict for claim in ran.results.claims} == {Verdict.REFUTED}
    found = [check.evidence["found"] for check in ran.results.checks if "found" in (check.evidence or {})]
    assert min(float(number) for numbers in found for number in numbers) < -(2**31)


@BOTH
def test_a_run_that_stops_at_the_first_failure_is_incomplete(tmp_path: Path, workers: str) -> None:
    ran = run(tmp_path, "fakes:Misbehaves", "-x", workers, "--claim=nn.*1d/*", "--claim=nn.Conv3d/*")
    assert ran.status != 0
    assert ran.results.outcome is Outcome.INCOMPLETE
    assert ran.results.footer is not None and 1 <= len(ran.results.claims) < 3
    assert "INCOMPLETE" in ran.out


CLAIMS = "nn.{op}/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"
ENDS = {
    "Linear": (Verdict.VERIFIED, ""),
    "Conv1d": (Verdict.CRASHED, "the process was killed by SIGSEGV (Segmentation fault)"),
    "Conv2d": (Verdict.TIMEOUT, "did not end within 6 s (--claim-timeout)"),
    "Conv3d": (Verdict.CRASHED, "the process was killed by SIGABRT (Aborted)"),
    "ConvTranspose1d": (Verdict.CRASHED, "the process exited with status 0"),
    "ConvTranspose2d": (Verdict.CRASHED, "the process was killed by SIGKILL (Killed, as when memory runs out)"),
}


@BOTH
def test_a_crash_or_hang_costs_its_own_claim_alone(tmp_path: Path, workers: str) -> None:
    marker = tmp_path / "process"
    ran = run(tmp_path, "fakes:Misbehaves", workers, "--claim-timeout=6", "--claim=nn.*", FAKE_MARKER=str(marker))
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


@pytest.mark.parametrize(("profile", "glob", "count"), [("quick", "nn.*", len(ENDS)), ("stress", "nn.Conv[13]d/*", 2)])
def test_no_claim_pays_for_what_another_left_behind(tmp_path: Path, profile: str, glob: str, count: int) -> None:
    ran = run(tmp_path, "fakes:OneOpPerProcess", f"--claim={glob}", f"--profile={profile}", "--max-examples=1")
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.VERIFIED}
    assert ran.status == 0 and len(ran.results.claims) == count


@BOTH
@pytest.mark.parametrize("how", ["SIGINT to all", "SIGTERM", "SIGTERM to all"])
def test_an_interrupt_ends_the_run_and_keeps_what_was_judged(tmp_path: Path, workers: str, how: str) -> None:
    """As a terminal sends SIGINT, to all processes of the command; as `kill` and a service manager send SIGTERM."""
    marker = tmp_path / "process"
    words = command(tmp_path, "fakes:Misbehaves", workers, "--claim=nn.*")
    process = subprocess.Popen(
        words, cwd=FAKES, env=clean_environment() | {"FAKE_MARKER": str(marker)}, start_new_session=True,
        stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip  # a background job of a shell ignores interrupts, and its children with it
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


@pytest.mark.parametrize(
    ("glob", "options", "status", "told"),
    [
        ("nn.Linear/*per_channel*", [], 0, "1 WAIVED"),
        ("nn.Linear/*per_channel*", ["--no-waivers"], 1, "1 REFUTED"),
        ("nn.Linear/*", ["--profile=full"], 1, "now passes; narrow the glob"),
        ("nn.Conv2d/*", [], 1, "matches no claim of the backend"),
    ],
)
def test_waivers_are_applied_and_held_to_account(
    tmp_path: Path, glob: str, options: list[str], status: int, told: str
) -> None:
    table = f'[[waiver]]\nglob = "{glob}"\nverdict = "REFUTED"\nrule = "LOW-01"\nreason = "no such kernel"\nurl = "https://a.b/1"\n'
    waivers = tmp_path / "npu.toml"
    waivers.write_text(table)
    ran = run(tmp_path, "fakes:Deviates", "--claim=nn.*", *options, FAKE_WAIVERS=str(waivers))
    assert ran.status == status and told in ran.out, ran.out
    assert ran.results.outcome is (Outcome.FAIL if status else Outcome.PASS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--waivers=none.toml"], "none.toml: cannot be read"),
        (["--waivers=x", "--no-waivers"], "--waivers and --no-waivers: give one of the two"),
        (["--claim-timeout=0"], "argument --claim-timeout: expected a positive number of seconds, found '0'"),
        (["--claim-timeout=1e300"], "argument --claim-timeout: expected a positive number of seconds, found '1e300'"),
        (["--junit-xml=/dev/null/x.xml"], "--junit-xml: /dev/null/x.xml cannot be written"),
        (["--waivers=/dev/zero"], "/dev/zero: is no regular file"),
        (["--baseline=/dev/zero"], "--baseline: /dev/zero: is no regular file"),
        (["--resume=/dev/zero"], "--resume: /dev/zero: is no regular file"),
        (["--failed-of=/dev/zero"], "--failed-of: /dev/zero: is no regular file"),
        (["--max-examples=0"], "argument --max-examples: expected a positive integer, found '0'"),
        (["--profile=slow"], "argument --profile: invalid choice: 'slow'"),
        (["--isa=mmx"], "argument --isa: invalid choice: 'mmx'"),
    ],
)
def test_option_values_are_checked(tmp_path: Path, options: list[str], message: str) -> None:
    ran = run(tmp_path, "fakes:Good", *options)
    assert ran.status == 4 and message in ran.err
    assert not ran.folder.exists()


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
    ran = run(tmp_path, "fakes:DiesInWorkers", "-n2")
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


def test_help_needs_no_backend(tmp_path: Path) -> None:
    ran = run(tmp_path, None, "--help")
    assert ran.status == 0 and "--list-claims" in ran.out


def test_without_its_own_path_the_suite_says_how_it_is_run(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-p", "no:cacheprovider", str(REPO), f"--ignore={REPO / 'tests'}")
    done = run_python(*words, cwd=tmp_path, environment=clean_environment())
    assert done.returncode != 0
    assert "pytest --pyargs conformance --backend=NAME" in done.stdout + done.stderr


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
