"""Notes before each fork of a process that has imported the judge how many threads there are (../site).

NOTED_FORKS: the file to which it writes lines of two numbers: all threads, and those of Python.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType


def note() -> None:
    counts = (len(os.listdir("/proc/self/task")), len(sys._current_frames()))
    with Path(os.environ["NOTED_FORKS"]).open("a") as file:
        file.write(f"{' '.join(map(str, counts))}\n")


def patch(judge: ModuleType) -> None:
    """Note the forks from now on."""
    os.register_at_fork(before=note)
