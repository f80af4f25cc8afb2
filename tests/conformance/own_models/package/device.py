"""Backends of the user's own: QNNPACK's kernels, a compiler of programs, and both with a fault in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten

from fx_quant_conformance.backends.base import Execution, Representation
from fx_quant_conformance.backends.exporting import Compiled
from fx_quant_conformance.backends.reference import ReferenceBackend
from fx_quant_conformance.backends.torch_engines.qnnpack import QnnpackBackend
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, quint8


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


class Programs(ReferenceBackend):
    """Takes exported programs, and runs them."""

    representation = Representation.EXPORTED

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the program's module."""
        run: Any = torch.no_grad()(reference_model.module())
        return Compiled(reference_model, lambda values: tree_flatten(run(*values))[0])

    def execution(self, lowered: Any) -> Any:
        """Say that nothing ran in float."""
        return Execution(quantized_ops=lowered.ops, float_fallbacks=())


class Clamp(nn.Module):
    """An op of the device's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep what is between -1 and 1."""
        return x.clamp(-1.0, 1.0)


class OwnClass(Programs):
    """Claims an op of its own too, so that models are judged beside its code."""

    def backend_config(self) -> BackendConfig:
        """Add an entry for the op."""
        types = DTypeConfig(input_dtype=quint8, output_dtype=quint8)
        entry = BackendPatternConfig(Clamp).set_dtype_configs([types])
        return super().backend_config().set_backend_pattern_config(entry)


class FaultyPrograms(Programs):
    """Convolutions of stride 2, and attention, give what is 5 % too large."""

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Plant the fault."""
        aten = torch.ops.aten
        for node in reference_model.graph.nodes:
            is_down = node.target is aten.conv2d.default and node.args[3] == [2, 2]
            if is_down or node.target is aten.scaled_dot_product_attention.default:
                node.target = _exaggerate(node.target)
        reference_model.graph_module.recompile()
        return super().lower(reference_model, example_inputs)


def _exaggerate(function: Callable[..., Any]) -> Callable[..., Any]:
    def exaggerated(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options) * 1.05

    return exaggerated
