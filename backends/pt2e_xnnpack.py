"""executorch's XNNPACKQuantizer and ExecuTorch with XNNPACK's delegate: what PT2E gives to a user of that runtime.

The claims are what the Quantizer annotates, read off it by ``fx-quant-conformance claims-of`` (`pt2e_xnnpack_config`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fx_quant_conformance.backends import pt2e_xnnpack_config
from fx_quant_conformance.backends.base import Capabilities, QuantizerRequest
from fx_quant_conformance.backends.executorch import ExecuTorchBackend
from fx_quant_conformance.refimpl import BackendConfig


def make_quantizer(*, is_per_channel: bool = True, is_qat: bool = False, is_dynamic: bool = False) -> Any:
    """Return an XNNPACKQuantizer with its symmetric config for a flow, static or dynamic, and a scheme of weights."""
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    config = xnnpack.get_symmetric_quantization_config(
        is_per_channel=is_per_channel, is_qat=is_qat, is_dynamic=is_dynamic
    )
    return xnnpack.XNNPACKQuantizer().set_global(config)


def make_per_tensor() -> Any:
    """Return a Quantizer with one scale for each weight."""
    return make_quantizer(is_per_channel=False)


def make_dynamic() -> Any:
    """Return a Quantizer for dynamic activations."""
    return make_quantizer(is_dynamic=True)


def make_dynamic_per_tensor() -> Any:
    """Return a Quantizer for dynamic activations, with one scale for each weight."""
    return make_quantizer(is_per_channel=False, is_dynamic=True)


def make_qat() -> Any:
    """Return a Quantizer for training."""
    return make_quantizer(is_qat=True)


def make_qat_per_tensor() -> Any:
    """Return a Quantizer for training, with one scale for each weight."""
    return make_quantizer(is_per_channel=False, is_qat=True)


def make_dynamic_qat() -> Any:
    """Return a Quantizer for training with dynamic activations."""
    return make_quantizer(is_qat=True, is_dynamic=True)


_TRANSPOSED = (
    "nn.ConvTranspose1d",
    "nn.ConvTranspose2d",
    "nn.ConvTranspose3d",
    "torch.conv_transpose1d",
    "torch.conv_transpose2d",
    "torch.conv_transpose3d",
)


class Pt2eXnnpackBackend(ExecuTorchBackend):
    """ExecuTorch's runtime with XNNPACK's delegate, under the claims of executorch's XNNPACKQuantizer."""

    name = "pt2e-xnnpack"
    waivers = Path(__file__).with_name("pt2e_xnnpack.waivers.toml")

    def backend_config(self) -> BackendConfig:
        """Return what the Quantizer annotates."""
        return pt2e_xnnpack_config.backend_config()

    def capabilities(self) -> Capabilities:
        """Return those of ExecuTorch, with the Quantizer's schemes of weights; the delegate makes biases int32.

        The Quantizer leaves transposed convolutions of several groups float.
        """
        common = super().capabilities()
        limits = {**common.limits, **{op: {"groups": (1,)} for op in _TRANSPOSED}}
        return replace(common, weight_schemes=pt2e_xnnpack_config.WEIGHT_SCHEMES, lowers_bias=True, limits=limits)

    def quantizer(self, request: QuantizerRequest) -> Any:
        """Return the Quantizer with its symmetric config for such claims."""
        if request.weight_scheme not in ("", *pt2e_xnnpack_config.WEIGHT_SCHEMES):
            return None
        return make_quantizer(
            is_per_channel=request.weight_scheme != "per_tensor_symmetric",
            is_qat=request.is_qat,
            is_dynamic=request.is_dynamic,
        )


def make_dynamic_qat_per_tensor() -> Any:
    """Return a Quantizer for training with dynamic activations, with one scale for each weight."""
    return make_quantizer(is_per_channel=False, is_qat=True, is_dynamic=True)
