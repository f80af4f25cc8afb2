"""Mutant: a backend with one seeded fault, or an honest variant, and what the suite should find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.base import Backend
from conformance.run.options import ROOT

SHIPPED = "tests.mutants.mutants:MUTANTS"


class MutantError(Exception):
    """``--mutants`` does not lead to mutants; the message is one line."""


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


def load_mutants(spec: str) -> tuple[Mutant, ...]:
    """Return the mutants that ``module:attribute`` names, a tuple or list of Mutant.

    Python also looks in the checkout, for tests/mutants. Raises MutantError for another form, a module that cannot be
    imported, other objects than mutants, or two mutants of one name.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise MutantError(f"--mutants: {spec!r} is not of the form module:attribute")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    try:
        value: Any = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        where = "; the suite's own mutants are in its checkout, not in an installed suite" if spec == SHIPPED else ""
        raise MutantError(f"--mutants: {spec!r} cannot be loaded: {type(error).__name__}: {error}{where}") from error
    mutants = tuple(value) if isinstance(value, (tuple, list)) else ()
    strange = [each for each in mutants if not isinstance(each, Mutant)]
    if strange or not mutants:
        what = strange[0] if strange else value
        raise MutantError(f"--mutants: {spec!r} has {what!r:.80}; give a tuple of conformance.mutation.mutant.Mutant")
    names = [each.name for each in mutants]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise MutantError(f"--mutants: {spec!r} has two mutants of the name {repeated[0]!r}")
    return mutants


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the last part of the name."""
    path, _, name = target.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name
