"""torchao's X86InductorQuantizer and TorchInductor: what PT2E gives to a user of an x86 CPU.

The claims are what the Quantizer annotates, read off it by ``fx-quant-conformance claims-of`` (`pt2e_x86_config`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fx_quant_conformance.backends import pt2e_x86_config
from fx_quant_conformance.backends.base import Capabilities, QuantizerRequest
from fx_quant_conformance.backends.exporting import ExportingBackend
from fx_quant_conformance.backends.inductor import InductorBackend
from fx_quant_conformance.refimpl import BackendConfig


def make_quantizer(*, is_qat: bool = False, is_dynamic: bool = False) -> Any:
    """Return an X86InductorQuantizer with its default config for a flow, and for static or dynamic activations."""
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config(is_qat=is_qat, is_dynamic=is_dynamic)
    return x86.X86InductorQuantizer().set_global(config)


def make_dynamic() -> Any:
    """Return a Quantizer for dynamic activations."""
    return make_quantizer(is_dynamic=True)


def make_qat() -> Any:
    """Return a Quantizer for training."""
    return make_quantizer(is_qat=True)


def make_dynamic_qat() -> Any:
    """Return a Quantizer for training with dynamic activations."""
    return make_quantizer(is_qat=True, is_dynamic=True)


def _is_one_shape(shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Both tensors have one shape."""
    return len(set(shapes)) == 1


class Pt2eX86Backend(InductorBackend):
    """TorchInductor's CPU code generator under the claims of torchao's X86InductorQuantizer."""

    name = "pt2e-x86"
    packages = ("torchao",)
    waivers = Path(__file__).with_name("pt2e_x86.waivers.toml")

    def backend_config(self) -> BackendConfig:
        """Return what the Quantizer annotates."""
        return pt2e_x86_config.backend_config()

    def unavailable_reason(self) -> str | None:
        """Name the package that is missing, or the C++ compiler."""
        return ExportingBackend.unavailable_reason(self) or super().unavailable_reason()

    def capabilities(self) -> Capabilities:
        """Return those of Inductor, with the Quantizer's scheme of weights; products that broadcast are left float."""
        common = super().capabilities()
        of_one_shape = {op: {**common.limits[op], "shape": _is_one_shape} for op in ("operator.mul", "torch.mul")}
        schemes = pt2e_x86_config.WEIGHT_SCHEMES
        return replace(common, weight_schemes=schemes, limits={**common.limits, **of_one_shape})

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Return the Quantizer with its default config, whose weights have a scale per channel."""
        if request.weight_scheme not in ("", *pt2e_x86_config.WEIGHT_SCHEMES):
            return None
        return make_quantizer(is_qat=request.is_qat, is_dynamic=request.is_dynamic)
