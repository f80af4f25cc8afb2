"""Guards: marks on the functions that find faults, so that the mutation gate can watch or remove each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from reports.text_enum import TextEnum

P = ParamSpec("P")
R = TypeVar("R")
Hook = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes a guard's name and function; returns the function to call instead."""


class Finds(TextEnum):
    """How a marked function reports a fault."""

    PROBLEM = "returns a Problem, else None"
    PROBLEMS = "yields Problems"
    OPEN = "returns a Problem of the flow's, which leaves a model open, else None"
    TEXT = "returns what is wrong, else an empty text"
    ERROR = "raises a StageError"
    FALLBACK = "raises a StageError, or returns a result with a fault"
    FAILED_RUN = "returns the comparison of a run without an output; being called is the fault"
    OFF_GRID = "returns the comparison of an output between two integers; being called is the fault"
    DISTANCES = "returns the check of comparisons, of which one is too far from the exact result"
    CHANGES = "yields comparisons, of which one has a problem"
    CHECK = "returns a check that does not pass"
    LOST = "returns the verdict of work that did not end well; being called is the fault"


GUARDS: dict[str, Finds] = {}
"""How each marked guard reports a fault, by name."""

_hooks: list[Hook] = []


def guard(name: str, finds: Finds = Finds.PROBLEM) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as a guard. Raises ValueError for the name of another guard."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        if name in GUARDS:
            raise ValueError(f"two guards are named {name!r}; a guard's name is its own")
        GUARDS[name] = finds

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            hooked: Callable[..., R] = function
            for hook in _hooks:
                hooked = hook(name, hooked)
            return hooked(*args, **kwargs)

        return call

    return mark


@contextmanager
def replace_guards(hook: Hook) -> Iterator[None]:
    """Replace each guard by what ``hook`` returns for it, in this process and in those forked from it."""
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)
