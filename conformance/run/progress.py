"""The live line of a run: how much is judged, with which verdicts, and how long the rest may take.

On a terminal it is written over and over in place of pytest's dots; elsewhere (a log of CI) a line comes now and then.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from reports.text import duration
from reports.verdicts import VERDICTS, Verdict

EVERY_ON_TERMINAL, EVERY_IN_LOG = 0.2, 30.0
"""Seconds between two lines."""


def progress_line(verdicts: Counter[Verdict], done: int, total: int, seconds: float) -> str:
    """Return `120 of 404: 2 REFUTED, 118 VERIFIED; 40.0 s, about 1 min 35 s left`."""
    said = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict]) or "no verdict yet"
    left = f", about {duration(seconds / done * (total - done))} left" if done else ""
    return f"{done} of {total}: {said}; {duration(seconds)}{left}"


class Progress:
    """Writes the line through pytest's terminal reporter, when it is time."""

    def __init__(self, terminal: pytest.TerminalReporter | None) -> None:
        is_quiet = terminal is not None and terminal.verbosity < -1
        self._terminal = None if is_quiet or (terminal is not None and terminal.verbosity > 0) else terminal
        self._every = EVERY_ON_TERMINAL if terminal is not None and terminal.isatty else EVERY_IN_LOG
        self._started = self._last = time.monotonic()

    @property
    def replaces_dots(self) -> bool:
        """Whether the line stands for pytest's own marks of each test."""
        return self._terminal is not None

    def show(self, verdicts: Counter[Verdict], done: int, total: int) -> None:
        """Write the line if the last one is old enough."""
        now = time.monotonic()
        if self._terminal is None or now - self._last < self._every:
            return
        self._last = now
        line = progress_line(verdicts, done, total, now - self._started)
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.ensure_newline()
            self._terminal.write_line(line)

    def end(self) -> None:
        """Leave the line that is written over."""
        if self._terminal is not None and self._terminal.isatty:
            self._terminal.rewrite("", erase=True)
