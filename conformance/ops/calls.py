"""How samples call an op, and what the records of several modules share (variants.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import MOVES, OpRule, bound_moves
from fx_quant_conformance.conformance.ops.op_model import Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord

Shape: TypeAlias = tuple[int, ...]
ANY_SHAPE: tuple[Shape, ...] = ((2, 7, 3, 3), (65,), (4, 64), (1, 1, 63), (1, 2, 3, 4, 5))
"""Shapes of an elementwise op: all ranks, and sizes at the edges of kernels' tiles."""

LARGE: Arguments = {"shape": (33, 2049)}
"""More elements than torch gives to one thread (32,768), for ops that compute each separately; no whole vectors."""

INPLACE = (False, True)
MOVED = OpRule(arithmetic=MOVES, bound=bound_moves, source="NUM-05")
"""The rule of what moves or selects values."""
PLACE = Fixed(reason="the suite runs on the CPU, in float32")
PLACES = {"device": PLACE, "dtype": PLACE}
TENSOR = Fixed(reason="a tensor: its sizes are varied under shape")


def construct(op: type[nn.Module], arguments: Arguments) -> Step:
    """Construct a module with all arguments that are varied, except the shape of its input."""
    return Step(op=op(**{name: value for name, value in arguments.items() if name != "shape"}))


def call(*positional: str, **defaults: Any) -> Callable[[Any, Arguments], Step]:
    """Return how a function or method is called: `positional` by position, the others by name if not the default."""

    def step(op: Any, arguments: Arguments) -> Step:
        keywords = {name: arguments[name] for name, default in defaults.items() if arguments[name] != default}
        return Step(op=op, arguments=tuple(arguments[name] for name in positional), keywords=tuple(keywords.items()))

    return step


def sample_elementwise(
    step: Callable[[Any, Arguments], Step],
    known: tuple[Arguments, ...] = (LARGE,),
    *,
    rule: OpRule,
    epilogue: Arguments | None = None,
    **arguments: Any,
) -> OpRecord:
    """Return the record of an op that computes each element separately."""
    varied = {**arguments, "shape": ANY_SHAPE}
    return OpRecord(arguments=varied, step=step, known=known, rule=rule, epilogue=epilogue)


def move_copy(method: str) -> OpRule:
    """An op in place moves a copy: it cannot change a view, and of an expanded tensor reach beyond what is stored."""

    def exact(x: Tensor, *arguments: Any, **options: Any) -> Any:
        return getattr(x.clone(), method)(*arguments, **options)

    return replace(MOVED, source=f"torch.Tensor.{method}; NUM-05", exact=exact)


def are_axes(rank: int, *numbers: int | None) -> bool:
    """Tell whether all numbers name axes of a tensor of this rank; None does."""
    return all(number is None or -rank <= number < rank for number in numbers)
