"""``fx-quant-conformance``: one command for all others, which it does not repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fx_quant_conformance.door import NAME, USAGE, main
from tests.package.conftest import Release

DOOR = ("-m", "fx_quant_conformance")


def test_help_tells_a_run_from_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: {NAME} ")
    assert "certify run the suite on a backend, as pytest --pyargs fx_quant_conformance --backend=NAME does" in text
    assert 'is written by "report certify RESULTS.jsonl -o DIR"' in text


@pytest.mark.parametrize("words", [[], ["no_such_command"], ["--no-such-option"]])
def test_what_is_no_command_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == USAGE
    assert f"usage: {NAME}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["init", "--help"], "init [-h] NAME"),
        (["claims-of", "-h"], "claims-of [-h]"),
    ],
)
def test_commands_of_the_suite_are_spelled_as_they_are_called(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"usage: {NAME} {usage}")


def test_a_command_that_was_removed_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "results.jsonl"]) == USAGE
    advice = f"{NAME} report verify DIR --rerun=N runs N claims of a certificate again"
    assert capsys.readouterr().err == f"{NAME}: describe is gone: {advice}\n"


def test_reports_keep_their_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "certify", "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: {NAME} report certify")
    assert main(["report", "render", str(tmp_path / "none.jsonl")]) == 2


@pytest.mark.slow
def test_its_version_has_the_commit(release: Release, empty: Path) -> None:
    done = release.run(*DOOR, "--version", cwd=empty)
    assert done.stdout == f"{NAME} {release.wheel.name.split('-')[1]}, commit {release.commit}\n", done.stderr


@pytest.mark.slow
def test_init_says_what_to_type_and_that_runs(release: Release, empty: Path) -> None:
    done = release.run(*DOOR, "init", "my_npu", cwd=empty)
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("run it: cd my_npu && "))
    words = said.partition(" && ")[2].split()
    assert words == [
        "pytest",
        "--pyargs",
        "fx_quant_conformance",
        "--backend=my_npu.backend:MyNpu",
        "--without-execution-evidence",
    ]
    done = release.run("-m", *words, "--profile=quick", "-q", cwd=empty / "my_npu")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_release_certifies_and_verifies(release: Release, empty: Path) -> None:
    """Its commit is as good as that of a clean checkout; once a file of it changes, nothing is certified."""
    done = release.run(*DOOR, "certify", "--backend=fakes:Good", "--profile=quick", "-q", cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr
    results = next((empty / "build" / "conformance").glob("*/results.jsonl"))
    done = release.run(*DOOR, "report", "certify", str(results), "-o", "certificate", cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr
    stated = json.loads((empty / "certificate" / "certificate.json").read_text())["predicate"]
    assert stated["run"]["suite_commit"] == release.commit
    done = release.run(*DOOR, "report", "verify", "certificate", "--rerun=2", cwd=empty)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("certificate: holds\n")
