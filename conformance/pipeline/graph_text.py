"""Graphs as text: a line for each call, for a reader who compares a pattern before the flow with what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from conformance.claims.claim import Claim
from conformance.claims.traits import own_modules_of
from conformance.stages.convert import ReferenceCase
from conformance.stages.fuse import FUSES_NOTHING, BuiltCase
from conformance.stages.lower import LoweredCase
from conformance.stages.stage import CaseResult
from refimpl.fuse import trace_and_fuse
from refimpl.tracing import attribute_of

MOST_LINES = 60


def spell_graph(model: Callable[..., Any]) -> str:
    """Spell a model's graph; "" for other than a GraphModule: only its author knows what it does."""
    if not isinstance(model, GraphModule):
        return ""
    lines = [_spell_line(node, model) for node in model.graph.nodes if node.op != "get_attr"]
    omitted = [f"… and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *omitted])


def _spell_line(node: Node, model: GraphModule) -> str:
    spell = partial(_spell, model=model)
    if node.op == "output":
        return f"return {spell(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name} = input"
    words = [spell(value) for value in node.args] + [f"{key}={spell(value)}" for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{node.name} = {words[0]}.{node.target}({', '.join(words[1:])})"
    return f"{node.name} = {_spell_callee(node, model)}({', '.join(words)})"


def _spell_callee(node: Node, model: GraphModule) -> str:
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


def graphs_of(claim: Claim, results: Sequence[CaseResult]) -> dict[str, str]:
    """Return the graphs of a case before and after, as far as it came."""
    models: dict[str, Callable[[], Any]] = {}
    for result in results:
        if isinstance(result, BuiltCase):
            models["float model"] = partial(trace_and_fuse, result.model, FUSES_NOTHING, leaves=own_modules_of(claim))
        elif isinstance(result, ReferenceCase):
            models["reference model"] = partial(getattr, result, "model")
        elif isinstance(result, LoweredCase):
            models["lowered model"] = partial(getattr, result.model, "graph_module", result.model)
    return {name: text for name, model in models.items() if (text := _spell_or_omit(model))}


def _spell_or_omit(model: Callable[[], Any]) -> str:
    """Spell a model's graph; "" without one: not made yet, not traceable, or of a vendor's own kind."""
    try:
        return spell_graph(model())
    except Exception:  # the stages report faults; a graph that is not shown costs no verdict
        return ""
