"""Graphs as text: a line for each call, for a reader who compares a pattern before the flow with what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from conformance.claims.claim import Claim
from conformance.claims.traits import own_modules
from conformance.stages.convert import ReferenceCase
from conformance.stages.fuse import FUSES_NOTHING, BuiltCase
from conformance.stages.lower import LoweredCase
from conformance.stages.stage import CaseResult
from refimpl.fuse import fused_model
from refimpl.tracing import attribute_of

MOST_LINES = 60


def graph_text(model: Callable[..., Any]) -> str:
    """Spell a model's graph out; "" of what is no GraphModule: only its author knows what it does."""
    if not isinstance(model, GraphModule):
        return ""
    lines = [_line(node, model) for node in model.graph.nodes if node.op != "get_attr"]
    more = [f"… and {len(lines) - MOST_LINES} lines more"] if len(lines) > MOST_LINES else []
    return "\n".join([*lines[:MOST_LINES], *more])


def _line(node: Node, model: GraphModule) -> str:
    spelled = partial(_spelled, model=model)
    if node.op == "output":
        return f"return {spelled(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name} = input"
    given = [spelled(each) for each in node.args] + [f"{key}={spelled(each)}" for key, each in node.kwargs.items()]
    if node.op == "call_method":
        return f"{node.name} = {given[0]}.{node.target}({', '.join(given[1:])})"
    return f"{node.name} = {_called(node, model)}({', '.join(given)})"


def _called(node: Node, model: GraphModule) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", None) or node.target)


def _spelled(value: object, model: GraphModule) -> str:
    """An argument: nodes by their names, numbers that the model holds by their values, unknown kinds by their type."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spelled(each, model) for each in value)}]"
    if isinstance(value, Node) and value.op == "get_attr":
        held = attribute_of(model, str(value.target))
        return f"{held.item():.6g}" if isinstance(held, Tensor) and held.dim() == 0 else f"self.{value.target}"
    plain = (Node, str, int, float, bool, type(None), slice, torch.dtype)
    return str(value) if isinstance(value, plain) else type(value).__name__


def graphs_of(claim: Claim, results: Sequence[CaseResult]) -> dict[str, str]:
    """Return the graphs of a case before and after, as far as it came."""
    models: dict[str, Callable[[], Any]] = {}
    for result in results:
        if isinstance(result, BuiltCase):
            models["float model"] = partial(fused_model, result.model, FUSES_NOTHING, leaves=own_modules(claim))
        elif isinstance(result, ReferenceCase):
            models["reference model"] = partial(getattr, result, "model")
        elif isinstance(result, LoweredCase):
            models["lowered model"] = partial(getattr, result.model, "graph_module", result.model)
    return {name: text for name, model in models.items() if (text := _graph(model))}


def _graph(model: Callable[[], Any]) -> str:
    """A model's graph; "" where there is none: not made yet, not traceable, or of a vendor's own kind."""
    try:
        return graph_text(model())
    except Exception:  # the stages tell what is wrong; a graph that is not shown costs no verdict
        return ""
