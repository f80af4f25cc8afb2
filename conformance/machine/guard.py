"""Guards: marks on the functions that find faults, so that tests can watch or replace each of them (tests/mutation)."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
GUARDS: dict[str, Callable[..., Any]] = {}
"""What is called in the place of each marked function, by the guard's name: itself, but in a test."""


def guard(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function as the guard of this name, which no other has."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        GUARDS[name] = function
        return wraps(function)(lambda *args, **kwargs: GUARDS[name](*args, **kwargs))

    return mark
