"""Completion by the shell: the commands answer argcomplete's script, and do without it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fx_quant_conformance.backends.names import list_names

ROOT = Path(__file__).resolve().parents[1]
needs_argcomplete = pytest.mark.skipif(find_spec("argcomplete") is None, reason="needs argcomplete")


def answer(tmp_path: Path, line: str, words: int, folder: Path = ROOT) -> list[str]:
    """What the shell is told of a line, whose first words are the command, by the protocol of argcomplete's script.

    `_ARGCOMPLETE` says how many words name the command, and the answer goes to a file in place of descriptor 8.
    """
    out = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": str(words),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line.encode())),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest" if line.startswith("pytest") else line.split()[2]]
    done = subprocess.run(command, env=kept | asked | {"PYTHONPATH": path}, cwd=folder, capture_output=True)
    assert out.is_file(), done.stderr.decode()[-500:]
    return sorted(word.strip() for word in out.read_text().split("\n"))


@needs_argcomplete
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python -m fx_quant_conformance report ver", ["verify"]),
        ("python -m fx_quant_conformance report render --ba", ["--baseline"]),
        ("python -m fx_quant_conformance cl", ["claims-of"]),
        ("python -m fx_quant_conformance claims-of --pa", ["--pattern"]),
        ("python -m fx_quant_conformance run --ca", ["--case-timeout"]),
    ],
)
def test_commands_and_options_are_completed(tmp_path: Path, line: str, expected: list[str]) -> None:
    assert answer(tmp_path, line, words=3, folder=tmp_path) == expected


@needs_argcomplete
@pytest.mark.slow
def test_pytest_completes_names_of_backends_for_an_option_of_the_suite(tmp_path: Path) -> None:
    assert answer(tmp_path, "pytest conformance --backend ", words=1) == list_names()


@needs_argcomplete
def test_argcompletes_script_finds_the_mark_of_the_module() -> None:
    command = [sys.executable, "-m", "argcomplete._check_module", "fx_quant_conformance"]
    subprocess.run(command, check=True, cwd=ROOT)


@pytest.mark.slow
def test_without_argcomplete_a_command_is_as_ever(tmp_path: Path) -> None:
    """Also where the shell asks, as one does that is set up for another environment."""
    (folder := tmp_path / "modules").mkdir()
    (folder / "argcomplete.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    for asked in ({}, {"_ARGCOMPLETE": "1", "COMP_LINE": "", "COMP_POINT": "0"}):
        environment = os.environ | {"PYTHONPATH": path} | asked
        command = [sys.executable, "-m", "fx_quant_conformance", "--help"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "usage: fx-quant-conformance" in done.stdout, done.stderr
