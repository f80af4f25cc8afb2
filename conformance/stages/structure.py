"""What must hold of each model of a claim on the way: fused, prepared, reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.claims.build import PRELUDE
from conformance.claims.claim import Claim
from conformance.claims.qconfigs import INTEGERS, kind_of
from conformance.claims.traits import is_weighted_module
from conformance.oracle.evaluate import READS_SHAPE, Walk
from conformance.oracle.grids import NoOracleError, quantized_from
from conformance.stages.check import Problem
from conformance.stages.structure_dynamic import check_prepared_dynamic, check_reference_dynamic
from refimpl import ObservationType, explain
from refimpl.decomposed import PLAIN_DTYPE
from refimpl.invariants import OBSERVER_PREFIX, is_dequantize, is_quantize
from refimpl.observers import is_quantized_dtype
from refimpl.patterns import leaves
from refimpl.plan import Decision
from reports.results import Verdict


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


def check_prepared(claim: Claim, prepared: GraphModule) -> Problem | None:
    """The pattern is quantized by the claim's dtype config, and observed as its observation type says."""
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return _check_unobserved(claim, prepared)
    decision = decision_of(claim, prepared)
    if decision is None:
        found = ", ".join(f"{each.pattern} at {each.node}" for each in explain(prepared).plan.decisions) or "none"
        return Problem(rule="PAT-07", message=f"expected one match of the pattern; found {found}")
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
    return _check_observation_type(claim, decision, prepared) or _check_observers(decision, prepared)


def _check_unobserved(claim: Claim, prepared: GraphModule) -> Problem | None:
    """What reads a shape is in the graph, and nothing observes it. (OBS-03, OBS-10)"""
    found = {node.name for node in prepared.graph.nodes if node.target == claim.entry.normal_pattern}
    if not found:
        text = f"an entry that can never match: no node calls {claim.pattern}, not even where a model uses it"
        return Problem(rule="PAT-03", verdict=Verdict.UNEXERCISED, message=text)
    observed = sorted(found & {slot.value for slot in explain(prepared).plan.slots})
    return (
        Problem(rule="OBS-03", message=f"observed, though it is no tensor: {', '.join(observed)}") if observed else None
    )


def decision_of(claim: Claim, prepared: GraphModule) -> Decision | None:
    """Return the decision on the claim's pattern: the only one, or the one with its name; else None.

    A pattern that was fused is decided as the fused module's entry.
    """
    decisions = explain(prepared).plan.decisions
    named = [each for each in decisions if each.pattern == claim.pattern.partition("#")[0]]
    if len(named) != 1:
        named = [each for each in decisions if not each.target or not each.target.endswith(PRELUDE)]
    return named[0] if len(named) == 1 else None


def _check_observation_type(claim: Claim, decision: Decision, prepared: GraphModule) -> Problem | None:
    """The type in force is the claim's; a pattern that was fused is observed as the fused module's entry says."""
    if claim.entry.fuser_method is not None:
        return None
    root = next(node for node in prepared.graph.nodes if node.name == decision.root)
    inputs = sum(isinstance(argument, Node) for argument in root.args)
    wanted = claim.entry._num_tensor_args_to_observation_type.get(inputs, claim.entry.observation_type)
    if decision.observation is wanted:
        return None
    rule = "OBS-07" if claim.entry._num_tensor_args_to_observation_type else "OBS-01"
    return Problem(rule=rule, message=f"observed as {decision.observation.name}; the claim says {wanted.name}")


def _check_observers(decision: Decision, prepared: GraphModule) -> Problem | None:
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


def check_reference(claim: Claim, reference: GraphModule) -> Problem | None:
    """Inputs and output are quantized in the claimed dtypes, no observer is left, the root is a reference module."""
    if kind_of(claim.dtypes) not in INTEGERS:
        return check_reference_dynamic(claim, reference)
    names = [str(node.target) for node in reference.graph.nodes if node.op == "call_module"]
    if any(name.startswith(OBSERVER_PREFIX) for name in names):
        return Problem(rule="CVT-01", message="an observer is left in the reference model")
    output = next(node for node in reference.graph.nodes if node.op == "output").args[0]
    if not is_dequantize(output):
        return Problem(rule="CVT-06", message=f"the output {output} is not dequantized")
    ends = [("output", output.args[0])]
    for node in reference.graph.nodes:
        if node.op == "placeholder":
            ends += [("input", quantized_from(user)) for user in node.users if user.target not in READS_SHAPE]
    for role, node in ends:
        wanted = getattr(claim.dtypes, f"{role}_dtype")
        if not is_quantize(node):
            return Problem(rule="CVT-01", message=f"{role}: {node} is not a quantize node")
        if wanted is not None and not _same_integers(node.args[-1], wanted):
            return Problem(rule="CVT-01", message=f"{role} is quantized to {node.args[-1]}; the claim says {wanted}")
    return _check_root(claim, reference)


def _same_integers(found: Any, wanted: torch.dtype) -> bool:
    return bool(found in (wanted, PLAIN_DTYPE.get(wanted)))


def _check_root(claim: Claim, reference: GraphModule) -> Problem | None:
    """A pattern whose root module has a weight holds it as a quantized one. (CVT-02)"""
    if not is_quantized_dtype(claim.dtypes.weight_dtype) or not is_weighted_module(claim):
        return None
    if any(hasattr(module, "get_quantized_weight") for module in reference.modules()):
        return None
    return Problem(rule="CVT-02", message="the root was not swapped for its reference module: the weight is float")


def check_fused_meaning(model: nn.Module, fused: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The fused model computes the float model's function. (FUS-06)"""
    apart = _apart(model, fused, inputs)
    return Problem(rule="FUS-06", message=f"fuse changed what the model computes, {apart}") if apart else None


def check_trained_meaning(model: nn.Module, prepared: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """A model that is prepared for training, and not trained yet, computes the float model's function. (QAT-01)"""
    prepared.eval()
    apart = _apart(model, prepared, inputs)
    prepared.train()
    return (
        Problem(rule="QAT-01", message=f"the modules for training compute something else, {apart}") if apart else None
    )


def _apart(model: nn.Module, other: GraphModule, inputs: tuple[Tensor, ...]) -> str:
    """Say how far a model is from computing the float model's function; "" where it does.

    Both run in float64, so that they may differ by the float32 rounding of folded weights alone: 2⁻¹⁹ of the largest
    value on the way, for at most some hundred terms.
    """
    largest = [0.0]

    def note(_module: Any, _inputs: Any, output: Any) -> None:
        largest.extend(float(each.abs().max()) for each in tensors(output) if each.numel())

    expected = evaluated(model, inputs)
    hooks = [module.register_forward_hook(note) for module in other.modules()]
    given = evaluated(other, inputs)
    for hook in hooks:
        hook.remove()
    for right, left in zip(expected, given, strict=True):
        difference = float((left - right).abs().max()) if right.numel() else 0.0
        allowed = 2.0**-19 * max(largest)
        if not difference <= allowed < math.inf:  # NaN and infinities are no function's results
            return f"by {difference:.3g}; rounding explains {allowed:.3g}"
    return ""


def check_meaning(model: nn.Module, reference: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The reference model computes the float model's function, up to its weights' rounding. (FUS-06, CVT-02)

    On inputs that lie on the grids, both in float64, the results may differ by what half a step of each weight makes of
    the inputs' absolute values, by the float32 rounding of the inputs, and by that of a batch norm that fuse folded:
    2⁻¹⁶ of the largest result, far above any such rounding and far below any fault of structure.
    """
    try:
        exacts = Walk(reference, counts_weights=True).exact(inputs)
    except NoOracleError:
        return None  # numerics will say so
    for exact, right in zip(exacts, evaluated(model, inputs), strict=True):
        if not right.numel():
            continue
        bound = sum((each.expand_as(right) for each in exact.errors.values()), torch.zeros_like(right))
        largest = max((float(x.abs().max()) for x in inputs if x.is_floating_point() and x.numel()), default=0.0)
        bound = bound + 2.0**-16 * exact.real.abs().max() + 2.0**-22 * largest
        is_far = ~((exact.real - right).abs() <= bound)  # NaN is far
        if bool(is_far.any()):
            worst = int(((exact.real - right).abs() - bound).where(is_far, -math.inf).argmax())
            found, expected, explained = (float(each.flatten()[worst]) for each in (exact.real, right, bound))
            text = f"{found:.6g} for {expected:.6g}, and weight rounding explains {explained:.3g} only"
            return Problem(
                rule="CVT-02", message=f"the reference model computes something else than the float model: {text}"
            )
    return None


def evaluated(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what a model in eval mode gives in float64, with its fake quantizes passing values through.

    The model is float32 again after that, as it was: that makes a copy, which costs more than all else here, needless.
    """
    switches = [getattr(module, name) for module in model.modules() for name in _SWITCHES if hasattr(module, name)]
    kept = [switch.clone() for switch in switches]
    default = torch.get_default_dtype()
    try:
        for switch in switches:
            switch.zero_()
        torch.set_default_dtype(torch.float64)  # of tensors that a module makes by itself
        with torch.no_grad():
            return tensors(model.double()(*(each.double() if each.is_floating_point() else each for each in inputs)))
    finally:
        torch.set_default_dtype(default)
        model.float()
        for switch, value in zip(switches, kept, strict=True):
            switch.copy_(value)


_SWITCHES = ("fake_quant_enabled", "observer_enabled")


def tensors(output: Any) -> list[Tensor]:
    """List the tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    return [each for item in output for each in tensors(item)] if isinstance(output, (tuple, list)) else []
