"""The types of numbers and values in a results file."""

from __future__ import annotations

from typing import Literal

Scalar = str | int | float | bool | None
"""The type of a measured value, and of a value in the decision log."""

NonFinite = Literal["inf", "-inf", "nan"]
"""Spelling of a number that JSON does not have."""

Number = float | NonFinite
"""A float64, or its spelling if it is not finite."""

BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.501, 0.51, 0.6, 1.0, 2.0, 8.0, 64.0)
"""Upper ends, in LSB, of the bins in which distances are counted; up to 0.5 a result is correctly rounded. (NUM-03)"""


def rank_number(value: Number) -> float:
    """Return a float64 by which numbers are ordered; what is no number comes first."""
    return float("-inf" if value == "nan" else value)
