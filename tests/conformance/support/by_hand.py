"""Two input grids, and models on them, for what is computed by hand and by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from tests.conformance.support.flows import activation_range, converted, drawn_weight

X = {"scale": 2.0**-5, "zero_point": 40}
Y = {"scale": 2.0**-4, "zero_point": 200}
SX, ZX = Fraction(2) ** -5, 40
SY, ZY = Fraction(2) ** -4, 200
U = Fraction(1, 2**24)
both_schemes = pytest.mark.parametrize("per_channel", (False, True), ids=("per_tensor", "per_channel"))


def quantized(model: nn.Module, *inputs: Tensor, **how: Any) -> GraphModule:
    ranges = [activation_range(**grid) for grid in (X, Y)[: len(inputs)]]  # type: ignore[arg-type]
    return converted(model, ranges, output=[inputs], **how)


def exact_of(model: GraphModule, *inputs: Tensor, **capabilities: bool) -> Exact:
    """The exact result behind the one output."""
    (exact,) = Walk(model, Capabilities(**capabilities)).exact(inputs)  # type: ignore[arg-type]
    return exact


def gamma(n: int) -> Fraction:
    return n * U / (1 - n * U)


def weighted(layer: Any, per_channel: bool) -> tuple[Tensor, list[Fraction]]:
    """Give a layer a weight on its grid; return the integers and the scale of every channel."""
    integers, scales = drawn_weight(*layer.weight.shape, seed=3)
    if not per_channel:
        scales = torch.full_like(scales, 2.0**-7)
    layer.weight.data = integers * scales.reshape(-1, *[1] * (integers.dim() - 1))
    return integers, [Fraction(scale) for scale in scales.tolist()]


def on_output(exact: Exact, real: Fraction) -> Fraction:
    """v: the real result in steps of the output's grid, plus zero point, clamped. (NUM-03)"""
    grid = exact.grid
    assert grid is not None
    return min(max(real / Fraction(grid.scale) + grid.zero_point, Fraction(grid.low)), Fraction(grid.high))


def agree(exact: Exact, reals: Sequence[Fraction]) -> None:
    expected = [float(on_output(exact, real)) for real in reals]
    assert exact.integers.flatten().tolist() == pytest.approx(expected, rel=0, abs=1e-9)
    assert len(set(expected)) > 1
