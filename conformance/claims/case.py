"""Cases: the float models that a claim is tried on, their inputs, and how the numbers in them are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fx_quant_conformance.conformance.machine.conditions import read_condition
from fx_quant_conformance.conformance.ops.op_model import Input

OF_CASES = ("shape", "shapes", "rank", "s_in", "s_w", "s_out")
"""What a condition may say of any case: the sizes of the first input, those of all, the number of the first one's axes,
and scales: of each input, the least and the largest of weights, and of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """How numbers are chosen: where the grids of a case lie."""

    name: str
    ranges: tuple[tuple[float, float], ...]
    """The lowest and highest calibration value of each input, in turn; they decide scale and zero point."""
    is_symmetric: bool = False
    """Whether activations are observed symmetrically."""
    output: float = 1.0
    """A factor on the observed range of the output, so that s_x·s_w / s_y differs from what calibration would give."""
    weight: float = 1.0
    """A factor on the weight."""
    bias: float = 1.0
    """A factor on the bias. An infinite one makes it just less than 2³¹ steps of s_x·s_w, in the channel where it has
    most."""
    has_ties: bool = False
    """Whether the scales of activations and weights (before a batch norm is folded in) are powers of two, so that exact
    results lie half-way between two integers, or a step of the sum next to it."""
    goes_beyond: bool = False
    """Whether one input of each profile lies between the steps of the inputs' grids and beyond their ends."""
    rests: bool = False
    """Whether one input of each profile is all at the zero point, so that the result is the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One float model for a claim: how to build it (its weights come from torch's generator), and its inputs."""

    name: str
    build: Callable[[], nn.Module]
    """Takes nothing and returns a model whose forward takes the inputs in order and holds the claim's pattern once."""
    inputs: tuple[Input, ...]
    value_range: ValueRange
    varied: tuple[str, ...] = ()
    """The names of the arguments that are away from their defaults."""
    idle: tuple[str, ...] = ()
    """The names of those that change nothing beside the others."""
    variant: str = ""
    """The varied arguments with their values. Cases of one variant differ in their value range only."""
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The arguments of the root op, as it gets them."""
    is_first: bool = False
    """Whether it is the first case of its claim."""

    @property
    def twin(self) -> Case:
        """The same model with other weights, on inputs whose grids have another scale and zero point."""
        ranges = tuple((0.75 * low, 0.5 * high) for low, high in self.value_range.ranges)
        value_range = replace(self.value_range, ranges=ranges)
        return replace(self, name=f"{self.name}, other numbers", value_range=value_range, is_first=False)

    @property
    def facts(self) -> dict[str, Any]:
        """What a condition may say of it before it is converted: its arguments, and the shapes of its inputs."""
        shapes = tuple(tuple(each.shape) for each in self.inputs)
        of_first = {"shape": shapes[0], "rank": len(shapes[0])} if shapes else {}
        return {name.lstrip("_"): value for name, value in self.arguments.items()} | {"shapes": shapes} | of_first

    def may_be(self, conditions: Iterable[str], scales: Mapping[str, Any] | None = None) -> bool:
        """Tell whether it is within conditions that a backend declares; what hangs on unknown scales does not count."""
        facts = {**self.facts, **(scales or {})}
        return all(read_condition(text).holds(facts) is not False for text in conditions)

    def spell_facts(self, scales: Mapping[str, Any] | None = None) -> str:
        """Return what a condition may say of it as text, which ``ast.literal_eval`` reads."""
        return repr({name: _make_plain(value) for name, value in {**self.facts, **(scales or {})}.items()})

    @property
    def size(self) -> int:
        """Number of elements of all inputs."""
        return sum(math.prod(each.shape) for each in self.inputs)


def _make_plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_make_plain, value))
    is_plain = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
    return value if is_plain else str(value)
