"""Graphs as text: a line for each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.graph.tracing import attribute_of

MOST_LINES = 60


def format_graph(model: Callable[..., Any]) -> str:
    """Spell a model's graph; "" for other than a GraphModule: only its author knows what it does."""
    if not isinstance(model, GraphModule):
        return ""
    lines = [_format_line(node, model) for node in model.graph.nodes if node.op != "get_attr"]
    omitted = [f"… and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *omitted])


def _format_line(node: Node, model: GraphModule) -> str:
    spell = partial(_spell, model=model)
    if node.op == "output":
        return f"return {spell(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name} = input"
    words = [spell(value) for value in node.args] + [f"{key}={spell(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{node.name} = {words[0]}.{node.target}({', '.join(words[1:])})"
    return f"{node.name} = {_format_callee(node, model)}({', '.join(words)})"


def _format_callee(node: Node, model: GraphModule) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", None) or node.target)


def _spell(value: object, model: GraphModule) -> str:
    """Spell an argument: nodes by name, numbers that the model holds by value, unknown kinds by their type."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spell(item, model) for item in value)}]"
    if isinstance(value, Node) and value.op == "get_attr":
        state = attribute_of(model, str(value.target))
        return f"{state.item():.6g}" if isinstance(state, Tensor) and state.dim() == 0 else f"self.{value.target}"
    plain = (Node, str, int, float, bool, type(None), slice, torch.dtype)
    return str(value) if isinstance(value, plain) else type(value).__name__
