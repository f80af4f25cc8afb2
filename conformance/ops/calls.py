"""How samples call an op: what the samples of ops without weights share (variants.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from conformance.ops.op_model import Input, Step
from conformance.ops.variants import Arguments

Shape: TypeAlias = tuple[int, ...]
ANY_SHAPE: tuple[Shape, ...] = ((2, 7, 3, 3), (65,), (4, 64), (1, 1, 63), (1, 2, 3, 4, 5))
"""Shapes of an elementwise op: all ranks, and sizes at the edges of kernels' tiles."""

LARGE: Arguments = {"shape": (33, 2049)}
"""More elements than torch gives to one thread (32,768), for ops that compute each by itself; no whole vectors."""


def one_input(arguments: Arguments) -> tuple[Input, ...]:
    """One activation of the shape that is varied."""
    return (Input(shape=arguments["shape"]),)


def module(op: type[nn.Module], arguments: Arguments) -> Step:
    """A module, constructed with all arguments that are varied."""
    options = {name: value for name, value in arguments.items() if name != "shape" and not name.startswith("_")}
    return Step(op=op(**options))


def call(*positional: str, **defaults: Any) -> Callable[[Any, Arguments], Step]:
    """Return how a function or method is called: `positional` by position, the others by name if not the default."""

    def step(op: Any, arguments: Arguments) -> Step:
        keywords = {name: arguments[name] for name, default in defaults.items() if arguments[name] != default}
        return Step(op=op, arguments=tuple(arguments[name] for name in positional), keywords=tuple(keywords.items()))

    return step


def are_axes(rank: int, *numbers: int | None) -> bool:
    """Tell whether all numbers name axes of a tensor of this rank; None does."""
    return all(number is None or -rank <= number < rank for number in numbers)
