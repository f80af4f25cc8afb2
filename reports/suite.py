"""Commands of the installed suite: `reports` imports none of it, and no command runs without end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from reports.codec import SchemaError, decode, loads
from reports.description import RunDescription
from reports.results import ResultsError
from reports.text import join_lines

ROOT = Path(__file__).resolve().parent.parent
LONGEST_DESCRIPTION = 300.0
"""Seconds in which the suite has to describe a run: it imports torch and the backend."""
_GRACE = 10.0
"""Seconds in which an interrupted command has to end the processes that it started."""


class SuiteError(ResultsError):
    """The installed suite gave no answer; the message says why."""


def describe(results: Path, waivers: Path | None, seconds: float = LONGEST_DESCRIPTION) -> RunDescription:
    """Return what the suite and backend here say of a run. Raises SuiteError if they do not within ``seconds``.

    ``results``: the run's results file. ``waivers``: the file of waivers that it used, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "description.json"
        given = [] if waivers is None else [f"--waivers={waivers.resolve()}"]
        words = ("-m", "conformance", "describe", f"-o{target}", *given, "--", str(results.resolve()))
        status, output = run_python(words, seconds)
        if not target.is_file():
            raise SuiteError(f"the suite did not describe the run (status {status}): {join_lines(output[-400:])}")
        try:
            said = decode(loads(target.read_text(encoding="utf-8")), {RunDescription.kind: RunDescription})
        except (ValueError, SchemaError) as error:
            raise SuiteError(f"the suite's description of the run cannot be read: {error}") from error
    assert isinstance(said, RunDescription)
    return said


def run_python(words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run ``python WORDS`` here, with the suite beside this package first; return its exit status and all it printed.

    Neither a debugger's, pytest's nor Python's variables of this environment reach it. Raises SuiteError after
    ``seconds``, when the command and all that it started have ended.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "PYTHON"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env=kept | {"PYTHONPATH": path},
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SuiteError(f"python {' '.join(words[:3])} did not end within {seconds:g} s") from None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command: it is interrupted, so that it ends what it started, and then killed with its group."""
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty, or gone
        os.killpg(process.pid, number)
