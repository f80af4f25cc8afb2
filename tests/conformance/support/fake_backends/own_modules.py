"""A vendor's own modules: one that its constructor makes again, and one of which the constructor does not tell how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance import register
from fx_quant_conformance.backends.base import Backend, Representation
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, quint8


class Shift(nn.Module):
    """x + by."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Gain(nn.Module):
    """x times the product of numbers that are not kept as they were given."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.state = {"gain": float(torch.tensor(numbers).prod())}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.state["gain"]


class Zeros(Backend):
    """Claims both, and gives zeros for both."""

    name = "zeros"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        dtypes = DTypeConfig(quint8, quint8)
        entries = [BackendPatternConfig(kind).set_dtype_configs([dtypes]) for kind in (Shift, Gain)]
        return BackendConfig("zeros").set_backend_pattern_configs(entries)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return lambda *inputs: reference_model(*inputs).detach() * 0


register(Shift, build=lambda: nn.Sequential(Shift(0.5)).eval(), inputs=[(4, 17)], roundings=1)
register(Gain, build=lambda: nn.Sequential(Gain(2.0, 0.75)).eval(), inputs=[(4, 17)], roundings=1)
