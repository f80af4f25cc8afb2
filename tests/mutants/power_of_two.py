"""A machine that rescales by shifts alone: its scales are powers of two, and it brings the observers that give them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import UnsupportedPattern
from fx_quant_conformance.refimpl import BackendConfig, MinMaxObserver, PerChannelMinMaxObserver, QConfig
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from tests.mutants.integer_kernels import IntegerBackend, Kernels, Make, small_config


def round_up(scale: Tensor) -> Tensor:
    """Return the smallest power of two that is no smaller."""
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))


class PowerOfTwoObserver(MinMaxObserver):
    """The smallest power of two as its scale whose steps hold the smallest and the largest value."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        least, zero_point = super().calculate_qparams()
        scale = round_up(least)
        if self.qscheme is torch.per_tensor_affine:
            zero_point = self.quant_min - (self.min_val.clamp(max=0) / scale).round().to(zero_point.dtype)
        return scale, zero_point


class PowerOfTwoChannelObserver(PerChannelMinMaxObserver):
    """The same for each channel of a weight, symmetric."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        scale, zero_point = super().calculate_qparams()
        return round_up(scale), zero_point


ACTIVATIONS = (
    PowerOfTwoObserver.with_args(dtype=torch.quint8),
    PowerOfTwoObserver.with_args(dtype=torch.qint8, eps=2.0**-12),
)
_WEIGHT: dict[str, Any] = {"dtype": torch.qint8, "quant_min": -127, "quant_max": 127, "eps": 2.0**-12}
WEIGHTS = (
    PowerOfTwoObserver.with_args(qscheme=torch.per_tensor_symmetric, **_WEIGHT),
    PowerOfTwoChannelObserver.with_args(qscheme=torch.per_channel_symmetric, **_WEIGHT),
)


def is_power_of_two(values: Tensor) -> bool:
    return bool((torch.frexp(values).mantissa == 0.5).all())


class Shifts(Kernels):
    """Rescales by shifts."""

    def rescale(self, total: Tensor, ratio: Tensor) -> Tensor:
        assert is_power_of_two(ratio), f"no shift rescales by {ratio}"
        return total * ratio


class PowerOfTwoBackend(IntegerBackend):
    """The static claims of the integer kernels, on grids of powers of two; it declines all others."""

    def __init__(self, kernels: Make = Shifts, name: str = "power of two") -> None:
        super().__init__(kernels, name)

    def backend_config(self) -> BackendConfig:
        return static_config()

    def qconfigs(self) -> Sequence[Any] | None:
        return [QConfig(activation, weight) for activation in ACTIVATIONS for weight in WEIGHTS]

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        require_powers_of_two(reference_model)
        return super().lower(reference_model, example_inputs)


def require_powers_of_two(model: GraphModule) -> None:
    """Raise UnsupportedPattern for a model with another scale."""
    held: list[Any] = [module for module in model.modules() if hasattr(module, "weight_scale")]
    numbers: list[Any] = [node.args[1] for node in model.graph.nodes if is_quantize(node)]
    literal = [torch.tensor(number) for number in numbers if isinstance(number, float)]
    for scale in (*(module.weight_scale for module in held), *literal):
        if not is_power_of_two(scale):
            raise UnsupportedPattern(f"no power of two is scale {scale}")


def static_config() -> BackendConfig:
    """The entries of the integer kernels with their static dtype configs."""
    config = BackendConfig("static")
    for entry in small_config().configs:
        static = [each for each in entry.dtype_configs if not each.is_dynamic and each.input_dtype is not None]
        config.set_backend_pattern_config(copy.copy(entry).set_dtype_configs(static))
    return config
