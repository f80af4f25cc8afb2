"""The fuse stage: checks that fuse makes one module where it should, and keeps the model's function. (FUS)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.claims.build import PRELUDE, build_model
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import draw_calibration_inputs
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.meaning import format_difference
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, run_flow, show_graph
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.fuse.fuse import trace_and_fuse

FUSES_NOTHING = BackendConfig("fuses nothing")


def build_and_fuse(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Build a case's float model and fuse it: once per variant of a pattern with a fuser method, else once.

    Judged are the number of calls that are left (FUS-01, FUS-03) and the function that the fused model computes
    (FUS-06).
    """
    claim, case = run.claim, state.case
    state.model = build_model(case)
    variant = case.variant if claim.entry.fuser_method is not None else ""
    if variant in run.proven["fuse"]:
        return
    fuse = partial(trace_and_fuse, state.model, leaves=claim.vendor_modules)
    fused = run_flow("FUS-02", lambda: fuse(run.bench.config))
    yield from show_graph(fused, check_fused(claim, fused, lambda: fuse(FUSES_NOTHING)))
    yield from show_graph(fused, check_fused_meaning(state.model, fused, draw_calibration_inputs(case)[0]))
    run.proven["fuse"].add(variant)


@guard("fuse.check_fused")
def check_fused(claim: Claim, fused: GraphModule, unfused: Callable[[], GraphModule]) -> Iterator[Fault]:
    """Check that fuse leaves one module call of a pattern with a fuser method, else all its calls. (FUS-01, FUS-03)"""
    calls = calls_of(fused)
    if claim.entry.fuser_method is not None:
        if len(calls) != 1 or calls[0].op != "call_module":
            names = ", ".join(f"{node.op} {node.target}" for node in calls)
            yield Fault(rule="FUS-03", message=f"fuse left {len(calls)} calls, should leave one module: {names}")
    elif len(calls) != len(claim.ops):  # other ops around the pattern, or a fault
        before = len(calls_of(unfused()))
        if len(calls) != before:
            text = f"no fuser method for the pattern, yet fuse turned {before} calls into {len(calls)}"
            yield Fault(rule="FUS-01", message=text)


def calls_of(model: GraphModule) -> list[Node]:
    """List the nodes that call a module, a function or a method, but for the identity before the pattern."""
    calls = [node for node in model.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    return [node for node in calls if node.target != PRELUDE]


@guard("fuse.check_fused_meaning")
def check_fused_meaning(model: nn.Module, fused: GraphModule, inputs: tuple[Tensor, ...]) -> Iterator[Fault]:
    """Check that the fused model computes the float model's function. (FUS-06)"""
    if difference := format_difference(model, fused, inputs):
        yield Fault(rule="FUS-06", message=f"fuse changed what the model computes, {difference}")
