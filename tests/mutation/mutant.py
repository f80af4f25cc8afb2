"""Mutant: a backend with one seeded fault, or an honest variant, and what the suite should find."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fx_quant_conformance.backends.base import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A backend that is wrong in one way, or an honest variant."""

    name: str
    """Unique name among the mutants of a run."""

    group: str
    """Class of the fault, such as ``rounding``: a row of the tables."""

    make: Callable[[], Backend]
    """Function that makes the backend."""

    rules: tuple[str, ...] = ()
    """Rules of which one should be broken; none: an honest variant, of which every claim must be VERIFIED."""

    claims: tuple[str, ...] = ()
    """Globs of the claims and models that the fault touches; none: all."""

    in_full: tuple[str, ...] = ()
    """Globs of the claims and models for profile ``full``; none: ``claims``."""

    models: tuple[str, ...] = ()
    """Models that are handed in, as ``--model`` takes them."""

    patches: tuple[tuple[str, Any], ...] = ()
    """Dotted names and their replacements during the run: for faults of the flow and not of a kernel."""

    size: float | None = None
    """Size of the fault as a part of the result, in a family of faults that differ only in size."""

    @property
    def is_honest(self) -> bool:
        """Whether the mutant has no fault."""
        return not self.rules

    def __str__(self) -> str:
        return self.name


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the last part of the name."""
    path, _, name = target.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name
