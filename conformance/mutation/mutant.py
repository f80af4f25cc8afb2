"""Mutant: a backend with one seeded fault, or an honest variant, and what the suite should make of it."""

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
    """A backend that is wrong in one way, or honest in a way of its own."""

    name: str
    """Its own among the mutants of a run."""

    group: str
    """The class of the fault, such as ``rounding``: a row of the tables."""

    make: Callable[[], Backend]
    """Makes the backend."""

    rules: tuple[str, ...] = ()
    """The rules of which one should go red; none: an honest variant, of which every claim must be VERIFIED."""

    claims: tuple[str, ...] = ()
    """Globs of the claims and models that the fault touches; none: all."""

    in_full: tuple[str, ...] = ()
    """Globs of those that profile ``full`` is to run; none: ``claims``."""

    patches: tuple[tuple[str, Any], ...] = ()
    """By dotted name, what stands in its place meanwhile: for faults of the flow and not of a kernel."""

    size: float | None = None
    """Of a family of faults that differ in size alone, how large this one is, as a part of the result."""

    @property
    def is_honest(self) -> bool:
        """Whether nothing may be found."""
        return not self.rules

    def __str__(self) -> str:
        return self.name


def load_mutants(spec: str) -> tuple[Mutant, ...]:
    """Return the mutants that ``module:attribute`` names, a tuple or list of Mutant.

    Python also looks in the checkout, for tests/mutants. Raises MutantError for another form, a module that does not
    import, what is no mutant, or two of one name.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise MutantError(f"--mutants: {spec!r} is not of the form module:attribute")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:
        raise MutantError(f"--mutants: {spec!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(spec, found)


def _checked(spec: str, found: Any) -> tuple[Mutant, ...]:
    """The mutants, each with a name of its own."""
    mutants = tuple(found) if isinstance(found, (tuple, list)) else ()
    strange = [each for each in mutants if not isinstance(each, Mutant)]
    if strange or not mutants:
        what = repr(strange[0]) if strange else repr(found)
        raise MutantError(f"--mutants: {spec!r} has {what:.80}; give a tuple of conformance.mutation.mutant.Mutant")
    names = [each.name for each in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MutantError(f"--mutants: {spec!r} has two mutants of the name {twice[0]!r}")
    return mutants


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the last part of the name."""
    path, _, name = target.rpartition(".")
    try:
        return importlib.import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(importlib.import_module(module), owner), name
