"""The oracle's primitives of one operand: the slope of each function within the error, and its evaluation (NUM-04)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import (
    U64,
    Bounds,
    Errors,
    OpCall,
    U,
    Value,
    bound_by_slopes,
)
from fx_quant_conformance.conformance.ops.activations import EXP

FUNCTION = 8 * U
"""What a function that is not correctly rounded is off by, of its result."""
TINY = 2.0**-126
"""What a machine may flush to zero."""


class Unary(NamedTuple):
    """A function of one operand, monotone between its turns and poles."""

    relative: float = FUNCTION
    absolute: float = 0.0
    """Its evaluation is off by at most ``relative``·|y| + ``absolute``."""
    low: float = -math.inf
    high: float = math.inf
    """The ends of its domain; no right machine's operand is beyond."""
    turns: tuple[float, ...] = ()
    """Where its slope changes its sign."""
    steepest: float | None = None
    """Its slope, where that has a bound and it turns at more places."""


UNARY: Mapping[str, Unary] = {
    "abs": Unary(0.0, turns=(0.0,)),
    "neg": Unary(0.0),
    "exp": Unary(EXP),
    "exp2": Unary(EXP),
    "expm1": Unary(EXP),
    "sinh": Unary(2 * EXP),
    "cosh": Unary(2 * EXP, turns=(0.0,)),
    # Near 1 a logarithm is as small as the rounding of what it is made of.
    **dict.fromkeys(("log", "log2", "log10", "log1p", "asinh", "acosh", "atanh"), Unary(2 * FUNCTION, FUNCTION)),
    "sqrt": Unary(4 * U, low=0.0),
    "rsqrt": Unary(4 * U, low=0.0),
    "reciprocal": Unary(3 * U),
    "asin": Unary(FUNCTION, FUNCTION, -1.0, 1.0),
    "acos": Unary(FUNCTION, FUNCTION, -1.0, 1.0),
    "atan": Unary(),
    "tan": Unary(2 * FUNCTION, FUNCTION),
    "sin": Unary(0.0, FUNCTION, steepest=1.0),
    "cos": Unary(0.0, FUNCTION, steepest=1.0),
    "erf": Unary(0.0, FUNCTION),  # formulas of few terms are off by 2.5u
    "erfc": Unary(0.0, FUNCTION),
    "erfinv": Unary(2 * FUNCTION, 0.0, -1.0, 1.0),
    "lgamma": Unary(2 * FUNCTION, 2 * FUNCTION, turns=(1.4616321449683623,)),
    "digamma": Unary(2 * FUNCTION, 2 * FUNCTION),
    "erfcx": Unary(2 * EXP),
    "ndtri": Unary(2 * FUNCTION, FUNCTION, 0.0, 1.0),
    "bessel_i0": Unary(2 * EXP, turns=(0.0,)),
    "bessel_i0e": Unary(4 * FUNCTION, turns=(0.0,)),
    "bessel_i1": Unary(2 * EXP),
    "bessel_i1e": Unary(4 * FUNCTION, turns=(-1.5451272579925427, 1.5451272579925427)),  # where I₀ = I₁ + I₁ / x
}


def find_reach_at(
    run: Callable[[Tensor], Tensor], x: Value, result: Tensor, function: Unary, poles: Tensor | None = None
) -> Tensor:
    """Return the slope of the chord from x to the farthest result within its error; infinite beyond a pole."""
    error = x.error()
    ends = [(x.real + way * error).clamp(function.low, function.high) for way in (-1, 1)]
    turns = [torch.where((x.real - turn).abs() <= error, turn, x.real) for turn in function.turns]
    moved = torch.stack([(run(end) - result).abs() for end in (*ends, *turns)]).nan_to_num(math.inf, math.inf).amax(0)
    moved = moved + 8 * U64 * result.abs()  # the difference of two values in float64
    if poles is not None:
        moved = torch.where(poles, math.inf, moved)
    return torch.where(error > 0, moved / error, 0.0)


_POLES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reciprocal": lambda low, high: (low <= 0) & (high >= 0),
    "rsqrt": lambda low, high: low <= 0,
    "tan": lambda low, high: (low / math.pi - 0.5).floor() != (high / math.pi - 0.5).floor(),
    **dict.fromkeys(("lgamma", "digamma"), lambda low, high: low <= 0),
    "log": lambda low, high: low <= 0,
    "log2": lambda low, high: low <= 0,
    "log10": lambda low, high: low <= 0,
    "log1p": lambda low, high: low <= -1,
    "atanh": lambda low, high: (low <= -1) | (high >= 1),
    "acosh": lambda low, high: low < 1,
}
"""Whether a function has a pole between two operands, or leaves its domain."""


def bound_unary(name: str, call: OpCall) -> Errors:
    """A function y = f(x): the chord to the farthest f(x ± e), and the evaluation of f."""
    function = UNARY[name]
    if call.values()[0].real.is_complex():  # its length, or itself turned round
        own = FUNCTION if name == "abs" else 0.0
        return bound_by_slopes(1, lambda call, values: (1.0,), lambda call, values: own * call.result.abs(), call)

    def slopes(call: OpCall, values: Sequence[Value]) -> Sequence[Bounds]:
        x, error = values[0].real, values[0].error()
        if function.steepest is not None:
            return (function.steepest,)
        poles = _POLES[name](x - error, x + error) & (error > 0) if name in _POLES else None
        run: Callable[[Tensor], Tensor] = call.function
        return (find_reach_at(run, values[0], call.result, function, poles),)

    def rounding(call: OpCall, values: Sequence[Value]) -> Bounds:
        own: Tensor = function.relative * call.result.abs() + function.absolute
        if name == "erfcx":  # e^(x²) of a square that rounds
            own = own + 4 * U * values[0].real.square() * call.result
        if name in ("sin", "cos", "tan"):  # the operand less a multiple of π, which is rounded
            own = own + 2 * U * values[0].real.abs() * (1 + call.result.square() if name == "tan" else 1.0)
        return own if name in ("abs", "neg") else own + TINY

    return bound_by_slopes(1, slopes, rounding, call)
