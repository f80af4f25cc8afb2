"""The oracle's primitives of complex numbers: what makes and takes them, and Fourier transforms (NUM-04).

The error of a complex number is a bound on the distance in the plane. A product of two rounds by √5·u of its size, less
than 3u (Brent, Percival and Zimmermann 2007), a quotient by less than 8u. No other arithmetic of them has a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import (
    MOVES,
    Errors,
    OpCall,
    OpRule,
    U,
    add_error,
    as_operand,
    bound_by_slopes,
    bound_clamps,
    error_of,
    gamma,
    make_aten_rule,
)

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "abs", "neg", "sum", "mean", "mm", "bmm"})
"""Primitives of real numbers that hold for complex ones as well."""


def _bound_components(call: OpCall) -> Errors:
    """Real and imaginary part: each is off by no more than the number."""
    x = as_operand(call.args[0])
    return {cause: error_of(cause)(x).unsqueeze(-1).expand_as(call.result) for cause in x.errors}


def _bound_pairs(call: OpCall) -> Errors:
    """Numbers of pairs: off by the length of the errors of both."""
    x = as_operand(call.args[0])
    return {cause: error_of(cause)(x).norm(dim=-1) for cause in x.errors}


def _bound_polar(call: OpCall) -> Errors:
    """A number r·(cos θ + i·sin θ): slopes of 1, and of r + e_r.

    Each function is off by 8u, and by 2u·|θ| for an angle less its turns, and both products round: (16 + 3·|θ|)·u·r.
    """
    return bound_by_slopes(
        2,
        lambda call, values: (1.0, values[0].real.abs() + values[0].error()),
        lambda call, values: values[0].real.abs() * (16 + 3 * values[1].real.abs()) * U,
        call,
    )


def _bound_transform(call: OpCall, *, is_of_half: bool) -> Errors:
    """A Fourier transform of n elements, Σ x·e^(iφ): errors add up, and products and sums round by γₙ₊₈ of Σ|x|.

    Fast transforms round less often. ``is_of_half``: of numbers of which half are kept, that count twice.
    """
    x = as_operand(call.args[0])
    axes = tuple[int, ...](call.args[1])
    whole = call.result if is_of_half else x.real
    terms = math.prod(whole.shape[axis] for axis in axes)
    scale = (1.0 + is_of_half) * (1.0, terms**-0.5, 1.0 / terms)[int(call.args[2])]

    def gather(values: Tensor) -> Tensor:
        return (values.sum(axes, keepdim=True) * scale).expand_as(call.result)

    errors = {cause: gather(error_of(cause)(x)) for cause in x.errors}
    return add_error(errors, "accumulation", gamma(terms + 8) * gather(x.real.abs()))


COMPLEX: Mapping[str, OpRule] = {
    "view_as_real": make_aten_rule(_bound_components),
    "view_as_complex": make_aten_rule(_bound_pairs),
    "complex": make_aten_rule(partial(bound_by_slopes, 2, lambda call, values: (1.0, 1.0), lambda call, values: 0.0)),
    "polar": make_aten_rule(_bound_polar),
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical", "resolve_conj"), make_aten_rule(bound_clamps, MOVES)),
    **dict.fromkeys(("_fft_r2c", "_fft_c2c"), make_aten_rule(partial(_bound_transform, is_of_half=False))),
    "_fft_c2r": make_aten_rule(partial(_bound_transform, is_of_half=True)),
}
"""By the name of the aten op."""
