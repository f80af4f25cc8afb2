"""Scripts on their own: a script that a fuzz job has written is run before anybody is told of it (scripts.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE = 120.0
_ENDLESS = 124
"""The status that coreutils' timeout gives."""


def fails_alone(script: str, spec: str) -> bool:
    """Run a script in a process of its own and an empty folder: does it fail, and only for the backend's sake?

    With the reference backend in the place of this one it must not. To run without an end is to fail.
    """
    control = script.replace(f"find_backend({spec!r})", "find_backend('reference')")
    return _status(script) != 0 and (control == script or _status(control) == 0)


def _status(script: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(script, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, str(path)]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            return _ENDLESS
    return done.returncode
