"""Graphs of a claim's case, for a reader who compares a pattern before the flow with what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fx_quant_conformance.backends.base import Lowered
from fx_quant_conformance.backends.graph_text import format_graph
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.stages.fuse import FUSES_NOTHING
from fx_quant_conformance.conformance.stages.state import CaseState
from fx_quant_conformance.refimpl.fuse.fuse import trace_and_fuse


def graphs_of(claim: Claim, state: CaseState) -> dict[str, str]:
    """Return the graphs of a case before and after, as far as it came."""
    models: dict[str, Callable[[], Any]] = {
        "float model": lambda: trace_and_fuse(state.model, FUSES_NOTHING, leaves=claim.vendor_modules),
        "reference model": lambda: state.reference,
        "lowered model": lambda: state.lowered,
    }
    return {name: text for name, model in models.items() if (text := _format_or_omit(model))}


def _format_or_omit(model: Callable[[], Any]) -> str:
    """Spell a model's graph; "" without one: not made yet, not traceable, or of a vendor's own kind."""
    try:
        made = model()
        return made.graph() if isinstance(made, Lowered) else format_graph(made)
    except Exception:  # the stages report faults; a graph that is not shown costs no verdict
        return ""
