"""Enumerations whose members are text."""

from __future__ import annotations

from enum import Enum


class TextEnum(str, Enum):
    """An enumeration of text, which prints and formats as its value: Python 3.10 has no ``enum.StrEnum``."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]
