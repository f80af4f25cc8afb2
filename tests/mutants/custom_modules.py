"""A vendor with a custom module: float, observed and quantized classes of its own, and kernels that are the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance import register
from fx_quant_conformance.backends.base import Backend, Execution, Representation
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    ConvertCustomConfig,
    DTypeConfig,
    PrepareCustomConfig,
)
from tests.conformance.support.told import name_ops


class Bend(nn.Module):
    """x where it is positive, x / 8 where it is not: a shift."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * 0.125)


class ObservedBend(nn.Module):
    """What prepare puts in its place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def from_float(cls, module: Any) -> Any:
        return cls(module)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class QuantizedBend(nn.Module):
    """What convert puts in its place: it knows the grid of its output."""

    roundings = 2
    """The value is dequantized, and the product rounds."""

    def __init__(self, inner: nn.Module, scale: float, zero_point: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.scale, self.zero_point, self.dtype = inner, scale, zero_point, dtype

    @classmethod
    def from_observed(cls, module: Any) -> Any:
        observer = module.activation_post_process
        scale, zero_point = observer.calculate_qparams()
        return cls(module.inner, float(scale), int(zero_point), observer.dtype)

    def float_function(self, x: Tensor) -> Any:
        """Compute what is rounded then."""
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        """Take a quantized tensor, or floats in the decomposed form; return a quantized tensor."""
        real = x.dequantize() if x.is_quantized else x
        return torch.quantize_per_tensor(self.float_function(real), self.scale, self.zero_point, self.dtype)


class Weighed(nn.Module):
    """A factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.5, 2.0, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class QuantizedWeighed(QuantizedBend):
    """What convert puts in its place: its weight has eight bits, and is held as a reference module holds it."""

    roundings = 3
    """The value and the weight are dequantized, and the product rounds."""

    def __init__(self, inner: Any, *grid: Any) -> None:
        super().__init__(nn.Identity(), *grid)
        self.weight, self.weight_dtype = inner.weight, torch.qint8
        self.register_buffer("weight_scale", self.weight.detach().abs().max() / 127)
        self.register_buffer("weight_zero_point", torch.zeros((), dtype=torch.int64))

    def get_quantized_weight(self) -> Any:
        own: Any = self
        return (own.weight.detach() / own.weight_scale).round().to(torch.int8)

    def get_weight(self) -> Any:
        own: Any = self
        return self.get_quantized_weight() * own.weight_scale

    def float_function(self, x: Tensor) -> Any:
        return x * self.get_weight()


register(Weighed, build=lambda: nn.Sequential(Weighed(17)).eval(), inputs=[(4, 17)])
register(Bend, build=lambda: nn.Sequential(Bend()).eval(), inputs=[(4, 17)])


class CustomModules(Backend):
    """Claims the custom module, and runs its quantized class, in which ``change`` may replace the function."""

    def __init__(
        self,
        representation: Representation = Representation.QUANTIZED,
        change: Callable[[Tensor], Any] | None = None,
        *,
        is_weighted: bool = False,
    ) -> None:
        self.name, self.representation, self._change = "custom", representation, change
        kinds: tuple[type, type] = (Weighed, QuantizedWeighed) if is_weighted else (Bend, QuantizedBend)
        self._float, self._quantized = kinds

    def backend_config(self) -> BackendConfig:
        entry = BackendPatternConfig(self._float).set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8)])
        return BackendConfig("custom").set_backend_pattern_config(entry)

    def prepare_custom_config(self) -> PrepareCustomConfig:
        return PrepareCustomConfig().set_float_to_observed_mapping(self._float, ObservedBend)

    def convert_custom_config(self) -> ConvertCustomConfig:
        return ConvertCustomConfig().set_observed_to_quantized_mapping(ObservedBend, self._quantized)

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Any:
        for module in reference_model.modules():
            if isinstance(module, QuantizedBend) and self._change is not None:
                module.__dict__["float_function"] = self._change
        return torch.no_grad()(reference_model)

    def execution(self, lowered: Any) -> Execution:
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=())
