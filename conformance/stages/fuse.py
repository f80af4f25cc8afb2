"""The fuse stage: checks that fuse makes one module where it should, and keeps the model's function. (FUS)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.claims.build import PRELUDE, build_model
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import draw_calibration_inputs
from conformance.machine.guard import guard
from conformance.stages.meaning import describe_difference
from conformance.stages.stage import CaseResult, CaseStage, Problem, raise_problem, run_flow
from refimpl import BackendConfig
from refimpl.fuse import trace_and_fuse

FUSES_NOTHING = BackendConfig("fuses nothing")


@dataclass(frozen=True, kw_only=True)
class BuiltCase(CaseResult):
    """The float model of a case."""

    case: Case
    model: nn.Module


class FuseStage(CaseStage[Case, BuiltCase]):
    """Builds a case's float model and fuses it: once per variant of a pattern with a fuser method, else once.

    Judged are the number of calls that are left (FUS-01, FUS-03) and the function that the fused model computes
    (FUS-06). A fault refutes the claim; its evidence is the fused graph.
    """

    name = "fuse"

    def run(self, before: Case) -> BuiltCase:
        """Build and fuse the model. Raises StageError for a fault."""
        built = self.partial_result = BuiltCase(case=before, model=build_model(before))
        variant = before.variant if self.claim.entry.fuser_method is not None else ""
        if variant in self.proven:
            return built
        fuse = partial(trace_and_fuse, built.model, leaves=self.claim.own_modules)
        fused = run_flow("FUS-02", lambda: fuse(self.bench.config))
        raise_problem(check_fused(self.claim, fused, lambda: fuse(FUSES_NOTHING)), fused)
        raise_problem(check_fused_meaning(built.model, fused, draw_calibration_inputs(before)[0]), fused)
        self.proven.add(variant)
        return built


@guard("fuse.check_fused")
def check_fused(claim: Claim, fused: GraphModule, unfused: Callable[[], GraphModule]) -> Problem | None:
    """Check that fuse leaves one module call of a pattern with a fuser method, else all its calls. (FUS-01, FUS-03)"""
    calls = calls_of(fused)
    if claim.entry.fuser_method is not None:
        if len(calls) != 1 or calls[0].op != "call_module":
            names = ", ".join(f"{node.op} {node.target}" for node in calls)
            return Problem(rule="FUS-03", message=f"fuse left {len(calls)} calls, should leave one module: {names}")
        return None
    if len(calls) != len(claim.ops):  # other ops around the pattern, or a fault
        before = len(calls_of(unfused()))
        if len(calls) != before:
            text = f"no fuser method for the pattern, yet fuse turned {before} calls into {len(calls)}"
            return Problem(rule="FUS-01", message=text)
    return None


def calls_of(model: GraphModule) -> list[Node]:
    """List the nodes that call a module, a function or a method, but for the identity before the pattern."""
    calls = [node for node in model.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    return [node for node in calls if node.target != PRELUDE]


@guard("fuse.check_fused_meaning")
def check_fused_meaning(model: nn.Module, fused: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """Check that the fused model computes the float model's function. (FUS-06)"""
    difference = describe_difference(model, fused, inputs)
    return Problem(rule="FUS-06", message=f"fuse changed what the model computes, {difference}") if difference else None
