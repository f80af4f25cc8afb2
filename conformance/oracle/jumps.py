"""Primitives that jump: comparisons, roundings, choices and what is indexed by them (NUM-04).

An element whose error reaches the jump is *undecided*: a right machine may be on either side of it. Of truth values and
integers it has an error, as it may be another one; where that is unknown, without bound. What is chosen by an undecided
element is carried as an interval, of cause ``jump``: from the exact result to the farthest of what may be chosen.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fx_quant_conformance.conformance.bounds.error_bounds import (
    JUMP,
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
from fx_quant_conformance.conformance.oracle.marks import (
    UNITS,
    as_double,
    choose,
    is_value,
    real_of,
    reals_of,
    run_exactly,
    undecided_of,
)
from fx_quant_conformance.conformance.oracle.ranks import find_order, find_place, pool, run_along

# -- comparisons and logic --------------------------------------------------------------------------------------------


def _compare(call: OpCall) -> Any:
    """A comparison x ⋛ y is undecided where |x − y| is not beyond both errors; of a number with itself nothing is."""
    if call.args[0] is call.args[1]:
        return run_exactly(call)
    x, y = map(as_operand, call.args[:2])
    error = x.error() + y.error()
    return choose(run_exactly(call), ~((x.real - y.real).abs() > error) & (error > 0))


def _classify(call: OpCall) -> Any:
    """Whether a number is none, or infinite: undecided where nothing is known of it."""
    x = as_operand(call.args[0])
    return choose(run_exactly(call), x.error().isinf())


def _combine(call: OpCall) -> Any:
    """Logic: undecided where an undecided operand may change the result; of and, or, any and all the ends decide."""
    operands = [each for each in call.args if isinstance(each, (Tensor, Value))]
    if any(real_of(each).dtype is not torch.bool for each in operands):
        return _depend(call)
    args, kwargs = reals_of(call)
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
    """A monotone function that jumps: from its value at x − e to that at x + e.

    To round to d decimals, x·10ᵈ is rounded to an integer, which is divided by 10ᵈ: the product rounds by u before the
    jump, and the quotient by u behind it. 10ᵈ is exact in float32 up to d = 10, and rounds beyond.
    """
    x = as_operand(call.args[0])
    error, result = x.error(), run_exactly(call)
    if call.kwargs.get("decimals"):
        error = error + 2 * U * x.real.abs()
    low, high = (call.function(x.real + way * error, *call.args[1:], **call.kwargs) for way in (-1, 1))
    moved = torch.maximum(high - result, result - low)
    if call.kwargs.get("decimals"):
        moved = moved + 2 * U * result.abs()
    return Value(real=result, errors={JUMP: moved} if bool(moved.any()) else {})


def _ends_of(x: Value) -> tuple[Tensor, Tensor]:
    """The least and the most that a value may be on a right machine."""
    error = x.error()
    low, high = x.real - error, x.real + error
    return low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf)


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

    def find(bounds: Tensor, x: Tensor) -> Tensor:
        bounds = bounds if sorter is None else bounds.gather(-1, sorter)
        given = bounds.sort(-1).values, x
        found: Tensor = run(*(given if is_search else given[::-1]), *call.args[2:], **options)
        return found

    (least, most), (first, last) = map(_ends_of, (x, bounds))
    return choose(find(bounds.real, x.real), find(last, least) != find(first, most))


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
    """⌊x / y⌋ or the quotient towards zero: as the quotient, γ₃ of which rounds, then the jump.

    Integers do not round, nor does a quotient by a power of two.
    """
    x, y = map(as_operand, call.args[:2])
    rounding = torch.trunc if call.kwargs.get("rounding_mode") == "trunc" else torch.floor
    quotient = x.real / y.real
    least = y.real.abs() - y.error()
    is_power = (torch.frexp(y.real)[0].abs() == 0.5) & (y.error() == 0)
    own = torch.where(is_power, 0.0, 3 * U * quotient.abs()) if any(map(_is_float, call.args[:2])) else 0.0
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
            return choose(given.real != 0, ~(given.real.abs() > given.error()) & (given.error() > 0))
        exact, low, high = (each.trunc() for each in (given.real, *_ends_of(given)))
        moved = torch.maximum(high - exact, exact - low).nan_to_num(math.inf, math.inf)
        return Value(real=exact.to(dtype), errors={JUMP: moved}, dtype=dtype) if bool(moved.any()) else exact.to(dtype)
    given = as_operand(x)
    errors = dict(given.errors)
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
        apart = (x.real - y.real).abs().nan_to_num(0.0, math.inf) + torch.maximum(x.error(), y.error())
        add_error(errors, JUMP, torch.where(undecided, apart, 0.0))
    return Value(real=result, errors={cause: each.expand_as(result) for cause, each in errors.items()})


def _is_float(operand: Any) -> bool:
    if isinstance(operand, (Tensor, Value)):
        return bool(real_of(operand).is_floating_point())
    return isinstance(operand, float)


def _look_up(find_mask: Callable[[OpCall, Tensor], Tensor], call: OpCall) -> Any:
    """What is indexed: errors move with it; where an index is undecided, it may be any of the values."""
    source, *rest = call.args
    places = tree_map(real_of, rest, is_leaf=is_value)

    def move(values: Tensor) -> Tensor:
        return call.function(values, *places, **call.kwargs)  # type: ignore[no-any-return]

    result = move(as_double(real_of(source)))
    undecided = find_mask(call, result)
    if not result.is_floating_point():
        return choose(result, undecided | move(undecided_of(source)))
    x = as_operand(source)
    errors = {cause: move(error_of(cause)(x)) for cause in x.errors}
    if bool(undecided.any()):
        low, high = _ends_of(x)
        reach = torch.maximum(high.max() - result, result - low.min())
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
    """Values that are put along an axis: as above; they may be added to what is there, or multiplied with it."""
    target, axis, index, values = call.args
    way = call.kwargs.get("reduce")

    def put(into: Tensor, what: Tensor) -> Tensor:
        source = what if isinstance(values, (Tensor, Value)) else what.item()
        return call.function(into, axis, real_of(index), source, **call.kwargs)  # type: ignore[no-any-return]

    given = values if isinstance(values, (Tensor, Value)) else torch.tensor(values)
    if way == "multiply":
        return _multiply_into(put, target, given, undecided_of(index).any())
    return _place(put, target, given, adds=way == "add", undecided=undecided_of(index).any())


def _multiply_into(put: Callable[[Tensor, Tensor], Tensor], target: Any, values: Any, undecided: Tensor) -> Value:
    """Products p of n factors are off by Π(|x| + e) − Π|x|, and as many roundings, γₙ·|p|."""
    x, y = as_operand(target), as_operand(values)
    result = put(x.real, y.real)
    moved = put(x.real.abs() + x.error(), y.real.abs() + y.error()) - result.abs()
    most = float(put(torch.ones_like(x.real), torch.full_like(y.real, 2.0)).max().log2()) + 1
    errors = {JUMP: torch.full_like(result, math.inf) if bool(undecided) else moved}
    add_error(errors, "accumulation", gamma(round(most)) * (result.abs() + moved))
    return Value(real=result, errors=errors, dtype=target.dtype)


def _place(put: Callable[[Tensor, Tensor], Tensor], target: Any, values: Any, *, adds: bool, undecided: Tensor) -> Any:
    result = put(as_double(real_of(target)), as_double(real_of(values)))
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
    **dict.fromkeys(("isnan", "isinf"), _classify),
    **dict.fromkeys(_STEPS, _step),
    "signbit": _find_sign,
    **dict.fromkeys(("bucketize", "searchsorted"), _find_bucket),
    "histc": _count,
    "remainder": partial(_remain, torch.floor),
    "fmod": partial(_remain, torch.trunc),
    **dict.fromkeys(("_to_copy", "convert_element_type"), _cast),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode", "floor_divide"), _divide_by_mode),
    "where": _select,
    **dict.fromkeys(("argmax", "argmin"), find_place),
    **dict.fromkeys(("sort", "median.dim"), partial(find_order, 1, False)),
    **dict.fromkeys(("topk", "kthvalue"), partial(find_order, 2, False)),
    **dict.fromkeys(("max.dim", "min.dim"), partial(find_order, 1, True)),
    **{
        name: partial(pool, axes)
        for axes in (2, 3)
        for name in (f"max_pool{axes}d_with_indices", f"adaptive_max_pool{axes}d")
    },
    **dict.fromkeys(("cummax", "cummin"), run_along),
    "scatter": _scatter,
    "gather": partial(_look_up, _mask_of_gather),
    "index_select": partial(_look_up, _mask_of_select),
    "embedding": partial(_look_up, _mask_of_embedding),
    **dict.fromkeys(("index", "_unsafe_index"), partial(_look_up, _mask_of_index)),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), _put),
}
"""By the name of the aten op, or of one overload: computes its result, a Value, or a tensor where nothing is off."""
