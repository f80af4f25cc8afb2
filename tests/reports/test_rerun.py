"""Claims of a certificate that are run again: what is drawn, where they run, and how they are compared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports import rerun
from fx_quant_conformance.reports.certificate import WAIVERS, Findings
from fx_quant_conformance.reports.results import Results, ResultsError, digest_ids

NAMES = ("c0", "c1", "c2")
CHANCE = {"outcome": "fail", "verdict": "REFUTED", "evidence": {"nondeterministic": True}}


def run_of(runs: Any, *names: str, header: dict[str, Any] | None = None, c1: dict[str, Any] | None = None) -> Results:
    """A run of some of three claims, of which the second is another where a test asks."""
    rows = [
        row
        for name in names
        for row in (
            runs.check(name, **((c1 or {}).get("check", {}) if name == "c1" else {})),
            runs.claim(name, **((c1 or {}).get("claim", {}) if name == "c1" else {})),
        )
    ]
    of_all = {"claims_in_config": 3, "claims_sha256": digest_ids(NAMES), "pairs": 1}
    selected = {} if names == NAMES else {"options": {"claim": list(names)}}
    made: Results = runs.results(rows, **of_all | selected | (header or {}))
    return made


def test_the_same_again_is_nothing_to_say(runs: Any) -> None:
    assert rerun.compare_rerun(run_of(runs, *NAMES), run_of(runs, "c1", "c2")) == Findings()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            {},
            {"check": {"outcome": "fail", "verdict": "REFUTED"}, "claim": {"verdict": "REFUTED"}},
            "c1: regressed when it was run again: passed before",
        ),
        (
            {"check": {"outcome": "fail", "verdict": "REFUTED"}, "claim": {"verdict": "REFUTED", "waived": True}},
            {},
            "c1: improved when it was run again: was REFUTED",
        ),
        ({}, {"claim": {"max_lsb": 0.25}}, "c1: changed when it was run again: LSB was 0.4996, is 0.25"),
        ({"check": CHANCE, "claim": {"verdict": "REFUTED"}}, {}, "c1: improved when it was run again: was REFUTED"),
    ],
)
def test_what_a_run_gives_otherwise_does_not_hold(runs: Any, old: Any, new: Any, told: str) -> None:
    found = rerun.compare_rerun(run_of(runs, *NAMES, c1=old), run_of(runs, "c1", c1=new))
    assert (found.problems, found.doubts) == ([told], [])


def test_numbers_that_vary_by_chance_leave_a_doubt(runs: Any) -> None:
    def once(failing: int) -> dict[str, Any]:
        return {"check": CHANCE, "claim": {"verdict": "REFUTED", "failing": failing}}

    found = rerun.compare_rerun(run_of(runs, *NAMES, c1=once(2)), run_of(runs, "c1", c1=once(3)))
    assert found.problems == [] and found.doubts == ["c1: regressed when it was run again: 3 cases fail, not 2"]


def test_another_machine_leaves_a_doubt(runs: Any) -> None:
    found = rerun.compare_rerun(run_of(runs, *NAMES), run_of(runs, "c1", header={"cpu": "Other"}))
    assert found == Findings(doubts=["cpu: Some CPU @ 2.60GHz in the old run, Other in the new one"])


@pytest.mark.parametrize("claims", [("c0", "c1"), ("c0", "c1", "c2", "c3"), ("c0", "c1", "x2")])
def test_a_backend_with_other_claims_is_another_one(runs: Any, claims: tuple[str, ...]) -> None:
    """Though those that were drawn give the same."""
    here = {"claims_in_config": len(claims), "claims_sha256": digest_ids(claims)}
    found = rerun.compare_rerun(run_of(runs, *NAMES), run_of(runs, "c1", header=here))
    assert found.problems == [
        f"the backend here has {len(claims)} claims, and the certificate 3: they are not the same"
    ]


def test_claims_are_drawn_and_each_once(runs: Any) -> None:
    results = run_of(runs, *NAMES)
    assert sorted(rerun.draw(results, 99)) == list(NAMES)
    assert {tuple(rerun.draw(results, 1)) for _ in range(200)} == {("c0",), ("c1",), ("c2",)}


# -- the run ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], float]]:
    """Return what the suite is asked for, and for how many seconds, where a run of these options is run again."""

    def ask(results: Results, folder: Path) -> tuple[list[str], float]:
        asked: list[Any] = []

        def run_suite(words: list[str], work: Path, folder: Path, seconds: float) -> tuple[int, str]:
            asked.extend(([word for word in words if not word.startswith("--report-dir")], seconds))
            return 4, "ERROR: no"

        with monkeypatch.context() as patch, pytest.raises(ResultsError, match="ended with status 4: ERROR: no"):
            patch.setattr(rerun, "_run_suite", run_suite)
            rerun.rerun(results, ["c1"], folder)
        return asked[0], asked[1]

    return ask


def test_a_rerun_is_a_run_of_the_suite_by_the_options_of_the_first(
    runs: Any, asked: Callable[..., tuple[list[str], float]], tmp_path: Path
) -> None:
    given = {
        "backend": "my.npu:Npu",
        "claim_timeout": 90.0,
        "max_examples": 3,
        "isa": "avx2",
        "without_execution_evidence": True,
    }
    words, seconds = asked(run_of(runs, *NAMES, header={"options": given}), tmp_path)
    assert words == [
        "--backend=my.npu:Npu",
        "--seed=7",
        "--profile=quick",
        "--no-waivers",
        "--claim-timeout=90.0",
        "--max-examples=3",
        "--isa=avx2",
        "--without-execution-evidence",
        "--claim=c1",
    ]
    assert seconds == 300 + 2 * 90
    waived = {"waivers": {"file": "w.toml", "sha256": "ab"}, "options": {"claim_timeout": 1e9}}
    (tmp_path / WAIVERS).write_text("[]")
    words, seconds = asked(run_of(runs, *NAMES, header=waived), tmp_path)
    (file,) = (word.partition("=")[2] for word in words if word.startswith("--waivers="))
    assert not file.startswith(str(tmp_path)), "a copy, which nobody changes"
    assert seconds == 300 + 2 * 600


def test_a_claim_that_the_backend_does_not_have_does_not_hold(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: --claim 'c1' matches no claim, model or measurement; nearest: c0"
    monkeypatch.setattr(rerun, "_run_suite", lambda *given: (4, said))
    found = rerun.rerun(run_of(runs, *NAMES), ["c1"], runs.directory)
    assert found.problems == [f"the backend here does not claim what the certificate says: {said}"]


@pytest.mark.parametrize("spec", ["vectors:bundle", "command:machine.toml"])
def test_a_device_is_not_run_again_here(runs: Any, spec: str) -> None:
    results = run_of(runs, *NAMES, header={"options": {"backend": spec}})
    with pytest.raises(ResultsError, match=f"{spec} is a device, which is not here; run the suite on it, and diff"):
        rerun.rerun(results, ["c1"], runs.directory)


def test_no_folder_of_the_certificate_or_the_caller_is_on_the_path_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, certificate, own = (tmp_path / name for name in ("here", "certificate", "own"))
    for folder in (here, certificate / "in", own):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    given = ["", ".", "..", str(here), str(certificate), str(certificate / "in"), f"{own}/../certificate", str(own)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    monkeypatch.setenv("PYTHONSTARTUP", "x")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing")
    made = rerun.make_environment(Path("../certificate"))
    assert made["PYTHONPATH"] == f"{rerun.ROOT}{os.pathsep}{own}"
    assert [name for name in made if name.startswith(("PYTHON", "PYTEST_"))] == ["PYTHONPATH"]


HANGING = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it takes no interrupt, and its child holds what it prints."""
    start = subprocess.Popen

    def start_hanging(command: list[str], **given: Any) -> subprocess.Popen[bytes]:
        return start([sys.executable, "-c", HANGING, str(tmp_path / "child")], **given)

    monkeypatch.setattr(rerun, "_GRACE", 0.2)
    monkeypatch.setattr(subprocess, "Popen", start_hanging)
    with pytest.raises(ResultsError, match="the run did not end within 3 s"):
        rerun._run_suite([], tmp_path, tmp_path, 3)
    stat = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "what the run had started went on"
