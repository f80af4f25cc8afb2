"""Graphs of a claim's case, for a reader who compares a pattern before the flow with what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from conformance.claims.claim import Claim
from conformance.remote.client import ElsewhereModel
from conformance.remote.graph_spelling import spell_graph
from conformance.stages.convert import ReferenceCase
from conformance.stages.fuse import FUSES_NOTHING, BuiltCase
from conformance.stages.lower import LoweredCase
from conformance.stages.stage import CaseResult
from refimpl.fuse import trace_and_fuse


def graphs_of(claim: Claim, results: Sequence[CaseResult]) -> dict[str, str]:
    """Return the graphs of a case before and after, as far as it came."""
    models: dict[str, Callable[[], Any]] = {}
    for result in results:
        if isinstance(result, BuiltCase):
            models["float model"] = partial(trace_and_fuse, result.model, FUSES_NOTHING, leaves=claim.own_modules)
        elif isinstance(result, ReferenceCase):
            models["reference model"] = partial(getattr, result, "model")
        elif isinstance(result, LoweredCase):
            models["lowered model"] = partial(getattr, result.model, "graph_module", result.model)
    return {name: text for name, model in models.items() if (text := _spell_or_omit(model))}


def _spell_or_omit(model: Callable[[], Any]) -> str:
    """Spell a model's graph; "" without one: not made yet, not traceable, or of a vendor's own kind."""
    try:
        made = model()
        return made.spell_graph() if isinstance(made, ElsewhereModel) else spell_graph(made)
    except Exception:  # the stages report faults; a graph that is not shown costs no verdict
        return ""
