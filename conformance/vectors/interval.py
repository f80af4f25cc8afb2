"""The interval of an output: for each element the exact value, and the lowest and highest number that is right."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """What is right for an output, elementwise (float64): integers of the grid, or reals where there is none."""

    exact: Tensor
    """It is not rounded."""
    low: Tensor
    """From ``low`` to ``high`` a result is right."""
    high: Tensor
    grid: Grid | None

    def nearest(self) -> Tensor:
        """Return the right value that is nearest to the exact one (float32)."""
        if self.grid is None:
            return self.exact.float()
        return self.grid.values(self.exact.round().clamp(self.low, self.high))


def interval_of(exact: Exact) -> Interval:
    """Return the interval in which the numerics stage takes a result for right. (NUM-03, NUM-04)"""
    slack = exact.slack.expand_as(exact.real)
    if exact.grid is None:
        reach = slack * exact.step
        return Interval(exact=exact.real, low=exact.real - reach, high=exact.real + reach, grid=None)
    target, grid = exact.target, exact.grid
    reach = target.half + slack
    low = (target.centre - reach).ceil().clamp(grid.low, grid.high)
    high = (target.centre + reach).floor().clamp(grid.low, grid.high)
    return Interval(exact=exact.integers, low=low, high=high, grid=grid)
