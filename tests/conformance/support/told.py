"""What backends of the tests tell of what they run: that all ops of the reference model ran on integers."""

from __future__ import annotations

import inspect
from typing import Any

from torch.fx import GraphModule

from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize


def name_ops(lowered: Any) -> tuple[str, ...]:
    """Name the ops of the reference model that a lowered model is or interprets; for any other, those of claims."""
    model = inspect.unwrap(lowered)
    model = getattr(getattr(model, "__self__", None), "module", model)  # an interpreter's
    if not isinstance(model, GraphModule):
        return ("op0", "add")
    calls = [node for node in model.graph.nodes if node.op.startswith("call_")]
    return tuple(node.name for node in calls if not is_quantize(node) and not is_dequantize(node))
