"""The reference backend runs the reference model itself: what it fails is a fault of the suite or of the config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from backends.base import Backend, Capabilities, Representation
from backends.native_tables import native_config
from refimpl import BackendConfig


class ReferenceBackend(Backend):
    """Claims what qnnpack claims, the widest of the native configs, and computes it in float between q and dq.

    It has no quantized kernels, so it gives no account of its execution: the suite asks only for right numbers.
    """

    name = "reference"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        """Return qnnpack's claims under this backend's name."""
        return native_config("qnnpack").set_name(self.name)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the reference model, run without gradients."""
        return torch.no_grad()(reference_model)

    def capabilities(self) -> Capabilities:
        """Every weight scheme; float32 arithmetic accumulates rounding errors."""
        return Capabilities(weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"), float_accumulation=True)

    def versions(self) -> dict[str, str]:
        """The reference model is run by torch."""
        return {"torch": torch.__version__}
