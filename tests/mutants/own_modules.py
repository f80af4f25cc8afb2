"""A vendor with layers and reference modules of its own, of every kind: they derive from torch's, or from nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import register
from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from tests.conformance.support.fake_backends.reporting import ReportingReference

DTYPES = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


class PositiveZeroReference(nnqr.Linear):
    """Torch's, but for a zero that is never negative."""

    @classmethod
    def from_float(cls, float_linear: Any, weight_qparams: dict[str, Any]) -> Any:
        make: Any = nnqr.Linear.from_float
        made = make(float_linear, weight_qparams)
        made.__class__ = cls
        return made

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return F.linear(x, own.get_weight(), self.bias) + 0.0


def bend(y: Tensor) -> Tensor:
    return torch.where(y > 0, y, y * 0.125)


class BentLinear(nn.Linear):
    """A layer whose negative results are an eighth."""

    def forward(self, input: Tensor) -> Tensor:
        return bend(super().forward(input))


class BentReference(PositiveZeroReference):
    """The same with a quantized weight."""

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self
        return bend(F.linear(x, own.get_weight(), self.bias))


class OwnWeight(nn.Module):
    """A reference module that derives from none of torch's: it holds integers and their qparams."""

    def __init__(self, layer: Any, qparams: dict[str, Any]) -> None:
        super().__init__()
        scale, zero_point = (torch.as_tensor(qparams[name]) for name in ("scale", "zero_point"))
        self.weight_dtype, self.weight_axis = qparams["dtype"], qparams.get("axis", 0)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("weight_zero_point", zero_point)
        self.weight = layer.weight
        self.bias = getattr(layer, "bias", None)
        steps = self.rounded(layer.weight.detach() / self._along(scale) + self._along(zero_point))
        self.register_buffer("integers", steps.clamp(qparams["quant_min"], qparams["quant_max"]).to(torch.int8))

    @classmethod
    def from_float(cls, layer: Any, weight_qparams: dict[str, Any]) -> Any:
        return cls(layer, weight_qparams)

    def rounded(self, steps: Tensor) -> Tensor:
        return steps.round()

    def _along(self, numbers: Tensor) -> Tensor:
        return numbers.reshape(-1, *[1] * (numbers.numel() > 1))

    def get_quantized_weight(self) -> Tensor:
        integers: Any = self.integers
        return integers  # type: ignore[no-any-return]

    def get_weight(self) -> Tensor:
        scale, zero_point = (self._along(getattr(self, f"weight_{name}")) for name in ("scale", "zero_point"))
        return (self.get_quantized_weight() - zero_point) * scale


class OwnLinearReference(OwnWeight):
    """A linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.get_weight(), self.bias)


class RoundedDown(OwnLinearReference):
    """One whose weight is off by up to a step, and whose kernels agree."""

    def rounded(self, steps: Tensor) -> Tensor:
        return steps.floor()


class Gains(nn.Module):
    """A root of the vendor's own: a factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.5, 2.0, channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class GainsReference(OwnWeight):
    """The same with a quantized weight."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_weight()


LAYERS: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
    "derived reference": (nn.Linear, PositiveZeroReference),
    "independent reference": (nn.Linear, OwnLinearReference),
    "derived root": (BentLinear, BentReference),
    "own root": (Gains, GainsReference),
}
"""Roots and their reference modules."""

register(BentLinear, build=lambda: nn.Sequential(BentLinear(17, 9)).eval(), inputs=[(4, 17)])
# a right kernel rounds the value, the factor, and the product
register(Gains, build=lambda: nn.Sequential(Gains(17)).eval(), inputs=[(4, 17)], roundings=3)


class OwnModules(ReportingReference):
    """Claims one layer, and runs the reference model, in which ``change`` may replace a module."""

    def __init__(
        self, layer: str, change: Callable[[Any], Any] | None = None, reference: type[nn.Module] | None = None
    ) -> None:
        root, own = LAYERS[layer]
        self.name, self._layer, self._change = layer, (root, reference or own), change

    def backend_config(self) -> BackendConfig:
        root, reference = self._layer
        entry = BackendPatternConfig(root).set_dtype_configs([DTYPES])
        return BackendConfig("own").set_backend_pattern_config(
            entry.set_root_module(root).set_reference_quantized_module(reference)
        )

    def capabilities(self) -> Capabilities:
        schemes = ("per_tensor_symmetric", *["per_channel_symmetric"] * (self._layer[0] is not Gains))
        return Capabilities(weight_schemes=schemes, float_accumulation=True)

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Any:
        if self._change is not None:
            for name, module in list(reference_model.named_modules()):
                if isinstance(module, self._layer[1]):
                    reference_model.set_submodule(name, self._change(module))
        return super().lower(reference_model, example_inputs)
