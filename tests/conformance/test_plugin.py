"""The suite as a vendor runs it: one process per run, miniature backends; exit statuses, files and rows."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.pipeline import STAGES
from reports.results import Outcome, Results, Verdict, read_results

REPO = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent / "fake_backends"
TIMINGS = ("seconds", "started", "sha256")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run left behind."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def results(self) -> Results:
        return read_results(self.folder / "results.jsonl")

    @property
    def rows(self) -> list[Row]:
        return [json.loads(line) for line in (self.folder / "results.jsonl").read_text().splitlines()]

    @property
    def said(self) -> list[str]:
        """Everything printed, without blank lines."""
        return [line for line in (self.out + self.err).splitlines() if line.strip()]


def clean_environment() -> dict[str, str]:
    """The environment without what the outer pytest left in it; the suite and the backends can be imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES)])}


def run(
    folder: Path,
    backend: str | None,
    *options: str,
    path: str = str(REPO / "conformance"),
    cwd: Path = FAKES,
    **variables: str,
) -> Ran:
    """Run the suite as a command, with its report folder (and its working files) under ``folder``."""
    environment = clean_environment() | variables
    report_dir = folder / "report"
    chosen = [f"--backend={backend}"] if backend else []
    command = [sys.executable, "-m", "pytest", path, "-p", "no:cacheprovider", f"--report-dir={report_dir}"]
    done = subprocess.run(
        [*command, *chosen, *options], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    return Ran(status=done.returncode, out=done.stdout, err=done.stderr, folder=report_dir)


def same_but_for_time(ran: Ran) -> list[str]:
    kept = [{key: value for key, value in row.items() if key not in TIMINGS} for row in ran.rows]
    return sorted(json.dumps(row, sort_keys=True) for row in kept)


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
    assert [claim.claim for claim in results.claims] == claim_ids
    assert {claim.verdict for claim in results.claims} <= {Verdict.VERIFIED, Verdict.QUALITY}
    assert [(c.claim, c.stage) for c in results.checks] == [(c, stage) for c in claim_ids for stage in STAGES]


def test_the_header_says_what_was_run(good: Ran, claim_ids: Sequence[str]) -> None:
    header = good.results.header
    assert (header.backend, header.config_name, header.representation) == ("good", "good config", "QUANTIZED")
    assert header.versions == {"good_compiler": "1.2"}
    assert header.options == {"backend": "fakes:Good", "claim": [], "max_examples": None, "strict": False}
    assert header.claims == header.claims_in_config == len(claim_ids) and header.pairs == 1


def test_report_and_summary_are_written(good: Ran) -> None:
    assert (good.folder / "report.html").stat().st_size > 1000
    assert "good: PASS" in good.out and str(good.folder / "report.html") in good.out


def test_junit_has_claim_rule_and_verdict(good: Ran, claim_ids: Sequence[str]) -> None:
    found = ElementTree.parse(good.folder.parent / "junit.xml").iter("property")
    properties = [(item.get("name"), item.get("value")) for item in found]
    assert [value for name, value in properties if name == "claim"] == [c for c in claim_ids for _ in STAGES]
    assert {value for name, value in properties if name == "verdict"} <= set(Verdict)
    assert sum(name == "rule" for name, _ in properties) == len(claim_ids) * len(STAGES)


def test_list_claims_prints_ids_and_nothing_else(tmp_path: Path, claim_ids: Sequence[str]) -> None:
    ran = run(tmp_path, "fakes:Good", "--list-claims", "--claim=*per_channel*")
    assert ran.status == 0 and not ran.folder.exists()
    assert ran.said == [claim for claim in claim_ids if "per_channel" in claim]
    assert len(set(claim_ids)) == len(claim_ids) >= 2


@pytest.mark.parametrize(
    "options", [["-n2"], ["-n2", "--import-mode=importlib"], ["-p", "no:xdist", "-p", "no:terminal"]], ids=" ".join
)
def test_other_processes_import_modes_and_folders_leave_the_same_rows(
    tmp_path: Path, good: Ran, options: list[str]
) -> None:
    ran = run(tmp_path, "fakes:Good", *options, cwd=Path("/"))
    assert ran.status == 0, ran.out + ran.err
    assert same_but_for_time(ran) == same_but_for_time(good)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "my_npu.py").write_text("from fakes import Good as Npu\n")
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("raise ImportError('the wrong package')\n")
    executable = Path(sys.executable).parent / "pytest"
    arguments = [
        str(REPO / "conformance"),
        "--backend=my_npu:Npu",
        "-n2",
        f"--report-dir={tmp_path / 'report'}",
    ]
    done = subprocess.run(
        [executable, "-p", "no:cacheprovider", *arguments],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_repro_command_runs_that_claim(tmp_path: Path, good: Ran) -> None:
    claim = good.results.claims[1]
    program, path, *options = shlex.split(claim.repro)
    assert (program, path) == ("pytest", "conformance")
    ran = run(tmp_path, None, *options, path=path, cwd=REPO)
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


def test_option_values_are_checked(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", "--max-examples=0")
    assert ran.status == 4
    assert "argument --max-examples: expected a positive integer, found '0'" in ran.err


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_an_unavailable_backend_is_skipped_with_its_reason(tmp_path: Path, workers: str) -> None:
    ran = run(tmp_path, "fakes:Unavailable", workers)
    assert ran.status == 5
    assert ran.said == ["backend unavailable skipped: no NPU found"]
    assert not ran.folder.exists()


def test_a_lowering_that_raises_is_refuted(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:LowerRaises", "-n2")
    assert ran.status == 1
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.REFUTED}
    assert all("no such kernel" in claim.reason for claim in ran.results.claims)
    assert ran.results.outcome is Outcome.FAIL and not ran.results.problems


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_an_interrupted_run_is_incomplete(tmp_path: Path, workers: str) -> None:
    ran = run(tmp_path, "fakes:LowerRaises", "-x", workers)
    assert ran.status != 0
    assert ran.results.outcome is Outcome.INCOMPLETE
    assert ran.results.footer is not None and ran.results.checks
    assert "INCOMPLETE" in ran.out


def test_a_claim_of_which_stages_were_deselected_is_not_judged(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", "-k", STAGES[0])
    assert ran.status == 1
    assert ran.results.outcome is Outcome.INCOMPLETE and not ran.results.claims


def test_a_run_without_claims_is_never_green(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", "-k", "no_such_claim")
    assert ran.status == 5 and "no claim was tested" in ran.out


def test_a_claim_that_kills_its_process_is_crashed_and_the_others_go_on(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:AbortsOnce", "-n2", FAKE_MARKER=str(tmp_path / "marker"))
    assert ran.status == 1
    crashed, *others = sorted(ran.results.claims, key=lambda claim: claim.verdict.rank)
    assert crashed.verdict is Verdict.CRASHED and "process died" in crashed.reason
    assert others and all(claim.green for claim in others)
    assert ran.results.outcome is Outcome.FAIL and not ran.results.problems


def test_a_crash_without_workers_leaves_an_incomplete_file(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:AbortsOnce", "-n0", FAKE_MARKER=str(tmp_path / "marker"))
    assert ran.status != 0
    assert ran.results.footer is None and ran.results.outcome is Outcome.INCOMPLETE


def test_workers_that_cannot_start_end_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:DiesInWorkers", "-n2")
    assert ran.status == 1
    assert "a worker process could not start" in ran.out and "the device is in use" in ran.out + ran.err


def test_an_old_report_does_not_outlive_a_new_run(tmp_path: Path, good: Ran) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    for name in ("results.jsonl", "report.html"):
        (folder / name).write_bytes((good.folder / name).read_bytes())
    run(tmp_path, "fakes:AbortsOnce", "-n0", FAKE_MARKER=str(tmp_path / "marker"))
    assert not (folder / "report.html").exists()
    assert read_results(folder / "results.jsonl").outcome is Outcome.INCOMPLETE


def test_collecting_writes_nothing(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", "--collect-only", "-q")
    assert ran.status == 0 and not ran.folder.exists()
    assert any(line.endswith(f"-{STAGES[0]}]") for line in ran.said)


def test_help_needs_no_backend(tmp_path: Path) -> None:
    ran = run(tmp_path, None, "--help")
    assert ran.status == 0 and "--list-claims" in ran.out


def test_without_its_own_path_the_suite_says_how_it_is_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(REPO), f"--ignore={REPO / 'tests'}"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "pytest conformance --backend=NAME" in done.stdout + done.stderr
