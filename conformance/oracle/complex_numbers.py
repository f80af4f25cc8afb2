"""The oracle's primitives of complex numbers: what makes and takes them, and Fourier transforms (NUM-04).

The error of a complex number is a bound on the distance in the plane. A product of two rounds by √5·u of its size, less
than 3u (Brent, Percival and Zimmermann 2007), a quotient by less than 8u. No other arithmetic of them has a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fx_quant_conformance.conformance.oracle.error_bounds import (
    FUNCTION,
    MOVES,
    Errors,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    as_operand,
    bound_clamps,
    error_of,
    gamma,
)

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "abs"})
"""Primitives of real numbers that hold for complex ones as well."""


def _bound_components(call: OpCall) -> Errors:
    """Real and imaginary part: each is off by no more than the number."""
    x = as_operand(call.args[0])
    return {cause: error_of(cause)(x).unsqueeze(-1).expand_as(call.result) for cause in x.errors}


def _bound_pairs(call: OpCall) -> Errors:
    """Numbers of pairs: off by the length of the errors of both."""
    x = as_operand(call.args[0])
    return {cause: error_of(cause)(x).norm(dim=-1) for cause in x.errors}


def _bound_joined(call: OpCall) -> Errors:
    """Numbers of two parts: off by the sum of both errors."""
    parts = [as_operand(each) for each in call.args]
    return {cause: sum((error_of(cause)(each) for each in parts), torch.zeros(())) for cause in call.causes()}


def _bound_polar(call: OpCall) -> Errors:
    """A number r·(cos θ + i·sin θ): off by e_r + (r + e_r)·e_θ.

    Each function is off by 8u, and by 2u·|θ| for an angle less its turns, and both products round: (16 + 3·|θ|)·u·r.
    """
    radius, angle = map(as_operand, call.args)
    reach = radius.real.abs() + radius.error()
    errors = {cause: error_of(cause)(radius) + reach * error_of(cause)(angle) for cause in call.causes()}
    return add_error(errors, "function", radius.real.abs() * (16 + 3 * angle.real.abs()) * U)


def _bound_transform(count: Callable[[OpCall, Value], int], times: int, call: OpCall) -> Errors:
    """A Fourier transform of n elements, Σ x·e^(iφ): errors add up, and products and sums round by γₙ₊₈ of Σ|x|.

    Fast transforms round less often. ``times``: how often an element may count, twice where half of them are kept.
    """
    x = as_operand(call.args[0])
    axes = tuple[int, ...](call.args[1])
    terms = count(call, x)
    scale = times * (1.0, terms**-0.5, 1.0 / terms)[int(call.args[2])]

    def gather(values: Tensor) -> Tensor:
        return (values.sum(axes, keepdim=True) * scale).expand_as(call.result)

    errors = {cause: gather(error_of(cause)(x)) for cause in x.errors}
    return add_error(errors, "accumulation", gamma(terms + 8) * gather(x.real.abs()))


def _count_inputs(call: OpCall, x: Value) -> int:
    return math.prod(x.real.shape[axis] for axis in call.args[1])


def _count_outputs(call: OpCall, x: Value) -> int:
    return math.prod(call.result.shape[axis] for axis in call.args[1])


def _rule(bound: Callable[[OpCall], Errors], kind: str = FUNCTION) -> OpRule:
    return OpRule(arithmetic=kind, bound=bound, source="torch.ops.aten; NUM-04")


COMPLEX: Mapping[str, OpRule] = {
    "view_as_real": _rule(_bound_components),
    "view_as_complex": _rule(_bound_pairs),
    "complex": _rule(_bound_joined),
    "polar": _rule(_bound_polar),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical", "resolve_conj"), _rule(bound_clamps, MOVES)),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c"), _rule(partial(_bound_transform, _count_inputs, 1))),
    "_fft_c2r": _rule(partial(_bound_transform, _count_outputs, 2)),
}
"""By the name of the aten op."""
