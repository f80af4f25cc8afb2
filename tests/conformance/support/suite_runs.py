"""Runs of the suite for the tests: its options as data, and the suite as a command in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.reports.results import Results, read_results
from tests.support.warm_python import run_python

REPO = Path(__file__).resolve().parents[3]
FAKES = Path(__file__).resolve().parent / "fake_backends"
Row = dict[str, Any]
INTERNAL = "internal error of the suite"


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
    outer = ("PYTEST_", "GITHUB_STEP_SUMMARY")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    return kept | {"PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES)])}


def run(
    folder: Path,
    backend: str | None,
    *options: str,
    path: str = str(REPO / "conformance"),
    cwd: Path = FAKES,
    **variables: str,
) -> Ran:
    """Run the suite as a command, with its report folder (and its working files) under ``folder``.

    An internal error of the suite fails the test.
    """
    ran = run_with_errors(folder, backend, *options, path=path, cwd=cwd, **variables)
    results = ran.folder / "results.jsonl"
    errors = [line for line in results.read_text().splitlines() if INTERNAL in line] if results.exists() else []
    assert not errors, "\n".join(errors)
    return ran


def run_with_errors(
    folder: Path,
    backend: str | None,
    *options: str,
    path: str = str(REPO / "conformance"),
    cwd: Path = FAKES,
    **variables: str,
) -> Ran:
    """The same, where the test brings an internal error about."""
    words = command(folder, backend, *options, path=path)[1:]
    done = run_python(*words, cwd=cwd, environment=clean_environment() | variables)
    return Ran(status=done.returncode, out=done.stdout, err=done.stderr, folder=folder / "report")


def command(folder: Path, backend: str | None, *options: str, path: str = str(REPO / "conformance")) -> list[str]:
    """The words of such a command; of profile quick, where the options do not name another."""
    words = [sys.executable, "-m", "pytest", path, "-p", "no:cacheprovider", f"--report-dir={folder / 'report'}"]
    chosen = [f"--backend={backend}"] if backend else []
    return [*words, "--profile=quick", *chosen, *options]


def start(folder: Path, backend: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start such a command in a new interpreter, and go on."""
    environment = clean_environment() | variables
    words = command(folder, backend, *options)
    return subprocess.Popen(words, cwd=FAKES, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)


def kill_after_a_claim(folder: Path, backend: str, *options: str, **variables: str) -> Results:
    """Start such a command, and kill all its processes once a claim is judged; return what it has left."""
    path = folder / "report" / "results.jsonl"
    process = start(folder, backend, *options, **variables)
    ends = time.monotonic() + 60
    while not path.exists() or '"kind": "claim"' not in path.read_text():
        assert time.monotonic() < ends
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    return read_results(path)


def options(folder: Path, **changes: Any) -> Options:
    """The options of a plain run, changed where a test asks."""
    plain = Options(
        backend="fakes:Good",
        report_dir=folder,
        seed=3,
        profile="full",
        max_examples=None,
        claims=(),
        list_claims=False,
        claim_timeout=60.0,
        waivers=None,
        no_waivers=False,
        isa=None,
        shard=None,
        baseline=None,
    )
    return dataclasses.replace(plain, **changes)
