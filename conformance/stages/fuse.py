"""The fuse stage: is the pattern one module where it should be, and does that module mean the same? (FUS)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.claims.build import build_model
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import calibration_inputs
from conformance.claims.traits import own_modules
from conformance.machine.guard import guard
from conformance.stages.bench import Bench
from conformance.stages.meaning import difference_of
from conformance.stages.stage import CaseResult, CaseStage, Problem, raise_problem, run_flow
from refimpl import BackendConfig
from refimpl.fuse import fused_model
from refimpl.patterns import leaves

FUSES_NOTHING = BackendConfig("fuses nothing")


@dataclass(frozen=True, kw_only=True)
class BuiltCase(CaseResult):
    """The float model of a case."""

    case: Case
    model: nn.Module


class FuseStage(CaseStage[Case, BuiltCase]):
    """Builds the model, and fuses it: each variant of a pattern that is fused, else one."""

    name = "fuse"

    def __init__(self, bench: Bench, claim: Claim) -> None:
        super().__init__(bench, claim)
        self._proven: set[str] = set()

    def run(self, before: Case) -> BuiltCase:
        """Build the model. Raises StageError for what fuse leaves or changes."""
        built = self.made = BuiltCase(case=before, model=build_model(before))
        variant = before.variant if self.claim.entry.fuser_method is not None else ""
        if variant in self._proven:
            return built
        fuse = partial(fused_model, built.model, leaves=own_modules(self.claim))
        fused = run_flow("FUS-02", lambda: fuse(self.bench.config))
        problem = check_fused(self.claim, fused, lambda: fuse(FUSES_NOTHING))
        if problem is None:
            problem = check_fused_meaning(built.model, fused, calibration_inputs(before)[0])
        raise_problem(problem, fused)
        self._proven.add(variant)
        return built


@guard("fuse.check_fused")
def check_fused(claim: Claim, fused: GraphModule, unfused: Callable[[], GraphModule]) -> Problem | None:
    """A pattern with a fuser method is one module call after fuse; one without keeps its ops. (FUS-01, FUS-03)"""
    calls = calls_of(fused)
    if claim.entry.fuser_method is not None:
        if len(calls) != 1 or calls[0].op != "call_module":
            names = ", ".join(f"{node.op} {node.target}" for node in calls)
            return Problem(rule="FUS-03", message=f"fuse left {len(calls)} calls, should leave one module: {names}")
        return None
    if len(calls) != sum(1 for _ in leaves(claim.entry.normal_pattern)):  # other ops around the pattern, or a fault
        before = len(calls_of(unfused()))
        if len(calls) != before:
            text = f"no fuser method for the pattern, yet fuse turned {before} calls into {len(calls)}"
            return Problem(rule="FUS-01", message=text)
    return None


def calls_of(model: GraphModule) -> list[Node]:
    """List the nodes that call a module, a function or a method."""
    return [node for node in model.graph.nodes if node.op in ("call_module", "call_function", "call_method")]


@guard("fuse.check_fused_meaning")
def check_fused_meaning(model: nn.Module, fused: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The fused model computes the float model's function. (FUS-06)"""
    difference = difference_of(model, fused, inputs)
    return Problem(rule="FUS-06", message=f"fuse changed what the model computes, {difference}") if difference else None
