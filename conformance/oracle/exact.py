"""What is exact of a value on a grid, and how far a right backend may be from it (NUM-03, NUM-04).

How a value is quantized follows from what the backend declares (requantizing.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from fx_quant_conformance.backends.base import Requantize, RoundingMode
from fx_quant_conformance.conformance.bounds.error_bounds import JUMP, Accumulator, U, Value, add_error, error_of
from fx_quant_conformance.conformance.oracle.grids import Grid, make_grid
from fx_quant_conformance.conformance.oracle.requantizing import Target, bound_requantizing, find_target

FLOATS_DECIDED = 2.0**-8
"""The largest error, as a part of the largest value, with which an element of a float output is decided: a step of the
grid of 8 bits that would hold the output."""
BLIND_LSB = 1.0
"""Beyond the rounding itself, a bound this wide admits integers that are not next to the exact result."""
FLOAT32 = Requantize()
"""How a kernel requantizes that declares nothing."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact result of one output of a model."""

    real: Tensor
    errors: Mapping[str, Tensor]
    """The errors by cause, in real units (error_bounds.py)."""
    step: Tensor
    """What distances are measured in: the grid's scale; of a float output the step of its accumulator, or of half
    precision at its value."""
    grid: Grid | None = None
    """The output's grid; None: the output is a float tensor."""
    accumulator: Accumulator | None = None
    """That of the value (error_bounds.py)."""
    tolerance: float = 0.0
    """As of the value (error_bounds.py)."""
    is_discrete: bool = False
    """Whether it holds integers or truth values, such as an index: then it is exact where it is decided."""
    requantize: Requantize = FLOAT32
    """How a right backend makes its integers."""

    @cached_property
    def integers(self) -> Tensor:
        """v: the real result in steps of the grid, plus its zero point; clamped, not rounded. (NUM-03)

        What is no number has the zero point, and no bound.
        """
        assert self.grid is not None, "a float output has no integers"
        integers = self.grid.integers(self.real).nan_to_num(self.grid.zero_point, math.inf, -math.inf)
        return integers.clamp(self.grid.low, self.grid.high)

    @cached_property
    def slack_by_cause(self) -> dict[str, Tensor]:
        """The slack by cause, in steps: of quantized outputs beyond 1/2, of float outputs in all. (NUM-04)

        ``final`` is the factor of the rescale and what follows (requantizing.py); of a float output 2u·|y|.
        """
        by_cause = {cause: (error / self.step).expand_as(self.real) for cause, error in self.errors.items()}
        if self.is_discrete:
            return by_cause
        if self.grid is None:
            by_cause["final"] = 2 * U * torch.where(self.real.isfinite(), self.real, 0.0).abs() / self.step
            return {cause: slack.nan_to_num(math.inf, math.inf) for cause, slack in by_cause.items()}
        return by_cause | bound_requantizing(self.requantize, self.integers, self.grid, self.accumulator)

    @cached_property
    def slack(self) -> Tensor:
        """The sum over all causes, in steps."""
        return sum(self.slack_by_cause.values(), torch.zeros_like(self.real))

    @cached_property
    def decided(self) -> Tensor:
        """Where the bound shows a fault: of quantized outputs beyond 1/2 less than a step wide. (NUM-04)

        An integer that is chosen is decided where no other may be right; a float by a part of the largest value.
        """
        if self.grid is not None:
            return self.slack < BLIND_LSB
        if self.is_discrete:
            return self.slack == 0
        finite = self.real[self.real.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        return self.slack * self.step <= FLOATS_DECIDED * largest

    @property
    def is_open(self) -> bool:
        """Whether no bound is known of any element: an op in it is no primitive, and has no rule."""
        return bool(self.slack.numel()) and bool(self.slack.isinf().all())

    @cached_property
    def target(self) -> Target:
        """The integers that are right but for the slack. (NUM-03)"""
        assert self.grid is not None, "a float output has no integers"
        if not self.has_named_rounding:
            return Target(centre=self.integers, half=0.5)
        error = sum(self.errors.values(), torch.zeros_like(self.real))
        return find_target(self.requantize, self.real, self.grid, self.accumulator, error).clamp(self.grid)

    @property
    def has_named_rounding(self) -> bool:
        """Whether the backend declares to which integer it rounds, and does not leave it at the nearest."""
        return self.accumulator is not None and self.requantize.rounding is not RoundingMode.NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Integers on the walk, the node that made them, and, of a computed value, that value."""

    integers: Tensor
    node: Node
    computed: Value | None = None
    tie_ambiguity: Tensor | None = None
    """By how many steps a right backend's integer may differ; None: by none."""


def leave_numberless(value: Value) -> Value:
    """Return a value of which nothing is known where it is no number: it is rounded, or is a result of the model."""
    if not value.real.is_floating_point() or not bool(value.real.isnan().any()):
        return value
    errors = add_error(dict(value.errors), JUMP, torch.where(value.real.isnan(), math.inf, 0.0))
    return replace(value, errors=errors)


def round_value(value: Value, node: Node, grid: Grid, requantize: Requantize) -> Quantized:
    """Return a value on the grid of the node that rounds it, with the steps by which a right backend may differ."""
    value = leave_numberless(value)
    real = grid.integers(value.real)
    integers = real.clamp(grid.low, grid.high)
    is_on_grid = not value.errors and bool((real == integers.round()).all())
    if is_on_grid and not requantize.rounding.is_directed and not value.tolerance:  # no ambiguity
        return Quantized(integers=integers, node=node, computed=value)
    error = value.error()
    own = bound_requantizing(requantize, integers, grid, value.accumulator)
    slack = sum(own.values(), error / grid.scale)  # rule: NUM-04
    target = find_target(requantize, value.real, grid, value.accumulator, error)
    reach = target.half + slack
    lowest, highest = target.centre - reach, target.centre + reach
    if value.tolerance:
        lowest = torch.minimum(lowest, integers - value.tolerance - slack)
        highest = torch.maximum(highest, integers + value.tolerance + slack)
    low, high = lowest.ceil().clamp(grid.low, grid.high), highest.floor().clamp(grid.low, grid.high)
    integers = target.centre.round().clamp(low, high)
    return Quantized(integers=integers, node=node, computed=value, tie_ambiguity=high - low)


def round_by_channel(value: Value, node: Node, scales: Tensor, zero_points: Tensor, axis: int) -> Quantized:
    """The same of a value with a grid for each channel, such as a weight that a model computes of its inputs."""
    parts = []
    for channel, (scale, zero_point) in enumerate(zip(scales, zero_points, strict=True)):
        errors = {cause: error_of(cause)(value).narrow(axis, channel, 1) for cause in value.errors}
        part = Value(real=value.real.narrow(axis, channel, 1), errors=errors, tolerance=value.tolerance)
        parts.append(round_value(part, node, make_grid(node, float(scale), int(zero_point)), FLOAT32))
    reach = [each.integers * 0 if each.tie_ambiguity is None else each.tie_ambiguity for each in parts]
    integers = torch.cat([each.integers for each in parts], axis)
    return Quantized(integers=integers, node=node, computed=value, tie_ambiguity=torch.cat(reach, axis))
