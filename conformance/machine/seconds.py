"""Limits of time, as a command line gives them."""

from __future__ import annotations

import argparse

LONGEST = 604_800.0
"""The longest limit, a week in seconds: timers of the system take no number at will."""


def parse_seconds(text: str) -> float:
    """Return the number of seconds of a text, above 0 and up to LONGEST. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"expected a positive number of seconds, found {text!r}; at most {LONGEST:.0f}"
        )
    return value
