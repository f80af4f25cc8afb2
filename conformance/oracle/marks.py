"""How an undecided element is marked, and what an op gives for exact operands (jumps.py, ranks.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fx_quant_conformance.conformance.bounds.error_bounds import JUMP, U64, OpCall, U, Value

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


def reals_of(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the exact operands of a call, its floats in float64."""
    args = tree_map(lambda each: as_double(real_of(each)), call.args, is_leaf=is_value)
    return args, {name: real_of(value) for name, value in call.kwargs.items()}


def as_double(value: Any) -> Any:
    """Return a tensor of floats in float64, all else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def run_exactly(call: OpCall) -> Any:
    """Return what the op gives for the exact operands."""
    args, kwargs = reals_of(call)
    return call.function(*args, **kwargs)
