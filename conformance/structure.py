"""What must hold of a claim's entry and of each model on the way: fused, prepared, reference."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from conformance import recipes
from conformance.claims import Claim
from conformance.grids import quantized_from
from conformance.oracle import NoOracleError, Walk
from refimpl import DTypeWithConstraints, ObservationType, explain
from refimpl.backend_config import lint_entry
from refimpl.decomposed import PLAIN_DTYPE
from refimpl.invariants import OBSERVER_PREFIX, is_dequantize, is_quantize
from refimpl.observers import is_quantized_dtype
from refimpl.patterns import leaves
from refimpl.plan import Decision
from reports.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A rule that does not hold, and how it shows."""

    rule: str
    message: str
    verdict: Verdict = Verdict.REFUTED


def lint(claim: Claim) -> Problem | None:
    """Check the entry by itself: constraints that nothing can keep, reference modules that cannot be made."""
    for role in ("input", "weight", "output"):
        constraints: DTypeWithConstraints = getattr(claim.dtypes, f"{role}_dtype_with_constraints")
        low, high = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
        if low is not None and high is not None and low >= high:
            return Problem(rule="CFG-02", message=f"{role} dtype: no range fits between {low} and {high}")
    reference = claim.entry.reference_quantized_module
    if reference is not None and not hasattr(reference, "from_float"):
        return Problem(rule="CVT-02", message=f"reference module {reference.__name__} has no from_float")
    for rule, message in lint_entry(claim.entry):  # rule: FUS-08
        return Problem(rule=rule, message=message)
    return None


def check_fused(claim: Claim, fused: GraphModule) -> Problem | None:
    """A pattern with a fuser method is one module call after fuse; one without keeps its ops. (FUS-01, FUS-03)"""
    calls = [node for node in fused.graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    if claim.entry.fuser_method is not None:
        if len(calls) != 1 or calls[0].op != "call_module":
            names = ", ".join(f"{node.op} {node.target}" for node in calls)
            return Problem(rule="FUS-03", message=f"fuse left {len(calls)} calls, should leave one module: {names}")
        return None
    expected = sum(1 for _ in leaves(claim.entry.normal_pattern))
    if len(calls) != expected:
        return Problem(
            rule="FUS-01", message=f"no fuser method for the pattern, yet fuse turned {expected} ops into {len(calls)}"
        )
    return None


def check_prepared(claim: Claim, prepared: GraphModule) -> Problem | None:
    """The pattern is quantized by the claim's dtype config, and observed as its observation type says."""
    log = explain(prepared)
    decisions = log.plan.decisions
    if len(decisions) != 1:
        found = ", ".join(f"{decision.pattern} at {decision.node}" for decision in decisions) or "none"
        return Problem(rule="PAT-07", message=f"expected one match of the pattern; found {found}")
    decision = decisions[0]
    if decision.dtype_config is None:
        return Problem(rule="DTY-02", message=f"the pattern stays float: {decision.reason}")
    if decision.dtype_config != claim.dtypes:
        return Problem(
            rule="DTY-02",
            verdict=Verdict.UNEXERCISED,
            message="an earlier dtype config of the entry takes every QConfig that this one would take",
        )
    return _check_observation_type(claim, decision, prepared) or _check_observers(decision, prepared)


def _check_observation_type(claim: Claim, decision: Decision, prepared: GraphModule) -> Problem | None:
    """The type in force is the claim's; a pattern that was fused is observed as the fused module's entry says."""
    if claim.entry.fuser_method is not None:
        return None
    inputs = sum(node.op == "placeholder" for node in prepared.graph.nodes)
    wanted = claim.entry._num_tensor_args_to_observation_type.get(inputs, claim.entry.observation_type)
    if decision.observation is wanted:
        return None
    rule = "OBS-07" if claim.entry._num_tensor_args_to_observation_type else "OBS-01"
    return Problem(rule=rule, message=f"observed as {decision.observation.name}; the claim says {wanted.name}")


def _check_observers(decision: Decision, prepared: GraphModule) -> Problem | None:
    slots = explain(prepared).plan.slots
    inputs = {slot.group for slot in slots if slot.role == "input"}
    outputs = {slot.group for slot in slots if slot.role == "output"}
    placeholders = [node.name for node in prepared.graph.nodes if node.op == "placeholder"]
    missing = set(placeholders) - {slot.value for slot in slots if slot.role == "input"}
    if decision.observation is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return Problem(rule="OBS-03", message=f"observed although the type says not to: {slots}") if slots else None
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
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        text = "neither input nor output is observed, so a model of this pattern alone has no integers to compare"
        return Problem(rule="OBS-03", verdict=Verdict.UNEXERCISED, message=text)
    names = [str(node.target) for node in reference.graph.nodes if node.op == "call_module"]
    if any(name.startswith(OBSERVER_PREFIX) for name in names):
        return Problem(rule="CVT-01", message="an observer is left in the reference model")
    output = next(node for node in reference.graph.nodes if node.op == "output").args[0]
    if not is_dequantize(output):
        return Problem(rule="CVT-06", message=f"the output {output} is not dequantized")
    ends = [("output", output.args[0])]
    for node in reference.graph.nodes:
        if node.op == "placeholder":
            ends += [("input", quantized_from(user)) for user in node.users]
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
    if not is_quantized_dtype(claim.dtypes.weight_dtype) or next(leaves(claim.entry.normal_pattern)) not in (
        *recipes.WEIGHTED_MODULES,
        *recipes.FUSED_MODULES,
    ):
        return None
    if any(hasattr(module, "get_quantized_weight") for module in reference.modules()):
        return None
    return Problem(rule="CVT-02", message="the root was not swapped for its reference module: the weight is float")


def check_fused_meaning(model: nn.Module, fused: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The fused model computes the float model's function. (FUS-06)

    Both run in float64, so that they may differ by the float32 rounding of folded weights alone: 2⁻¹⁹ of the largest
    value on the way, for at most some hundred terms.
    """
    values: list[Tensor] = []
    wanted, found = (copy.deepcopy(each).double() for each in (model, fused))
    for module in found.modules():
        module.register_forward_hook(lambda _module, _inputs, output: values.append(output))
    with torch.no_grad():
        expected, given = (each(*(x.double() for x in inputs)) for each in (wanted, found))
    difference = (given - expected).abs().max()
    allowed = 2.0**-19 * max(float(value.abs().max()) for value in values)
    if difference > allowed:
        text = f"fuse changed what the model computes, by {difference:.3g}; rounding explains {allowed:.3g}"
        return Problem(rule="FUS-06", message=text)
    return None


def check_meaning(model: nn.Module, reference: GraphModule, inputs: tuple[Tensor, ...]) -> Problem | None:
    """The reference model computes the float model's function, up to its weights' rounding. (FUS-06, CVT-02)

    On the quantized inputs, both in float64, the two results may differ by what half a step of each weight makes of the
    inputs' absolute values, and by float32 rounding where fuse folded a batch norm; nothing else.
    """
    try:
        real, on_grid, bound = Walk(reference).weight_bound(inputs)
    except NoOracleError:
        return None  # numerics will say so
    with torch.no_grad():
        wanted = copy.deepcopy(model).double()(*on_grid)
    difference = (real - wanted).abs()
    excess = difference - bound
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        found, expected, explained = (float(each.flatten()[worst]) for each in (real, wanted, bound))
        text = f"{found:.6g} for {expected:.6g}, and weight rounding explains {explained:.3g} only"
        return Problem(
            rule="CVT-02", message=f"the reference model computes something else than the float model: {text}"
        )
    return None


def moves_only(claim: Claim) -> bool:
    """Tell whether the pattern shares its observer and only moves or selects values. (NUM-05)"""
    shares = claim.entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    return shares and all(leaf in recipes.MOVES for leaf in leaves(claim.entry.normal_pattern))
