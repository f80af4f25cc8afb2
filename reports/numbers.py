"""The types of numbers and values in a results file."""

from __future__ import annotations

from typing import Literal

Scalar = str | int | float | bool | None
"""The type of a measured value, and of a value in the decision log."""

NonFinite = Literal["inf", "-inf", "nan"]
"""Spelling of a number that JSON does not have."""

Number = float | NonFinite
"""A float64, or its spelling if it is not finite."""


def rank_number(value: Number) -> float:
    """Return a float64 by which numbers are ordered; what is no number comes first."""
    return float("-inf" if value == "nan" else value)
