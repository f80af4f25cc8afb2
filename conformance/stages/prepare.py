"""The prepare stage: checks that the pattern has the claim's dtype config and the right observers. (PAT, DTY, OBS)

A claim that is not static has observers in other places: `conformance.stages.dynamic_checks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.claims.build import PRELUDE
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.claims.kinds import INTEGERS
from fx_quant_conformance.conformance.machine.fault import Fault, raise_first
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.calibration import prepare_case
from fx_quant_conformance.conformance.stages.dynamic_checks import check_prepared_dynamic
from fx_quant_conformance.conformance.stages.following import find_difference
from fx_quant_conformance.conformance.stages.ranges import check_ranges
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, run_flow, show_graph
from fx_quant_conformance.conformance.stages.unrounded import without_observers
from fx_quant_conformance.refimpl import ObservationType, RefimplError, explain
from fx_quant_conformance.refimpl.graph.tracing import positional_arguments_of
from fx_quant_conformance.refimpl.prepare.plan import Decision
from fx_quant_conformance.reports.verdicts import Verdict


def prepare_and_calibrate(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Prepare and calibrate a case's float model, in the flow of the claim.

    Judged are the decision on the pattern (PAT-07, DTY-02), its observation type and observers (OBS), and once per
    variant the function before training (OBS-15, QAT-01). An entry that cannot be reached is UNEXERCISED.
    """
    claim, variant = run.claim, state.case.variant
    is_new, is_qat = variant not in run.proven["prepare"], claim.flow == "qat"

    def check_untrained(prepared: GraphModule, batches: tuple[Batch, ...]) -> None:
        """Check the function of a model that is not trained yet: later it is another one."""
        if is_new:
            found = check_prepared_meaning(state.model, prepared, batches[0], is_qat=is_qat)
            raise_first(show_graph(prepared, found))

    def check_calibrated(prepared: GraphModule, batches: tuple[Batch, ...]) -> None:
        """Check the ranges: later they are those of the value range."""
        if is_new and not is_qat:
            with contextlib.suppress(RefimplError):  # which the convert stage finds as well
                state.misfit = next(check_ranges(run.bench.convert(prepared), batches), None)

    arguments = (claim, state.case, state.model, run.bench.config, check_untrained, check_calibrated)
    state.prepared = run_flow("OBS-15", lambda: prepare_case(*arguments))
    if state.misfit is None:
        run.proven["prepare"].add(variant)
    run.first_prepared = run.first_prepared or state.prepared
    yield from show_graph(state.prepared, check_prepared(claim, state.prepared))


@guard("prepare.check_prepared")
def check_prepared(claim: Claim, prepared: GraphModule) -> Iterator[Fault]:
    """Check that the pattern is quantized by the claim's dtype config, and observed as its observation type says."""
    decision = decision_of(claim, prepared)
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        yield from check_unobserved(claim, prepared)
    elif decision is None:
        matches = ", ".join(f"{each.pattern} at {each.node}" for each in explain(prepared).plan.decisions) or "none"
        yield Fault(rule="PAT-07", message=f"expected one match of the pattern; found {matches}")
    elif decision.kind == "custom module" and decision.is_quantized and claim.kind in INTEGERS:
        yield from check_observers(decision, prepared)  # no dtype config decides about it (CUS-01)
    elif decision.dtype_config is None:
        yield Fault(rule="DTY-02", message=f"the pattern stays float: {decision.reason}")
    elif decision.dtype_config != claim.dtypes:
        text = "an earlier dtype config of the entry takes every QConfig that this one would take"
        yield Fault(rule="DTY-02", verdict=Verdict.UNEXERCISED, message=text)
    elif claim.kind not in INTEGERS:
        yield from check_prepared_dynamic(claim, prepared)
    else:
        yield from check_observation_type(claim, decision, prepared)
        yield from check_observers(decision, prepared)


@guard("prepare.check_unobserved")
def check_unobserved(claim: Claim, prepared: GraphModule) -> Iterator[Fault]:
    """Check that an op that reads a shape is in the graph, and nothing observes it. (OBS-03, OBS-10)"""
    readers = {node.name for node in prepared.graph.nodes if node.target == claim.entry.normal_pattern}
    if not readers:
        text = f"an entry that can never match: no node calls {claim.pattern}, not even where a model uses it"
        yield Fault(rule="PAT-03", verdict=Verdict.UNEXERCISED, message=text)
    elif observed := sorted(readers & {slot.value for slot in explain(prepared).plan.slots}):
        yield Fault(rule="OBS-03", message=f"observed, though it is no tensor: {', '.join(observed)}")


def decision_of(claim: Claim, prepared: GraphModule) -> Decision | None:
    """Return the decision on the claim's pattern; None for none or several.

    It is the one by the claim's entry; a pattern that was fused is decided by the fused module's entry, and is the only
    one but for the identity before the pattern.
    """
    decisions = explain(prepared).plan.decisions
    own = [each for each in decisions if each.entry == claim.index]
    if len(own) != 1:
        own = [each for each in decisions if each.target != PRELUDE]
    return own[0] if len(own) == 1 else None


@guard("prepare.check_observation_type")
def check_observation_type(claim: Claim, decision: Decision, prepared: GraphModule) -> Iterator[Fault]:
    """Check that the observation type is the claim's, but for fused patterns: the fused module's entry decides."""
    if claim.entry.fuser_method is not None:
        return
    root = next(node for node in prepared.graph.nodes if node.name == decision.root)
    inputs = sum(isinstance(argument, Node) for argument in positional_arguments_of(root, at_least=2))
    claimed = claim.entry._num_tensor_args_to_observation_type.get(inputs, claim.entry.observation_type)
    if decision.observation is not claimed:
        rule = "OBS-07" if claim.entry._num_tensor_args_to_observation_type else "OBS-01"
        yield Fault(rule=rule, message=f"observed as {decision.observation.name}; the claim says {claimed.name}")


@guard("prepare.check_observers")
def check_observers(decision: Decision, prepared: GraphModule) -> Iterator[Fault]:
    """Check that every input is observed, the output by its own observer or by the inputs'. (OBS-01, OBS-02)"""
    slots = explain(prepared).plan.slots
    inputs = {slot.group for slot in slots if slot.role != "weight" and slot.value not in decision.nodes}
    outputs = {slot.group for slot in slots if slot.role == "output" and slot.value in decision.nodes}
    placeholders = [node.name for node in prepared.graph.nodes if node.op == "placeholder"]
    missing = set(placeholders) - {slot.value for slot in slots if slot.role == "input"}
    if missing:
        yield Fault(rule="OBS-01", message=f"inputs without an observer: {', '.join(sorted(missing))}")
    elif decision.observation is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
        if len(inputs | outputs) != 1:
            yield Fault(rule="OBS-02", message=f"one observer should be shared; found {inputs} and {outputs}")
    elif len(outputs) != 1 or inputs & outputs:
        yield Fault(rule="OBS-01", message=f"output should have its own observer; found {inputs} and {outputs}")


@guard("prepare.check_prepared_meaning")
def check_prepared_meaning(
    model: nn.Module, prepared: GraphModule, inputs: tuple[Tensor, ...], *, is_qat: bool
) -> Iterator[Fault]:
    """Check that a prepared model, not trained yet, is the float model. (OBS-15, FUS-06, QAT-01)"""
    yield from find_change(model, without_observers(prepared), inputs, is_qat=is_qat)


def find_change(
    model: nn.Module, floating: GraphModule, inputs: tuple[Tensor, ...], *, is_qat: bool
) -> Iterator[Fault]:
    """Find what prepare changed of a model's function; ``floating``: what it made, without observers."""
    found = find_difference(model, floating, inputs)
    if found is not None:
        fused = {text.rpartition(" at ")[2] for text in explain(floating).fusions}
        rule = "QAT-01" if is_qat else "FUS-06" if found.node in fused else "OBS-15"
        text = f"prepare changed what the model computes: {found}"
        yield Fault(rule=rule, message=text, evidence={"node": found.node} if found.node else {})
