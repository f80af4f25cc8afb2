"""The progress line of a run: how much is judged, with which verdicts, and the estimated time left.

On a terminal it is rewritten in place of pytest's dots; elsewhere (such as a CI log) a new line appears now and then.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from fx_quant_conformance.reports.text import format_duration
from fx_quant_conformance.reports.verdicts import VERDICTS, Verdict

EVERY_ON_TERMINAL, EVERY_IN_LOG = 0.2, 30.0
"""Seconds between two lines."""


def format_progress(verdicts: Counter[Verdict], done: int, total: int, seconds: float) -> str:
    """Return `120 of 404: 2 REFUTED, 118 VERIFIED; 40.0 s, about 1 min 35 s left`."""
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict])
    left = f", about {format_duration(seconds / done * (total - done))} left" if done else ""
    return f"{done} of {total}: {counts or 'no verdict yet'}; {format_duration(seconds)}{left}"


class Progress:
    """Writes the line through pytest's terminal reporter, at intervals."""

    def __init__(self, terminal: pytest.TerminalReporter | None) -> None:
        self._terminal = terminal if terminal is not None and terminal.verbosity in (-1, 0) else None
        self._every = EVERY_ON_TERMINAL if terminal is not None and terminal.isatty else EVERY_IN_LOG
        self._started = self._last = time.monotonic()

    @property
    def replaces_dots(self) -> bool:
        """Whether the line replaces pytest's mark of each test."""
        return self._terminal is not None

    def show(self, verdicts: Counter[Verdict], done: int, total: int) -> None:
        """Write the line if the last one is old enough."""
        now = time.monotonic()
        if self._terminal is None or now - self._last < self._every:
            return
        self._last = now
        line = format_progress(verdicts, done, total, now - self._started)
        if self._terminal.isatty:
            self._terminal.rewrite(line, erase=True)
        else:
            self._terminal.ensure_newline()
            self._terminal.write_line(line)

    def end(self) -> None:
        """Erase the line on a terminal."""
        if self._terminal is not None and self._terminal.isatty:
            self._terminal.rewrite("", erase=True)
