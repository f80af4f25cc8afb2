"""A plugin of pytest that notes before each fork, of any process of the run, how many threads there are.

NOTED_FORKS: the file to which it writes lines of three numbers: all threads, those of Python, and those of torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def note() -> None:
    counts = (len(os.listdir("/proc/self/task")), len(sys._current_frames()), torch.get_num_threads())
    with Path(os.environ["NOTED_FORKS"]).open("a") as file:
        file.write(f"{' '.join(map(str, counts))}\n")


os.register_at_fork(before=note)
