"""Standalone runs: a script that a fuzz job has written is run before it is reported (script.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PATIENCE = 120.0
_ENDLESS = 124
"""Exit status that coreutils' timeout gives."""


def fails_standalone(script: str) -> bool:
    """Tell whether a script fails because of the backend; it runs in its own process and an empty folder.

    With the reference backend instead it must pass. A script that does not end fails.
    """
    control = re.sub(r"find_backend\([^()]*\)", 'find_backend("reference")', script)
    return _run(script) != 0 and (control == script or _run(control) == 0)


def _run(script: str) -> int:
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
