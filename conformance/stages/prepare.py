"""The prepare stage: the pattern has the claim's dtype config, and is observed as its type says (PAT, DTY, OBS).

A claim that is not static has observers in other places: `conformance.stages.dynamic_checks`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.claims.build import PRELUDE
from conformance.claims.claim import Claim
from conformance.claims.inputs import Batch, calibration_inputs
from conformance.claims.qconfigs import INTEGERS, kind_of
from conformance.machine.guard import guard
from conformance.stages.bench import Bench
from conformance.stages.calibration import keeps_statistics, prepare_case
from conformance.stages.dynamic_checks import check_prepared_dynamic
from conformance.stages.fuse import BuiltCase
from conformance.stages.meaning import difference_of
from conformance.stages.ranges import check_ranges
from conformance.stages.stage import CaseResult, CaseStage, Problem, raise_problem, run_flow
from refimpl import ObservationType, RefimplError, explain
from refimpl.plan import Decision
from reports.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class PreparedCase(CaseResult):
    """The prepared and calibrated model of a case.

    ``misfit``: a grid that does not hold what calibration has seen, which the convert stage reports.
    """

    built: BuiltCase
    model: GraphModule
    misfit: Problem | None = None


class PrepareStage(CaseStage[BuiltCase, PreparedCase]):
    """Prepares and calibrates the model, in the flow of the claim."""

    name = "prepare"

    def __init__(self, bench: Bench, claim: Claim) -> None:
        super().__init__(bench, claim)
        self.first: GraphModule | None = None
        """The first prepared model, whose decisions are shown."""
        self._trains_alike: set[str] = set()
        self._ranges_fit: set[str] = set()

    def run(self, before: BuiltCase) -> PreparedCase:
        """Prepare and calibrate. Raises StageError for what prepare refuses, or decides otherwise than claimed."""
        problems: list[Problem] = []
        misfits: list[Problem] = []

        def untrained(prepared: GraphModule) -> None:
            """Training changes some models only by statistics: only now can anybody tell what these compute."""
            if before.case.variant not in self._trains_alike and keeps_statistics(prepared):
                inputs = calibration_inputs(before.case)[0]
                if (problem := check_trained_meaning(before.model, prepared, inputs)) is None:
                    self._trains_alike.add(before.case.variant)
                else:
                    problems.append(problem)

        def calibrated(prepared: GraphModule, batches: tuple[Batch, ...]) -> None:
            """Later the ranges are those of the regime."""
            if self.claim.flow != "ptq" or before.case.variant in self._ranges_fit:
                return
            with contextlib.suppress(RefimplError):  # which the convert stage finds as well
                if (problem := check_ranges(self.bench.convert(prepared), batches)) is not None:
                    misfits.append(problem)
            if not misfits:
                self._ranges_fit.add(before.case.variant)

        asked = (self.claim, before.case, before.model, self.bench.config, untrained, calibrated)
        prepared = run_flow("OBS-15", lambda: prepare_case(*asked))
        raise_problem(next(iter(problems), None), prepared)
        self.first = self.first or prepared
        raise_problem(check_prepared(self.claim, prepared), prepared)
        return PreparedCase(built=before, model=prepared, misfit=next(iter(misfits), None))


@guard("prepare.check_prepared")
def check_prepared(claim: Claim, prepared: GraphModule) -> Problem | None:
    """The pattern is quantized by the claim's dtype config, and observed as its observation type says."""
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return check_unobserved(claim, prepared)
    decision = decision_of(claim, prepared)
    if decision is None:
        matches = ", ".join(f"{each.pattern} at {each.node}" for each in explain(prepared).plan.decisions) or "none"
        return Problem(rule="PAT-07", message=f"expected one match of the pattern; found {matches}")
    if decision.dtype_config is None:
        return Problem(rule="DTY-02", message=f"the pattern stays float: {decision.reason}")
    if decision.dtype_config != claim.dtypes:
        return Problem(
            rule="DTY-02",
            verdict=Verdict.UNEXERCISED,
            message="an earlier dtype config of the entry takes every QConfig that this one would take",
        )
    if kind_of(claim.dtypes) not in INTEGERS:
        return check_prepared_dynamic(claim, prepared)
    return check_observation_type(claim, decision, prepared) or check_observers(decision, prepared)


@guard("prepare.check_unobserved")
def check_unobserved(claim: Claim, prepared: GraphModule) -> Problem | None:
    """What reads a shape is in the graph, and nothing observes it. (OBS-03, OBS-10)"""
    readers = {node.name for node in prepared.graph.nodes if node.target == claim.entry.normal_pattern}
    if not readers:
        text = f"an entry that can never match: no node calls {claim.pattern}, not even where a model uses it"
        return Problem(rule="PAT-03", verdict=Verdict.UNEXERCISED, message=text)
    observed = sorted(readers & {slot.value for slot in explain(prepared).plan.slots})
    return (
        Problem(rule="OBS-03", message=f"observed, though it is no tensor: {', '.join(observed)}") if observed else None
    )


def decision_of(claim: Claim, prepared: GraphModule) -> Decision | None:
    """Return the decision on the claim's pattern; None if there are none or several.

    It is the one by the claim's entry; a pattern that was fused is decided by the fused module's entry, and is the only
    one but for what stands before the pattern.
    """
    decisions = explain(prepared).plan.decisions
    own = [each for each in decisions if each.entry == claim.index]
    if len(own) != 1:
        own = [each for each in decisions if each.target != PRELUDE]
    return own[0] if len(own) == 1 else None


@guard("prepare.check_observation_type")
def check_observation_type(claim: Claim, decision: Decision, prepared: GraphModule) -> Problem | None:
    """The type in force is the claim's; a pattern that was fused is observed as the fused module's entry says."""
    if claim.entry.fuser_method is not None:
        return None
    root = next(node for node in prepared.graph.nodes if node.name == decision.root)
    inputs = sum(isinstance(argument, Node) for argument in root.args)
    claimed = claim.entry._num_tensor_args_to_observation_type.get(inputs, claim.entry.observation_type)
    if decision.observation is claimed:
        return None
    rule = "OBS-07" if claim.entry._num_tensor_args_to_observation_type else "OBS-01"
    return Problem(rule=rule, message=f"observed as {decision.observation.name}; the claim says {claimed.name}")


@guard("prepare.check_observers")
def check_observers(decision: Decision, prepared: GraphModule) -> Problem | None:
    """Every input is observed; the output has an observer of its own, or shares that of the inputs. (OBS-01, OBS-02)"""
    slots = explain(prepared).plan.slots
    inputs = {slot.group for slot in slots if slot.role != "weight" and slot.value not in decision.nodes}
    outputs = {slot.group for slot in slots if slot.role == "output" and slot.value in decision.nodes}
    placeholders = [node.name for node in prepared.graph.nodes if node.op == "placeholder"]
    missing = set(placeholders) - {slot.value for slot in slots if slot.role == "input"}
    if missing:
        return Problem(rule="OBS-01", message=f"inputs without an observer: {', '.join(sorted(missing))}")
    if decision.observation is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
        if len(inputs | outputs) != 1:
            return Problem(rule="OBS-02", message=f"one observer should be shared; found {inputs} and {outputs}")
    elif len(outputs) != 1 or inputs & outputs:
        return Problem(rule="OBS-01", message=f"output should have its own observer; found {inputs} and {outputs}")
    return None


@guard("prepare.check_trained_meaning")
def check_trained_meaning(model: nn.Module, prepared: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """A model that is prepared for training, and not trained yet, computes the float model's function. (QAT-01)"""
    prepared.eval()
    difference = difference_of(model, prepared, inputs)
    prepared.train()
    text = f"the modules for training compute something else, {difference}"
    return Problem(rule="QAT-01", message=text) if difference else None
