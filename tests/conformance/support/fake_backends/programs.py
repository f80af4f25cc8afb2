"""Vendor backends that take exported programs, in a few lines each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from fx_quant_conformance.backends.base import Capabilities, Execution, Representation
from fx_quant_conformance.backends.exporting import Compiled
from tests.conformance.support.fake_backends.faulty_graphs import Honest


class Runs(Honest):
    """Runs the program as it is."""

    name = "runs"
    representation = Representation.EXPORTED

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        run: Any = torch.no_grad()(reference_model.module())
        return Compiled(reference_model, lambda values: tree_flatten(run(*values))[0])

    def execution(self, lowered: Any) -> Execution:
        return Execution(quantized_ops=lowered.ops, float_fallbacks=())


class Subtracts(Runs):
    """Subtracts where the program adds; FAKE_FIXED mends it."""

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        for node in reference_model.graph.nodes:
            if node.target is torch.ops.aten.add.Tensor and "FAKE_FIXED" not in os.environ:
                node.target = torch.ops.aten.sub.Tensor
        reference_model.graph_module.recompile()
        return super().lower(reference_model, example_inputs)


class Static(Runs):
    """Takes no other batch than that of the example, and says so; a program with a dynamic batch is an error."""

    def capabilities(self) -> Capabilities:
        return Capabilities(float_accumulation=True, dynamic_batch=False)

    def lower(self, reference_model: Any, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        values = (node.meta.get("val") for node in reference_model.graph.nodes)
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        assert not any(isinstance(size, torch.SymInt) for size in sizes), f"a dynamic size: {sizes}"
        return super().lower(reference_model, example_inputs)


class Dynamic(Static):
    """The same compiler, which does not say so."""

    def capabilities(self) -> Capabilities:
        return Capabilities(float_accumulation=True)
