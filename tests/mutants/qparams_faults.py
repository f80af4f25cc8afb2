"""Faults of tables of functions whose results have fixed qparams: what they assume of the grid before them.

The function is the config's only claim, so that no other op widens its input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.mutants.integer_kernels import Integers
from tests.mutants.table_kernels import FIXED, TableBackend, TableKernels
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = []


def _seed(name: str, step: str, body: Any, *, op: str = "nn.*", is_input_fixed: bool = False) -> None:
    """Enter a fault of one step: the body gets the honest step, then what the step is given."""

    def replaced(self: Any, *arguments: Any) -> Any:
        return body(getattr(super(kernels, self), step), *arguments)

    kernels = type(f"Faulty_{step}", (TableKernels,), {step: replaced})
    make = partial(TableBackend, kernels, is_input_fixed=is_input_fixed)
    MUTANTS.append(Mutant(group="fixed qparams", name=name, make=make, rules=("NUM-03",), claims=(f"{op}/*",)))


def _of_output(honest: Any, x: Integers, integers: Tensor) -> Tensor:
    """As if the input were on the grid of a sigmoid's result."""
    scale, zero_point = FIXED[nn.Sigmoid]
    return (integers - zero_point) * scale


def _other_scale(scale: float) -> Any:
    return lambda honest, x, integers: (integers - x.zero_point) * scale


def _other_zero(zero_point: int) -> Any:
    return lambda honest, x, integers: (integers - zero_point) * x.scale


def _largest_scale(honest: Any, x: Integers, integers: Tensor) -> Tensor:
    """Its scales have eight bits behind the point, and end at 1/32."""
    return (integers - x.zero_point) * x.scale.clamp(max=1 / 32)


class _First:
    """The first table that was made serves all others of its function."""

    def __init__(self) -> None:
        self.tables: dict[type, Tensor] = {}

    def __call__(self, honest: Any, function: nn.Module, reals: Tensor, grid: Integers) -> Tensor:
        return self.tables.setdefault(type(function), honest(function, reals, grid))


def _signed(honest: Any, x: Integers) -> Any:
    """The integer is taken for a signed one: the halves of the table are swapped."""
    place = honest(x)
    return torch.where(place < 128, place + 128, place - 128)


def _quarter(honest: Any, function: nn.Module, reals: Tensor, grid: Integers) -> Any:
    """The table has 64 results, each for four integers."""
    return honest(function, reals, grid)[::4].repeat_interleave(4)


def _wraps(honest: Any, function: nn.Module, reals: Tensor, grid: Integers) -> Any:
    """A result beyond the last integer, such as 256 for a sigmoid of 1, starts again at the first."""
    return ((function(reals) / grid.scale).round() + grid.zero_point).remainder(256)


_seed("table for inputs on the grid of the result", "real", _of_output)
_seed("table for inputs on the grid of the result, as both ends are claimed", "real", _of_output, is_input_fixed=True)
_seed("table for inputs in steps of 1/16", "real", _other_scale(1 / 16))
_seed("table for inputs in steps of 1/256", "real", _other_scale(1 / 256), is_input_fixed=True)
_seed("table for inputs around 128", "real", _other_zero(128))
_seed("table for inputs from 0 on", "real", _other_zero(0))
_seed("table of scales up to 1/32", "real", _largest_scale)
_seed("table clipped to 0..1", "real", lambda honest, x, integers: honest(x, integers).clamp(0, 1))
_seed("one table for all grids", "made", _First())
_seed("table entered by signed integers", "place", _signed)
_seed("table of 64 results", "made", _quarter)
_seed("table whose last result wraps", "made", _wraps, op="nn.*igmoid")
