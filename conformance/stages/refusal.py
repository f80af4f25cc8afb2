"""The refusal stage: QConfigs just outside of a claim leave its pattern float, and the log says why. (DTY-01 to DTY-09)

Another dtype config of the entry may rightly take such a QConfig, so the entries that decide are tried with only the
claim's dtype config.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule

import refimpl
from conformance.claims.build import Preluded
from conformance.claims.claim import NO_WEIGHT, Claim
from conformance.claims.kinds import fixed_qparams_of
from conformance.claims.qconfigs import make_min_max, observer_arguments_of, suite_qconfig_for
from conformance.machine.fault import Fault
from conformance.machine.guard import guard
from conformance.stages.calibration import leaves_of
from conformance.stages.state import CaseState, ClaimState, show_graph
from refimpl.dtype_choice import ObserverFacts
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.observers import Constructor, dtype_range, is_quantized_dtype
from refimpl.plan import Decision

Side = Literal["activation", "weight"]
"""A side of a QConfig."""
SIDES: tuple[Side, ...] = ("activation", "weight")
Constraints = list[refimpl.DTypeWithConstraints]
"""The constraints on one side, of each end that they bound."""
Change = Callable[[Claim, Constraints, Constructor], tuple[Any, object] | None]
"""Returns a constructor that breaks a rule, and the value that breaks it; None: the claim has no such bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeQConfig:
    """A QConfig at the edge of a claim."""

    name: str
    qconfig: refimpl.QConfig
    rule: str = ""
    """The rule that refuses it, or ""."""
    found: object = None
    """The value that the log must give as found."""
    is_weight: bool = False
    """Whether that value is the weight's."""


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


# -- QConfigs at the edge of a claim -----------------------------------------------------------------------------------


def edges_outside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield QConfigs that break one rule each, by as little as possible."""
    base = suite_qconfig_for(claim)
    for name, rule, side, change in _OUTSIDE:
        constraints = _constraints_of(claim, side)
        changed = change(claim, constraints, getattr(base, side)) if constraints else None
        if changed is not None:
            make, value = changed
            qconfig = base._replace(**{side: make})
            yield EdgeQConfig(name=name, qconfig=qconfig, rule=rule, found=value, is_weight=side == "weight")


def edges_inside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield the QConfig that keeps each of a claim's bounds exactly, where the claim's own does not ask the same."""
    base = suite_qconfig_for(claim)
    qconfig = base._replace(**{side: _bind_bounds(_constraints_of(claim, side), getattr(base, side)) for side in SIDES})
    if any(ObserverFacts.of(getattr(qconfig, side)()) != ObserverFacts.of(getattr(base, side)()) for side in SIDES):
        yield EdgeQConfig(name="exactly the bounds", qconfig=qconfig)


def _constraints_of(claim: Claim, side: Side) -> Constraints:
    """Return the constraints on a side of the QConfig (a static output has the input's); none for wildcards."""
    dtypes = claim.dtypes
    if side == "weight":
        weight = dtypes.weight_dtype_with_constraints
        return [] if claim.scheme == NO_WEIGHT or weight.dtype in (None, torch.float32) else [weight]
    ends = [dtypes.input_dtype_with_constraints]
    if not dtypes.is_dynamic:
        ends.append(dtypes.output_dtype_with_constraints)
    return [each for each in ends if each.dtype is not None]  # rule: DTY-01


def _bind(make: Constructor, **changes: Any) -> Constructor:
    """Bind other arguments; those of an observer that is bound itself, with its arguments, are bound there."""
    observer = make.keywords.get("observer")
    if isinstance(observer, Constructor):
        return make.with_args(observer=observer.with_args(**changes))
    return make.with_args(**changes)


def _change_dtype(_: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object]:
    dtype = torch.qint8 if ends[0].dtype is torch.quint8 else torch.quint8
    low, high = dtype_range(dtype)
    return _bind(make, dtype=dtype, quant_min=low, quant_max=high), dtype


def _change_mode(claim: Claim, ends: Constraints, _: Constructor) -> tuple[Any, object]:
    """Make a static observer dynamic, and the reverse."""
    is_dynamic = not claim.dtypes.is_dynamic
    return refimpl.PlaceholderObserver.with_args(dtype=ends[0].dtype, is_dynamic=is_dynamic), is_dynamic


def _widen(end: str, _: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    """Make a range one wider than the bounds at an end, where they leave an integer of the dtype outside."""
    bounds = _bounded_range(ends)
    if bounds is None or ends[0].dtype is None:
        return None
    low, high = bounds
    widest_low, widest_high = dtype_range(ends[0].dtype)
    if end == "quant_min":
        return (_bind(make, quant_min=low - 1, quant_max=high), low - 1) if low > widest_low else None
    return (_bind(make, quant_min=low, quant_max=high + 1), high + 1) if high < widest_high else None


def _bounded_range(ends: Constraints) -> tuple[int, int] | None:
    """Return the widest range within the bounds of all ends that have both; None: no integers."""
    bounded = [end for end in ends if end.quant_min_lower_bound is not None and end.quant_max_upper_bound is not None]
    return _range_of(bounded)  # rule: DTY-03


def _range_of(ends: Constraints) -> tuple[int, int] | None:
    """Return the widest range that is within all bounds; None: no integers."""
    if not ends or not is_quantized_dtype(ends[0].dtype):
        return None
    arguments = observer_arguments_of(*ends)
    low, high = dtype_range(arguments["dtype"])
    return arguments.get("quant_min", low), arguments.get("quant_max", high)


def _smallest_scale_of(ends: Constraints) -> float | None:
    """Return the bound of the smallest scale, where a QConfig can keep it: fixed qparams are not measured."""
    largest = max((each.scale_min_lower_bound for each in ends if each.scale_min_lower_bound is not None), default=0.0)
    is_fixed = any(each.scale_exact_match is not None for each in ends)
    return largest if largest > 0 and not is_fixed else None


def _step_towards(value: float, end: float) -> float:
    """Return the next float32 number: observers hold scales in float32."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(end)))


def _lower_smallest_scale(_: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    if (bound := _smallest_scale_of(ends)) is None:
        return None
    eps = _step_towards(bound, 0.0)
    return _bind(make, eps=eps), eps


def _bind_bounds(ends: Constraints, make: Constructor) -> Constructor:
    """Bind the range and the smallest scale that the bounds name."""
    eps, bounds = _smallest_scale_of(ends), _bounded_range(ends)
    if eps is not None:
        make = _bind(make, eps=eps)
    return make if bounds is None else _bind(make, quant_min=bounds[0], quant_max=bounds[1])


def _change_scale(claim: Claim, _: Constraints, make: Constructor) -> tuple[Any, object] | None:
    if (exact := fixed_qparams_of(claim.dtypes)) is None:
        return None
    scale = _step_towards(exact[0], float("inf"))
    return _bind(make, scale=scale), (scale, exact[1])


def _change_zero_point(claim: Claim, ends: Constraints, make: Constructor) -> tuple[Any, object] | None:
    exact, bounds = fixed_qparams_of(claim.dtypes), _range_of(ends)
    if exact is None or bounds is None:
        return None
    zero_point = exact[1] + (1 if exact[1] < bounds[1] else -1)
    return _bind(make, zero_point=zero_point), (exact[0], zero_point)


def _measure_qparams(claim: Claim, ends: Constraints, _: Constructor) -> tuple[Any, object] | None:
    """Measure qparams where fixed ones are prescribed."""
    if fixed_qparams_of(claim.dtypes) is None:
        return None
    return make_min_max(claim.flow == "qat", observer_arguments_of(*ends)), None


_OUTSIDE: tuple[tuple[str, str, Side, Change], ...] = (
    ("another activation dtype", "DTY-01", "activation", _change_dtype),
    ("another weight dtype", "DTY-01", "weight", _change_dtype),
    ("the activation's quant_min one lower", "DTY-03", "activation", partial(_widen, "quant_min")),
    ("the activation's quant_max one higher", "DTY-03", "activation", partial(_widen, "quant_max")),
    ("the weight's quant_min one lower", "DTY-03", "weight", partial(_widen, "quant_min")),
    ("the weight's quant_max one higher", "DTY-03", "weight", partial(_widen, "quant_max")),
    ("the activation's smallest scale just below", "DTY-04", "activation", _lower_smallest_scale),
    ("the weight's smallest scale just below", "DTY-04", "weight", _lower_smallest_scale),
    ("another fixed scale", "DTY-05", "activation", _change_scale),
    ("another fixed zero point", "DTY-05", "activation", _change_zero_point),
    ("measured qparams for fixed ones", "DTY-05", "activation", _measure_qparams),
    ("dynamic against static", "DTY-07", "activation", _change_mode),
)

# -- trying edges ------------------------------------------------------------------------------------------------------


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
