"""The first try, kept for the guide: a kernel that forgets that the integer of zero need not be 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toy_npu.backend import ToyNpu
from toy_npu.machine import Grid, Int8, Machine


class Symmetric(Machine):
    """The machine before its mend: sums of products of the bare integers."""

    def linear(self, x: Int8, *, x_grid: Grid, **rest: Any) -> Int8:
        """Multiply, as if the zero point of x were 0."""
        return super().linear(x, x_grid=replace(x_grid, zero_point=0), **rest)


class FirstDraft(ToyNpu):
    """The toy NPU as it was before the suite saw it."""

    waivers = None
    machine = Symmetric()
