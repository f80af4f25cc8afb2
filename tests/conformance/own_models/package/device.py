"""A backend of the user's own: QNNPACK's kernels, and the same with a fault in convolutions of stride 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.qnnpack import QnnpackBackend


class Device(QnnpackBackend):
    """QNNPACK without its waivers."""

    waivers = None  # type: ignore[assignment]


class Faulty(Device):
    """Convolutions of stride 2 have weights that are 5 % too large."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Plant the fault."""
        for module in reference_model.modules():
            if isinstance(module, nn.Conv2d) and module.stride == (2, 2):
                with torch.no_grad():
                    module.weight.mul_(1.05)
        return super().lower(reference_model, example_inputs)


class Fixed(Device):
    """Takes only batches of the example's size."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Hold each run to the size."""
        lowered, size = super().lower(reference_model, example_inputs), len(example_inputs[0])

        def run(*inputs: torch.Tensor) -> Any:
            if len(inputs[0]) != size:
                raise ValueError(f"compiled for a batch of {size}")
            return lowered(*inputs)

        self.inner = lowered
        return run

    def execution(self, lowered: Callable[..., Any]) -> Any:
        """Say what QNNPACK's model executed."""
        return super().execution(self.inner)
