"""The refusal stage: QConfigs just outside of a claim leave its pattern float, and the log says why. (DTY-01 to DTY-09)

Another dtype config of the entry may rightly take such a QConfig, so the entries that decide are tried with only the
claim's dtype config.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache

from torch.fx import Graph, GraphModule

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.claims.build import Preluded
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.edges import EdgeQConfig, edges_inside, edges_outside
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.calibration import leaves_of
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState, show_graph
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.prepare.plan import Decision


def try_edges(run: ClaimState) -> Iterator[Fault]:
    """Prepare the first case's model with the QConfigs just outside of a claim and those exactly on its bounds.

    Copies that share the float model's parameters are prepared, one for each QConfig. The claim's own QConfig is on its
    bounds; the stage prepare has checked that it is taken.
    """
    claim, state = run.claim, run.rerun_cases[0]
    if claim.entry.observation_type is refimpl.ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return  # no QConfig decides about an op that reads a shape (OBS-10)
    if claim.entry.normal_pattern in claim.preparation.custom_modules:
        return  # no dtype config decides about a custom module (CUS-01)
    deciding = _restrict_entries(claim, run.bench.config)
    inside, outside = list(edges_inside(claim)), list(edges_outside(claim))
    if inside:
        taken = check_taken(claim, inside, _prepare_copies(claim, state, inside, deciding))
        yield from show_graph(state.prepared, taken)
    if outside:
        refused = check_refused(outside, _prepare_copies(claim, state, outside, deciding))
        yield from show_graph(state.prepared, refused)
    run.counted["refusal"] = len(inside) + len(outside)


def _restrict_entries(claim: Claim, config: refimpl.BackendConfig) -> refimpl.BackendConfig:
    """Return the entries that decide about the claim's pattern, with the claim's dtype config only.

    A trained pattern is decided as its QAT class, a fused one as the module that fuse makes, of any class; and a
    pattern may leave it to the entry of its function to say where the weight is.
    """
    trained = claim.entry.qat_module
    deciding = restrict_functions(config, claim.dtypes)
    if claim.entry.fuser_method is not None:
        deciding += restrict_modules(config, claim.dtypes)
    elif trained is not None:
        deciding += tuple(restrict(entry, claim.dtypes) for entry in config.configs if entry.pattern is trained)
    return refimpl.BackendConfig().set_backend_pattern_configs([*deciding, restrict(claim.entry, claim.dtypes)])


@lru_cache(maxsize=32)
def restrict_modules(
    config: refimpl.BackendConfig, dtypes: refimpl.DTypeConfig
) -> tuple[refimpl.BackendPatternConfig, ...]:
    """Return the entries of single modules, which may decide for a fused pattern, each with this dtype config only."""
    return tuple(restrict(entry, dtypes) for entry in config.configs if isinstance(entry.normal_pattern, type))


@lru_cache(maxsize=32)
def restrict_functions(
    config: refimpl.BackendConfig, dtypes: refimpl.DTypeConfig
) -> tuple[refimpl.BackendPatternConfig, ...]:
    """Return the entries of functions with a weight's place, also restricted: other patterns need it. (OBS-06)"""
    return tuple(restrict(entry, dtypes) for entry in config.configs if entry._input_type_to_index)


def restrict(entry: refimpl.BackendPatternConfig, dtypes: refimpl.DTypeConfig) -> refimpl.BackendPatternConfig:
    """Return an entry with this dtype config instead of its own ones."""
    return copy.copy(entry).set_dtype_configs([dtypes])


def _prepare_copies(
    claim: Claim, state: CaseState, edges: Sequence[EdgeQConfig], config: refimpl.BackendConfig
) -> GraphModule:
    """Prepare a copy of the model for each QConfig, all next to each other, as one pass costs least.

    Each has inputs of its own: one op in place, and the next would read what it wrote. (TRC-01)
    """
    model = state.model.inner if isinstance(state.model, Preluded) else state.model
    mapping, graph = refimpl.QConfigMapping(), Graph()
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    names = [f"edge{number}" for number in range(len(edges))]
    inputs = [
        tuple(graph.placeholder(f"{name}_x{number}") for number in range(len(state.case.inputs))) for name in names
    ]
    graph.output(tuple(graph.call_module(name, own) for name, own in zip(names, inputs, strict=True)))
    copies = GraphModule({name: copy.deepcopy(model, dict(shared)) for name in names}, graph)
    for name, edge in zip(names, edges, strict=True):
        mapping.set_module_name(name, edge.qconfig)
    prepare, is_qat = (refimpl.prepare_qat_fx, True) if claim.flow == "qat" else (refimpl.prepare_fx, False)
    return prepare(copies.train(is_qat), mapping, None, leaves_of(claim), backend_config=config)


def _pair_with_decisions(
    prepared: GraphModule, edges: Sequence[EdgeQConfig]
) -> Iterator[tuple[EdgeQConfig, list[Decision]]]:
    """Yield each QConfig with the decisions in its copy of the model."""
    decisions = refimpl.explain(prepared).plan.decisions
    for number, edge in enumerate(edges):
        yield edge, [each for each in decisions if each.places[-1].name.partition(".")[0] == f"edge{number}"]


@guard("refusal.check_taken")
def check_taken(claim: Claim, edges: Sequence[EdgeQConfig], prepared: GraphModule) -> Iterator[Fault]:
    """Check that a QConfig within all bounds is taken, by the claim's dtype config. (DTY-02)"""
    for edge, decisions in _pair_with_decisions(prepared, edges):
        if all(each.dtype_config != claim.dtypes for each in decisions):
            reasons = "; ".join(each.reason for each in decisions) or "no match"
            yield Fault(rule="DTY-02", message=f"a QConfig with {edge.name} is not taken: {reasons}")


@guard("refusal.check_refused")
def check_refused(edges: Sequence[EdgeQConfig], prepared: GraphModule) -> Iterator[Fault]:
    """Check that QConfigs outside leave all as it was, and the log has rule, value and bound. (DTY-06, DTY-09)"""
    for edge, decisions in _pair_with_decisions(prepared, edges):
        if any(each.dtype_config is not None for each in decisions):
            text = f"a QConfig with {edge.name} is taken; the pattern must stay float"
            yield Fault(rule=edge.rule, message=text)
        elif not any(_is_named(edge, each) for each in decisions):
            reasons = "; ".join(each.reason for each in decisions) or "no match"
            text = f"refusing {edge.name}, the log does not name {edge.rule} and {edge.found}: {reasons}"
            yield Fault(rule="DTY-09", message=text)
    observed = [slot.value for slot in refimpl.explain(prepared).plan.slots]
    if observed:
        yield Fault(rule="DTY-06", message=f"all QConfigs are refused, yet observed is {', '.join(observed)}")
    converted = refimpl.convert_to_reference_decomposed_fx(prepared)
    leftovers = [node.name for node in converted.graph.nodes if is_quantize(node) or is_dequantize(node)]
    if leftovers:
        yield Fault(rule="DTY-06", message=f"all QConfigs are refused, yet convert makes {', '.join(leftovers)}")


def _is_named(edge: EdgeQConfig, decision: Decision) -> bool:
    refusals = [(each.rule, each.found, each.role == "weight") for each in decision.refusals if each.bound]
    return (edge.rule, str(edge.found), edge.is_weight) in refusals
