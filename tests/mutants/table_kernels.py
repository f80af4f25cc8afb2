"""Integer kernels with a unit for activation functions: a table of a result for each integer of the input.

Each step is a method, for a fault to replace; a config claims these ops alone, with fixed qparams of the output.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from tests.mutants.integer_kernels import IntegerBackend, Integers, Kernels, Make, small_config

FIXED: dict[type[nn.Module], tuple[float, int]] = {
    nn.Sigmoid: (1 / 256, 0),
    nn.Hardsigmoid: (1 / 256, 0),
    nn.Tanh: (2 / 256, 128),
}
"""The functions, and the scale and zero point of their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A function of integers, before the grid of its result is known."""

    function: nn.Module
    x: Integers


class TableKernels(Kernels):
    """An honest table: the function of each integer's real value, rounded to the grid of the result."""

    def call(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        if type(module) in FIXED:
            return Lookup(function=module, x=arguments[0])
        return super().call(module, arguments)

    def requantize(self, value: Any, grid: Integers) -> Integers:
        if not isinstance(value, Lookup):
            return super().requantize(value, grid)
        integers = torch.arange(value.x.low, value.x.high + 1).double()
        table = self.made(value.function, self.real(value.x, integers), grid)
        return replace(grid, q=table[self.place(value.x)])

    # -- steps that a fault may replace ------------------------------------------------------------------------------

    def place(self, x: Integers) -> Tensor:
        """The places in the table of integers."""
        return (x.q - x.low).long()

    def real(self, x: Integers, integers: Tensor) -> Tensor:
        """What integers of the input's grid stand for."""
        return (integers - x.zero_point) * x.scale

    def made(self, function: nn.Module, reals: Tensor, grid: Integers) -> Tensor:
        """The table: its results as integers of their grid."""
        results = function(reals) / grid.scale
        return self.clamped(self.placed(self.rounded(results), grid.zero_point), grid, rectified=False)


class TableBackend(IntegerBackend):
    """Claims functions alone. ``is_input_fixed``: the input's constraints name the same qparams, as torch's do."""

    def __init__(self, kernels: Make = TableKernels, name: str = "tables", *, is_input_fixed: bool = False) -> None:
        super().__init__(kernels, name)
        self._is_input_fixed = is_input_fixed

    def backend_config(self) -> BackendConfig:
        return table_config(is_input_fixed=self._is_input_fixed)


def table_config(*, is_input_fixed: bool) -> BackendConfig:
    """The entries of the functions: results of fixed qparams, inputs of any, or of nominally the same."""
    config = BackendConfig("tables")
    for op, (scale, zero_point) in FIXED.items():
        fixed = DTypeWithConstraints(torch.quint8, 0, 255, scale_exact_match=scale, zero_point_exact_match=zero_point)
        plain = DTypeWithConstraints(torch.quint8, 0, 255)
        dtypes = DTypeConfig(fixed if is_input_fixed else plain, fixed)
        config.set_backend_pattern_config(BackendPatternConfig(op).set_dtype_configs([dtypes]))
    return config


FLOOR = 2.0**-12
FLOORED = ("nn.Linear", "nn.ReLU", "operator.add", "torch.cat", "torch.flatten")
"""Patterns of the integer kernels that a machine with a smallest scale claims beside the functions."""


class FlooredKernels(TableKernels):
    """Holds scales in a form that knows none below the floor."""

    def quantize(self, value: Any, numbers: tuple[Any, ...], target: Any) -> Integers:
        if float(numbers[0]) < FLOOR:
            raise ValueError(f"no scale below 2^-12: {numbers[0]}")
        return super().quantize(value, numbers, target)


class FlooredBackend(TableBackend):
    """Claims the smallest scale wherever a config can say it: of fixed qparams it cannot."""

    def __init__(self) -> None:
        super().__init__(FlooredKernels, "smallest scale")

    def backend_config(self) -> BackendConfig:
        config = super().backend_config()
        floor = DTypeWithConstraints(torch.quint8, scale_min_lower_bound=FLOOR)
        known = {pattern_name(entry.normal_pattern): entry for entry in small_config().configs}
        identity = BackendPatternConfig(nn.Identity).set_observation_type(
            ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
        )
        for entry in (identity, *(known[name] for name in FLOORED)):
            weight = torch.qint8 if entry.root_module is not None else None
            dtypes = DTypeConfig(floor, floor, weight, torch.float if weight else None)
            own = copy.copy(entry).set_dtype_configs([dtypes])
            own.set_qat_module(None)  # type: ignore[arg-type]
            config.set_backend_pattern_config(own)
        return config
