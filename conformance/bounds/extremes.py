"""Which elements of a reduction may be its largest or smallest one: the errors of the others do not count."""

from __future__ import annotations

import torch
from torch import Tensor

from fx_quant_conformance.conformance.bounds.error_bounds import Errors, OpCall, Value

NEGLIGIBLE = 104.0
"""Of exponents: e to minus this is less than any float32."""
_SIGNS = {
    **dict.fromkeys(("maximum", "fmax", "amax", "max", "argmax"), 1),
    **dict.fromkeys(("minimum", "fmin", "amin", "min", "argmin"), -1),
}


def sign_of(call: OpCall) -> int | None:
    """Return 1 for an aten op that takes the largest, −1 for one that takes the smallest; None for another."""
    return _SIGNS.get(call.function.overloadpacket.__name__)  # type: ignore[attr-defined]


def may_lead(x: Value, axes: int | tuple[int, ...], sign: int = 1, margin: float = 0.0) -> Tensor:
    """Return which elements may be the largest along axes for some errors, or less than ``margin`` below it.

    ``sign``: −1 for the smallest. What is no number may be anything.
    """
    real, error = sign * x.real, x.error()
    least = (real - error).amax(axes, keepdim=True)
    return ~(real + error < least - margin)


def _may_be_among(x: Value, axis: int, count: int, sign: int) -> Tensor:
    """Return which elements may be among the `count` largest (``sign`` −1: smallest) along an axis for some errors.

    Let T be the `count`-th largest of all x − e: as many elements are never below T, so that one with x + e < T is
    never among the largest.
    """
    real, error = sign * x.real, x.error()
    least = (real - error).topk(count, axis).values.narrow(axis, count - 1, 1)
    return ~(real + error < least)


def errors_of_leaders(x: Value, axes: int | tuple[int, ...], sign: int | None, count: int = 1) -> Errors:
    """Return the errors of the elements that may be the largest (``sign`` −1: the smallest) along axes; 0 of others.

    ``count``: of those that may be among so many, along one axis; their order does not hang on others. ``sign`` None:
    it is another one that is taken, such as the median, and all count.

    The largest y = xᵢ becomes y' = xⱼ + dⱼ with |dⱼ| ≤ eⱼ, where both i and j may lead. As xⱼ ≤ y, y' exceeds y by at
    most eⱼ; as y' ≥ xᵢ + dᵢ, it is below y by at most eᵢ: y is off by the largest error of those that may lead.
    """
    if sign is None:
        return {cause: error.expand_as(x.real) for cause, error in x.errors.items()}
    leads = _may_be_among(x, axes, count, sign) if isinstance(axes, int) and count > 1 else may_lead(x, axes, sign)
    return {cause: torch.where(leads, error, 0.0) for cause, error in x.errors.items()}
