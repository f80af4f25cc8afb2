"""The hardware: kernels on int8 arrays, in NumPy. It knows nothing of torch.

Every kernel takes the integers of its input and gives those of its output, each on a grid: ``real = (integer -
zero_point) * scale``. Sums are int32, the vector unit computes in float32, and every kernel ends by rounding half to
even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int8: TypeAlias = NDArray[np.int8]
Float32: TypeAlias = NDArray[np.float32]
Unit: TypeAlias = Callable[[Float32], Float32]
"""An operation of the vector unit, elementwise."""

LOWEST, HIGHEST = -128, 127
SEGMENTS = 16
"""The pieces of a line that stand for an exponential function; there are none for less than -8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The grid of a tensor's integers."""

    scale: float
    zero_point: int

    def reals(self, integers: Int8) -> Float32:
        """The real values of integers."""
        return (integers.astype(np.float32) - np.float32(self.zero_point)) * np.float32(self.scale)


class Machine:
    """The kernels. (A machine of metal would have a state; this one has none.)"""

    def linear(
        self, x: Int8, *, weight: Int8, bias: NDArray[np.int32], x_grid: Grid, scales: Float32, unit: Unit, grid: Grid
    ) -> Int8:
        """Multiply by a weight [out, in] with a scale for each row, and apply ``unit`` before the result is rounded.

        The bias [out] is int32, in steps of ``x_grid.scale * scales``.
        """
        shifted = x.astype(np.int32) - x_grid.zero_point
        sums = shifted @ weight.T.astype(np.int32) + bias
        return _rounded(unit(sums.astype(np.float32) * (np.float32(x_grid.scale) * scales)), grid)

    def lookup(self, x: Int8, *, x_grid: Grid, unit: Unit, grid: Grid) -> Int8:
        """Apply ``unit`` by a table of 256 results."""
        table = _rounded(unit(x_grid.reals(np.arange(LOWEST, HIGHEST + 1).astype(np.int8))), grid)
        return table[x.astype(np.int16) - LOWEST]


def _rounded(reals: Float32, grid: Grid) -> Int8:
    integers = np.rint(reals / np.float32(grid.scale)) + np.float32(grid.zero_point)
    clipped: Int8 = np.clip(integers, LOWEST, HIGHEST).astype(np.int8)
    return clipped


# -- the vector unit --------------------------------------------------------------------------------------------------


def identity(x: Float32) -> Float32:
    """Pass values on."""
    return x


def relu(x: Float32) -> Float32:
    """Clamp at 0."""
    return np.maximum(x, np.float32(0))


def squash(x: Float32) -> Float32:
    """x / (1 + |x|)."""
    return np.divide(x, np.float32(1) + np.abs(x), dtype=np.float32)


def elu(x: Float32) -> Float32:
    """Exp(x) - 1 below 0, in straight pieces, as the vector unit has no exponential function."""
    ends = np.linspace(-8, 0, SEGMENTS + 1, dtype=np.float32)
    return np.where(x > 0, x, np.interp(x, ends, np.expm1(ends))).astype(np.float32)
