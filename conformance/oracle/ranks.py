"""Places and orders: which element is the largest, and where each stands, as far as errors decide it (NUM-04)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import JUMP, OpCall, Value, as_operand, error_of
from fx_quant_conformance.conformance.bounds.extremes import errors_of_leaders, sign_of
from fx_quant_conformance.conformance.oracle.marks import choose, run_exactly


def find_alone(x: Value, axis: int, *, takes_first: bool) -> Tensor:
    """Return which elements have a place of their own along an axis: no other is within the errors of both.

    All that lie below, with their errors, stay below it with its own, and all above it above. ``takes_first``: of equal
    ones, which no error tells apart, the first is taken.
    """
    if takes_first and not bool(x.error().any()):
        return torch.ones(x.real.shape, dtype=torch.bool)
    ordered, order = x.real.sort(dim=axis, stable=True)
    error = x.error().gather(axis, order)
    low, high = ordered - error, ordered + error
    end = torch.full_like(ordered.narrow(axis, 0, 1), math.inf)
    count = ordered.shape[axis]
    below = torch.cat([-end, high.cummax(axis).values.narrow(axis, 0, count - 1)], axis)
    above = torch.cat([low.flip(axis).cummin(axis).values.flip(axis).narrow(axis, 1, count - 1), end], axis)
    is_alone = (below < low) & (high < above)
    return torch.zeros_like(is_alone).scatter(axis, order, is_alone)


def find_place(call: OpCall) -> Any:
    """The place of the largest or the smallest: undecided where another is within the errors of both.

    Of equal ones without an error the first is taken.
    """
    x, result, axis = as_operand(call.args[0]), run_exactly(call), _read_axis(call, 1)
    if axis is None:
        x, axis = Value(real=x.real.flatten(), errors={JUMP: x.error().flatten()}), 0
    places = result.reshape(*x.real.shape[:axis], 1, *x.real.shape[axis % x.real.dim() + 1 :])
    return choose(result, ~leads_alone(x, axis, places, sign_of(call) or 1).reshape(result.shape))


def leads_alone(x: Value, axis: int, places: Tensor, sign: int) -> Tensor:
    """Return where the largest along an axis, which is at these places, is so whatever the errors; −1: the smallest."""
    real, error = sign * x.real, x.error()
    own_error = error.gather(axis, places)
    least = real.gather(axis, places) - own_error
    rivals = ~(real + error < least) & (error + own_error > 0)
    return ~rivals.scatter(axis, places, False).any(axis, keepdim=True)


def _read_axis(call: OpCall, position: int) -> int | None:
    """The axis, which stands at a position among the arguments, or has its name; None: there is none."""
    axis: int | None = call.args[position] if len(call.args) > position else call.kwargs.get("dim")
    return axis


def find_order(position: int, takes_first: bool, call: OpCall) -> Any:
    """Values in order: each is off by at most the largest error along the axis; places as above.

    Of the largest or smallest k only errors of those count that may be among them: the order of what is taken does not
    hang on others. ``position``: of the axis among the arguments. ``takes_first``: of equal ones torch promises the
    first place.
    """
    x, found = as_operand(call.args[0]), _read_axis(call, position)
    axis = -1 if found is None else found
    values, places = run_exactly(call)
    sign, count = sign_of(call), 1
    if call.function.overloadpacket.__name__ == "topk":  # type: ignore[attr-defined]
        takes_largest = bool((*call.args[3:4], call.kwargs.get("largest", True))[0])
        sign, count = 1 if takes_largest else -1, values.shape[axis]
    counted = errors_of_leaders(x, axis, sign, count)
    largest = {cause: error.amax(axis, keepdim=True) for cause, error in counted.items()}
    is_reduced = values.dim() < x.real.dim()
    errors = {cause: (each.squeeze(axis) if is_reduced else each).expand_as(values) for cause, each in largest.items()}
    if sign is not None and is_reduced:
        kept = leads_alone(x, axis, places.unsqueeze(axis), sign).squeeze(axis)
    else:
        alone = find_alone(x, axis, takes_first=takes_first or bool(call.kwargs.get("stable")))
        kept = alone.gather(axis, places.unsqueeze(axis)).squeeze(axis) if is_reduced else alone.gather(axis, places)
    return Value(real=values, errors=errors, dtype=call.args[0].dtype), choose(places, ~kept)


def pool(rank: int, call: OpCall) -> Any:
    """The largest of each window, off by the largest error in it.

    Its place is decided where all others of the window are below it by more than the errors, or nothing is off.
    """
    x = as_operand(call.args[0])
    values, places = run_exactly(call)
    errors = {cause: call.function(error_of(cause)(x), *call.args[1:])[0] for cause in x.errors}
    is_off = sum(errors.values(), torch.zeros_like(values)) > 0
    if bool(is_off.any()) and "adaptive" not in str(call.function):
        shape, flat = places.shape, places.flatten(-rank)
        least = (x.real - x.error()).flatten(-rank).gather(-1, flat).reshape(shape)
        is_off = is_off & (_find_rivals(x, places, rank, call.args[1:]) >= least)
    return Value(real=values, errors=errors), choose(places, is_off)


def _find_rivals(x: Value, places: Tensor, rank: int, options: Sequence[Any]) -> Tensor:
    """Return how large the other elements of each window may be. ``options``: kernel, stride, padding, dilation."""
    sizes = x.real.shape[-rank:]
    kernel = _per_axis(options[0], rank)
    stride = _per_axis(options[1], rank) if options[1:2] and options[1] else kernel
    padding, dilation = _per_axis((*options[2:3], 0)[0], rank), _per_axis((*options[3:4], 1)[0], rank)
    most = (x.real + x.error()).flatten(-rank)
    rivals = torch.full(places.shape, -math.inf, dtype=torch.float64)
    for offsets in itertools.product(*map(range, kernel)):
        place, is_within = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        for axis, offset in enumerate(offsets):
            along = torch.arange(places.shape[axis - rank]) * stride[axis] - padding[axis] + offset * dilation[axis]
            along = along.reshape([-1, *[1] * (rank - 1 - axis)])
            is_within = is_within & (along >= 0) & (along < sizes[axis])
            place = place * sizes[axis] + along.clamp(0, sizes[axis] - 1)
        others = most[..., place.flatten()].reshape(places.shape)
        rivals = torch.where(is_within & (place != places), torch.maximum(rivals, others), rivals)
    return rivals


def _per_axis(option: Any, rank: int) -> list[int]:
    given = [int(each) for each in option] if isinstance(option, (list, tuple)) else [int(option)]
    return given * rank if len(given) == 1 else given


def run_along(call: OpCall) -> Any:
    """The largest or smallest so far: off by the largest error so far; where it was is undecided if anything is off."""
    x, axis = as_operand(call.args[0]), int(call.args[1])
    values, places = run_exactly(call)
    errors = {cause: error_of(cause)(x).cummax(axis).values for cause in x.errors}
    total = sum(errors.values(), torch.zeros_like(values))
    return Value(real=values, errors=errors), choose(places, total > 0)
