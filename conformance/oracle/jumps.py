"""Primitives that jump: comparisons, roundings, choices and what is indexed by them (NUM-04).

An element whose error reaches the jump is *undecided*: a right machine may be on either side of it. Of truth values and
integers it has an error, as it may be another one; where that is unknown, without bound. What is chosen by an undecided
element is carried as an interval, of cause ``jump``: from the exact result to the farthest of what may be chosen.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fx_quant_conformance.conformance.bounds.error_bounds import (
    JUMP,
    U64,
    Errors,
    NoOracleError,
    OpCall,
    U,
    Value,
    add_error,
    as_operand,
    error_of,
    gamma,
)
from fx_quant_conformance.conformance.bounds.extremes import errors_of_leaders, sign_of

UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: U, torch.float64: U64}
"""The unit roundoff of each float dtype."""


def is_value(operand: Any) -> bool:
    """Tell whether an operand is a Value, which is a leaf of a structure."""
    return isinstance(operand, Value)


def choose(result: Tensor, undecided: Tensor) -> Tensor | Value:
    """Return integers or truth values, of which some are undecided; plain where none is."""
    if not bool(undecided.any()):
        return result
    error = torch.where(undecided, math.inf, 0.0).double().expand_as(result)
    return Value(real=result, errors={JUMP: error}, dtype=result.dtype)


def undecided_of(operand: Any) -> Tensor:
    """Return where truth values or integers are undecided."""
    if isinstance(operand, Value):
        return operand.error() > 0
    return torch.zeros(operand.shape if isinstance(operand, Tensor) else (), dtype=torch.bool)


def real_of(operand: Any) -> Any:
    """Return the exact value of an operand."""
    return operand.real if isinstance(operand, Value) else operand


def _reals(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the exact operands of a call, its floats in float64."""
    args = tree_map(lambda each: _double(real_of(each)), call.args, is_leaf=is_value)
    return args, {name: real_of(value) for name, value in call.kwargs.items()}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def run_exactly(call: OpCall) -> Any:
    """Return what the op gives for the exact operands."""
    args, kwargs = _reals(call)
    return call.function(*args, **kwargs)


# -- comparisons and logic --------------------------------------------------------------------------------------------


def _compare(call: OpCall) -> Any:
    """A comparison x ⋛ y is undecided where |x − y| is within both errors; of a number with itself nothing is."""
    if call.args[0] is call.args[1]:
        return run_exactly(call)
    x, y = map(as_operand, call.args[:2])
    error = x.error() + y.error()
    return choose(run_exactly(call), ((x.real - y.real).abs() <= error) & (error > 0))


def _combine(call: OpCall) -> Any:
    """Logic: undecided where an undecided operand may change the result; of and, or, any and all the ends decide."""
    operands = [each for each in call.args if isinstance(each, (Tensor, Value))]
    if any(real_of(each).dtype is not torch.bool for each in operands):
        return _depend(call)
    args, kwargs = _reals(call)
    masks = iter([undecided_of(each) for each in operands])
    marked = [(arg, next(masks)) if isinstance(arg, Tensor) else (arg, None) for arg in args]
    ends = [call.function(*(_move_to(way, arg, mask) for arg, mask in marked), **kwargs) for way in (False, True)]
    return choose(call.function(*args, **kwargs), ends[0] != ends[1])


def _move_to(way: bool, value: Any, mask: Tensor | None) -> Any:
    if mask is None:
        return value
    return value | mask if way else value & ~mask


def _depend(call: OpCall) -> Any:
    """Undecided wherever an operand of the same place is; of a reduction, wherever one is among what it reduces."""
    result = run_exactly(call)
    masks = [undecided_of(each) for each in call.args if isinstance(each, (Tensor, Value))]
    try:
        mask = torch.stack([each.expand_as(result) for each in masks]).any(0)
    except RuntimeError:  # its result has another shape than its operands
        mask = torch.stack([each.any() for each in masks]).any().expand_as(result)
    return choose(result, mask)


# -- roundings --------------------------------------------------------------------------------------------------------


def _step(call: OpCall) -> Any:
    """A monotone function that jumps: from its value at x − e to that at x + e."""
    x = as_operand(call.args[0])
    error, result = x.error(), run_exactly(call)
    low, high = (call.function(x.real + way * error, *call.args[1:], **call.kwargs) for way in (-1, 1))
    moved = torch.maximum(high - result, result - low)
    return Value(real=result, errors={JUMP: moved} if bool(moved.any()) else {})


def _find_sign(call: OpCall) -> Any:
    """Whether a number is below zero, which it may be where it is within its error of zero."""
    x = as_operand(call.args[0])
    return choose(run_exactly(call), (x.real.abs() <= x.error()) & (x.error() > 0))


def _find_bucket(call: OpCall) -> Any:
    """In which bucket a value lies, of bounds in order: undecided where the ends of both errors say two."""
    first, second = call.args[:2]
    is_search = "searchsorted" in str(call.function)  # which has its operands the other way round
    x, bounds = map(as_operand, (second, first) if is_search else (first, second))

    options = {name: value for name, value in call.kwargs.items() if name != "sorter"}
    sorter = call.kwargs.get("sorter")
    if isinstance(sorter, Value):
        raise NoOracleError("the order of what is searched is undecided")
    run = call.function.overloadpacket  # type: ignore[attr-defined]

    def find(way: int) -> Tensor:
        ends = bounds.real - way * bounds.error()
        ends = ends if sorter is None else ends.gather(-1, sorter)
        moved = ends.sort(-1).values, x.real + way * x.error()
        found: Tensor = run(*(moved if is_search else moved[::-1]), *call.args[2:], **options)
        return found

    return choose(find(0), find(-1) != find(1))


def _count(call: OpCall) -> Any:
    """A histogram: where the place of a value is within its error and 4u, each bin that it may lie in is off by one."""
    options: list[Any] = [*call.args[1:], *(100, 0, 0)[len(call.args) - 1 :]]
    bins, low, high = options
    x, result = as_operand(call.args[0]), run_exactly(call)
    if not x.real.numel():
        return result
    reach = (x.error() + 4 * U * (abs(low) + abs(high) + x.real.abs())).flatten()
    outside = 1  # there is a place before the first bin, and one behind the last
    if low == high:  # the ends are those of the values, and as far off
        low, high, outside = float(x.real.min()), float(x.real.max()), 0
        reach = reach + reach.amax()
    ends = [
        ((x.real.flatten() + way * reach - low) / (high - low) * bins).floor().clamp(-outside, bins - 1 + outside)
        for way in (-1, 1)
    ]
    number = torch.arange(bins).unsqueeze(-1)
    moved = ((ends[0] <= number) & (number <= ends[1]) & (ends[0] != ends[1])).sum(-1).double()
    return Value(real=result, errors={JUMP: moved} if bool(moved.any()) else {})


def _divide_by_mode(call: OpCall) -> Any:
    """⌊x / y⌋ or the quotient towards zero: as the quotient, γ₃ of which rounds, then the jump."""
    x, y = map(as_operand, call.args[:2])
    rounding = torch.trunc if call.kwargs.get("rounding_mode") == "trunc" else torch.floor
    quotient = x.real / y.real
    least = y.real.abs() - y.error()
    own = 3 * U * quotient.abs() if any(map(_is_float, call.args[:2])) else 0.0  # integers do not round
    error = torch.where(least > 0, (x.error() + quotient.abs() * y.error()) / least, math.inf) + own
    result = rounding(quotient)
    moved = torch.maximum(rounding(quotient + error) - result, result - rounding(quotient - error))
    return Value(real=result, errors={JUMP: moved} if bool(moved.any()) else {})


def _remain(rounding: Callable[[Tensor], Tensor], call: OpCall) -> Any:
    """The rest x − y·⌊x / y⌋, or towards zero: e_x and |⌊x / y⌋|·e_y; |y| where the jump is within the error."""
    x, y = map(as_operand, call.args[:2])
    result = run_exactly(call)
    quotient = x.real / y.real
    unit = U if any(map(_is_float, call.args[:2])) else 0.0  # integers do not round
    own = 4 * unit * (x.real.abs() + y.real.abs())
    error = (x.error() + own + quotient.abs() * y.error()) / (y.real.abs() - y.error()).clamp(min=0)
    jumps = rounding(quotient - error) != rounding(quotient + error)
    errors: Errors = {}
    for cause in dict.fromkeys((*x.errors, *y.errors)):
        moved = error_of(cause)(x) + (rounding(quotient).abs() + 1) * error_of(cause)(y)
        add_error(errors, cause, moved.expand_as(result))
    add_error(errors, "function", own.expand_as(result))
    if bool(jumps.any()):
        add_error(errors, JUMP, torch.where(jumps, y.real.abs() + y.error(), 0.0).expand_as(result))
    return Value(real=result, errors=errors)


def _cast(call: OpCall) -> Any:
    """A cast: to fewer bits it rounds by half a step, to integers towards zero; truth values say what is not zero."""
    x, dtype = call.args[0], call.kwargs.get("dtype", *call.args[1:2])
    source: torch.dtype = x.dtype
    dtype = source if dtype is None else dtype
    if dtype.is_complex:
        given = as_operand(x)
        return Value(real=given.real.to(torch.complex128), errors=given.errors, dtype=dtype)
    if not dtype.is_floating_point:
        if not source.is_floating_point:
            return choose(real_of(x).to(dtype), undecided_of(x))
        given = as_operand(x)
        if dtype is torch.bool:
            return choose(given.real != 0, (given.real.abs() <= given.error()) & (given.error() > 0))
        low, high = ((given.real + way * given.error()).trunc() for way in (-1, 1))
        return choose(given.real.trunc().to(dtype), low != high)
    given = as_operand(x)
    errors = dict(given.errors)
    if not source.is_floating_point:
        most = 1.0 if source is torch.bool else math.inf
        errors = {cause: torch.where(each > 0, most, 0.0).double() for cause, each in errors.items()}
    rounds = UNITS[dtype] > UNITS.get(source, 0.0)
    own = UNITS[dtype] * given.real.abs() + torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    if rounds and not (dtype is torch.float32 and bool((given.real.float().double() == given.real).all())):
        beyond = (given.real.abs() + given.error()) > torch.finfo(dtype).max
        add_error(errors, "function", torch.where(beyond & given.real.isfinite(), math.inf, own))
    return Value(real=given.real, errors=errors, dtype=dtype)


# -- choices ----------------------------------------------------------------------------------------------------------


def _select(call: OpCall) -> Any:
    """Where a mask is undecided, the result is x or y: as far off as they are apart."""
    mask, first, second = call.args
    x, y = as_operand(first), as_operand(second)
    chosen, undecided = real_of(mask), undecided_of(mask)
    if not any(map(_is_float, (first, second))):
        picked: Tensor = torch.where(chosen, real_of(first), real_of(second))
        own = torch.where(chosen, undecided_of(first), undecided_of(second))
        return choose(picked, own | (undecided & (x.real != y.real)))
    result = torch.where(chosen, x.real, y.real)
    errors = {
        cause: torch.where(chosen, error_of(cause)(x), error_of(cause)(y))
        for cause in dict.fromkeys((*x.errors, *y.errors))
    }
    if bool(undecided.any()):
        apart = (x.real - y.real).abs().nan_to_num(0.0) + torch.maximum(x.error(), y.error())
        add_error(errors, JUMP, torch.where(undecided, apart, 0.0))
    return Value(real=result, errors={cause: each.expand_as(result) for cause, each in errors.items()})


def _is_float(operand: Any) -> bool:
    if isinstance(operand, (Tensor, Value)):
        return bool(real_of(operand).is_floating_point())
    return isinstance(operand, float)


def find_alone(x: Value, axis: int, *, takes_first: bool) -> Tensor:
    """Return which elements have a place of their own along an axis: no other is within the errors of both.

    ``takes_first``: of equal ones, which no error tells apart, the first is taken.
    """
    error = x.error()
    most = error.amax(axis, keepdim=True)
    ordered, order = x.real.sort(dim=axis, stable=True)
    away = torch.diff(ordered, dim=axis)
    ends = torch.full_like(ordered.narrow(axis, 0, 1), math.inf)
    nearest = torch.minimum(torch.cat([ends, away], axis), torch.cat([away, ends], axis))
    reach = error.gather(axis, order) + most
    is_alone = (nearest > reach) | ((reach == 0) & takes_first)
    return torch.zeros_like(is_alone).scatter(axis, order, is_alone)


def _find_place(call: OpCall) -> Any:
    """The place of the largest or the smallest: undecided where another is within the errors of both."""
    x, result, axis = as_operand(call.args[0]), run_exactly(call), _read_axis(call, 1)
    if axis is None:
        x, axis = Value(real=x.real.flatten(), errors={JUMP: x.error().flatten()}), 0
    alone = find_alone(x, axis, takes_first=True)
    places = result.reshape(*alone.shape[:axis], 1, *alone.shape[axis % alone.dim() + 1 :])
    return choose(result, ~alone.gather(axis, places).reshape(result.shape))


def _read_axis(call: OpCall, position: int) -> int | None:
    """The axis, which stands at a position among the arguments, or has its name; None: there is none."""
    axis: int | None = call.args[position] if len(call.args) > position else call.kwargs.get("dim")
    return axis


def _rank(position: int, takes_first: bool, call: OpCall) -> Any:
    """Values in order: each is off by at most the largest error along the axis; places as above.

    The largest or the smallest alone is off by the errors of those that may be it. ``position``: of the axis among the
    arguments. ``takes_first``: of equal ones torch promises the first place.
    """
    x, found = as_operand(call.args[0]), _read_axis(call, position)
    axis = -1 if found is None else found
    values, places = run_exactly(call)
    counted = errors_of_leaders(x, axis, sign_of(call))
    largest = {cause: error.amax(axis, keepdim=True) for cause, error in counted.items()}
    is_reduced = values.dim() < x.real.dim()
    errors = {cause: (each.squeeze(axis) if is_reduced else each).expand_as(values) for cause, each in largest.items()}
    alone = find_alone(x, axis, takes_first=takes_first or bool(call.kwargs.get("stable")))
    kept = alone.gather(axis, places.unsqueeze(axis)).squeeze(axis) if is_reduced else alone.gather(axis, places)
    return Value(real=values, errors=errors, dtype=call.args[0].dtype), choose(places, ~kept)


def _pool(rank: int, call: OpCall) -> Any:
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


def _run_along(call: OpCall) -> Any:
    """The largest or smallest so far: off by the largest error so far; where it was is undecided if anything is off."""
    x, axis = as_operand(call.args[0]), int(call.args[1])
    values, places = run_exactly(call)
    errors = {cause: error_of(cause)(x).cummax(axis).values for cause in x.errors}
    total = sum(errors.values(), torch.zeros_like(values))
    return Value(real=values, errors=errors), choose(places, total > 0)


def _look_up(find_mask: Callable[[OpCall, Tensor], Tensor], call: OpCall) -> Any:
    """What is indexed: errors move with it; where an index is undecided, it may be any of the values."""
    source, *rest = call.args
    places = tree_map(real_of, rest, is_leaf=is_value)

    def move(values: Tensor) -> Tensor:
        return call.function(values, *places, **call.kwargs)  # type: ignore[no-any-return]

    result = move(_double(real_of(source)))
    undecided = find_mask(call, result)
    if not result.is_floating_point():
        return choose(result, undecided | move(undecided_of(source)))
    x = as_operand(source)
    errors = {cause: move(error_of(cause)(x)) for cause in x.errors}
    if bool(undecided.any()):
        low, high = (x.real - x.error()).min(), (x.real + x.error()).max()
        reach = torch.maximum(high - result, result - low)
        add_error(errors, JUMP, torch.where(undecided, reach, 0.0))
    return Value(real=result, errors=errors, dtype=source.dtype)


def _mask_of_gather(call: OpCall, result: Tensor) -> Tensor:
    return undecided_of(call.args[2]).expand_as(result)


def _mask_of_select(call: OpCall, result: Tensor) -> Tensor:
    shape = [1] * result.dim()
    shape[int(call.args[1])] = -1
    return undecided_of(call.args[2]).reshape(shape).expand_as(result)


def _mask_of_embedding(call: OpCall, result: Tensor) -> Tensor:
    return undecided_of(call.args[1]).unsqueeze(-1).expand_as(result)


def _mask_of_index(call: OpCall, result: Tensor) -> Tensor:
    """Indices of several axes stand where the first of them does, if they follow each other; else at the front."""
    places = [number for number, each in enumerate(call.args[1]) if each is not None]
    mask = _find_undecided_index(call)
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    if not bool(mask.any()):
        return torch.zeros_like(result, dtype=torch.bool)
    if mask.dim() == 0:
        return mask.expand_as(result)
    return mask.reshape([1] * start + [*mask.shape] + [1] * (result.dim() - start - mask.dim())).expand_as(result)


def _find_undecided_index(call: OpCall) -> Tensor:
    """Return which elements of the indices are undecided. Raises NoOracleError for an undecided mask.

    The shape of what a mask selects depends on it.
    """
    indices = [each for each in call.args[1] if each is not None]
    if any(isinstance(each, Value) and each.dtype is torch.bool for each in indices):
        raise NoOracleError("an undecided mask selects, so that the shape of what it selects is undecided as well")
    if any(real_of(each).dtype is torch.bool for each in indices):
        return torch.zeros((), dtype=torch.bool)
    return reduce(operator.or_, map(undecided_of, indices))


def _put(call: OpCall) -> Any:
    """Values that are put, or added, where indices say; with an undecided index, nothing is known of the result."""
    target, indices, values, *rest = call.args
    places = tree_map(real_of, indices, is_leaf=is_value)

    def put(into: Tensor, what: Tensor) -> Tensor:
        return call.function(into, places, what, *rest, **call.kwargs)  # type: ignore[no-any-return]

    adds = bool(rest and rest[0])
    return _place(put, target, values, adds=adds, undecided=_find_undecided_index(call).any())


def _scatter(call: OpCall) -> Any:
    """Values that are put along an axis: as above."""
    target, axis, index, values = call.args

    def put(into: Tensor, what: Tensor) -> Tensor:
        source = what if isinstance(values, (Tensor, Value)) else what.item()
        return call.function(into, axis, real_of(index), source, **call.kwargs)  # type: ignore[no-any-return]

    given = values if isinstance(values, (Tensor, Value)) else torch.tensor(values)
    return _place(put, target, given, adds=False, undecided=undecided_of(index).any())


def _place(put: Callable[[Tensor, Tensor], Tensor], target: Any, values: Any, *, adds: bool, undecided: Tensor) -> Any:
    result = put(_double(real_of(target)), _double(real_of(values)))
    if not result.is_floating_point():
        return choose(result, undecided | put(undecided_of(target), undecided_of(values)))
    x, y = as_operand(target), as_operand(values)
    causes = dict.fromkeys((*x.errors, *y.errors))
    errors = {cause: put(error_of(cause)(x), error_of(cause)(y)) for cause in causes}
    if adds:
        most = float(put(torch.ones_like(x.real), torch.ones_like(y.real)).max())
        add_error(errors, "accumulation", gamma(round(most)) * put(x.real.abs(), y.real.abs()))
    if bool(undecided.any()):
        add_error(errors, JUMP, torch.full_like(result, math.inf))
    return Value(real=result, errors=errors, dtype=target.dtype)


Jump: TypeAlias = Callable[[OpCall], Any]
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGIC = ("logical_and", "logical_or", "bitwise_and", "bitwise_or", "any", "all")
_DEPENDENT = ("logical_not", "logical_xor", "bitwise_not", "bitwise_xor")
_STEPS = ("floor", "ceil", "round", "trunc", "sign", "sgn")

JUMPS: Mapping[str, Jump] = {
    **dict.fromkeys(_COMPARISONS, _compare),
    **dict.fromkeys(_LOGIC, _combine),
    **dict.fromkeys(_DEPENDENT, _depend),
    **dict.fromkeys(("isnan", "isinf"), run_exactly),  # the exact value is no number, or infinite, or it is not
    **dict.fromkeys(_STEPS, _step),
    "signbit": _find_sign,
    **dict.fromkeys(("bucketize", "searchsorted"), _find_bucket),
    "histc": _count,
    "remainder": partial(_remain, torch.floor),
    "fmod": partial(_remain, torch.trunc),
    **dict.fromkeys(("_to_copy", "convert_element_type"), _cast),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode", "floor_divide"), _divide_by_mode),
    "where": _select,
    **dict.fromkeys(("argmax", "argmin"), _find_place),
    **dict.fromkeys(("sort", "median.dim"), partial(_rank, 1, False)),
    **dict.fromkeys(("topk", "kthvalue"), partial(_rank, 2, False)),
    **dict.fromkeys(("max.dim", "min.dim"), partial(_rank, 1, True)),
    **{
        name: partial(_pool, rank)
        for rank in (2, 3)
        for name in (f"max_pool{rank}d_with_indices", f"adaptive_max_pool{rank}d")
    },
    **dict.fromkeys(("cummax", "cummin"), _run_along),
    "scatter": _scatter,
    "gather": partial(_look_up, _mask_of_gather),
    "index_select": partial(_look_up, _mask_of_select),
    "embedding": partial(_look_up, _mask_of_embedding),
    **dict.fromkeys(("index", "_unsafe_index"), partial(_look_up, _mask_of_index)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _put),
}
"""By the name of the aten op, or of one overload: computes its result, a Value, or a tensor where nothing is off."""
