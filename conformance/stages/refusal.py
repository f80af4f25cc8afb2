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
from torch import nn
from torch.fx import Graph, GraphModule

from conformance.claims.build import Preluded
from conformance.claims.case import Case
from conformance.claims.claim import NO_WEIGHT, Claim
from conformance.claims.qconfigs import observer_arguments, qconfig_for
from conformance.machine.guard import guard
from conformance.stages.bench import Bench
from conformance.stages.calibration import leaves_of
from conformance.stages.numerics import ComparedCase
from conformance.stages.stage import Problem, passed, raise_problem
from refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FakeQuantize,
    MinMaxObserver,
    ObservationType,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    explain,
    prepare_fx,
    prepare_qat_fx,
)
from refimpl.dtype_choice import ObserverFacts
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.observers import Constructor, dtype_range, is_quantized_dtype
from refimpl.plan import Decision
from reports.schema import Check

Side = Literal["activation", "weight"]
"""A side of a QConfig."""
SIDES: tuple[Side, ...] = ("activation", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeQConfig:
    """A QConfig at the edge of a claim. ``rule``: what refuses it; "": nothing does.

    ``found``: what the log must give as the value that was found. ``is_weight``: it is the weight's value.
    """

    name: str
    qconfig: QConfig
    rule: str = ""
    found: object = None
    is_weight: bool = False


def check_refusal(bench: Bench, claim: Claim, compared: ComparedCase) -> Check:
    """Try the QConfigs just outside of a claim and those exactly on its bounds, on one of its cases.

    Raises StageError for one that is taken or refused wrongly, or without the right reason.
    """
    prepared = compared.reference.prepared
    problem, tried = try_edges(claim, compared.case, prepared.built.model, bench.config)
    raise_problem(problem, prepared.model)
    return passed(claim.id, "refusal", tried)


def try_edges(claim: Claim, case: Case, model: nn.Module, config: BackendConfig) -> tuple[Problem | None, int]:
    """Try the QConfigs at the edge of a claim; also return how many were tried.

    `model`: a float model of the case, in eval mode; copies that share its parameters are prepared, one for each
    QConfig. The claim's own QConfig is on its bounds and has been taken already: the prepare stage has seen to that.
    """
    if claim.entry.observation_type is ObservationType.INPUT_OUTPUT_NOT_OBSERVED:
        return None, 0  # no QConfig is asked about what reads a shape (OBS-10)
    model = model.inner if isinstance(model, Preluded) else model
    deciding = _deciding_entries(claim, config)
    inside, outside = list(edges_inside(claim)), list(edges_outside(claim))
    problem = check_taken(claim, inside, _prepare_copies(claim, case, model, inside, deciding)) if inside else None
    if problem is None and outside:
        problem = check_refused(outside, _prepare_copies(claim, case, model, outside, deciding))
    return problem, len(inside) + len(outside)


# -- QConfigs at the edge of a claim -----------------------------------------------------------------------------------


def edges_outside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield QConfigs that break one rule each, by as little as can be."""
    base = qconfig_for(claim)
    for name, rule, side, change in _OUTSIDE:
        given = _constraints(claim, side)
        found = change(claim, given, getattr(base, side)) if given else None
        if found is not None:
            make, value = found
            qconfig = base._replace(**{side: make})
            yield EdgeQConfig(name=name, qconfig=qconfig, rule=rule, found=value, is_weight=side == "weight")


def edges_inside(claim: Claim) -> Iterator[EdgeQConfig]:
    """Yield the QConfig that keeps each of a claim's bounds exactly, where the claim's own does not ask the same."""
    base = qconfig_for(claim)
    qconfig = base._replace(**{side: _on_bounds(_constraints(claim, side), getattr(base, side)) for side in SIDES})
    if any(ObserverFacts.of(getattr(qconfig, side)()) != ObserverFacts.of(getattr(base, side)()) for side in SIDES):
        yield EdgeQConfig(name="exactly the bounds", qconfig=qconfig)


Change = Callable[[Claim, Sequence[DTypeWithConstraints], Constructor], tuple[Any, object] | None]
"""A constructor that breaks a rule, and the value that breaks it; None: the claim has no such bound."""


def _constraints(claim: Claim, side: Side) -> list[DTypeWithConstraints]:
    """What holds for a side of the QConfig: a static output's observer is the input's. Wildcards bound nothing."""
    dtypes = claim.dtypes
    if side == "weight":
        given = [dtypes.weight_dtype_with_constraints] if claim.scheme != NO_WEIGHT else []
        return [each for each in given if each.dtype not in (None, torch.float32)]
    given = [dtypes.input_dtype_with_constraints]
    if not dtypes.is_dynamic:
        given.append(dtypes.output_dtype_with_constraints)
    return [each for each in given if each.dtype is not None]  # rule: DTY-01


def _with(make: Constructor, **changes: Any) -> Constructor:
    """Bind other arguments; those of an observer that is bound itself, with its arguments, are bound there."""
    observer = make.keywords.get("observer")
    if isinstance(observer, Constructor):
        return make.with_args(observer=observer.with_args(**changes))
    return make.with_args(**changes)


def _other_dtype(_: Claim, given: Sequence[DTypeWithConstraints], make: Constructor) -> tuple[Any, object]:
    other = torch.qint8 if given[0].dtype is torch.quint8 else torch.quint8
    low, high = dtype_range(other)
    return _with(make, dtype=other, quant_min=low, quant_max=high), other


def _other_mode(claim: Claim, given: Sequence[DTypeWithConstraints], _: Constructor) -> tuple[Any, object]:
    """Dynamic for static, and the reverse."""
    other = not claim.dtypes.is_dynamic
    return PlaceholderObserver.with_args(dtype=given[0].dtype, is_dynamic=other), other


def _wider(
    end: Literal["quant_min", "quant_max"], _: Claim, given: Sequence[DTypeWithConstraints], make: Constructor
) -> tuple[Any, object] | None:
    """A range one wider than the bounds, where they leave an integer of the dtype outside."""
    ends = _range([each for each in given if _is_bounded(each)])
    if ends is None or given[0].dtype is None:
        return None
    low, high = ends
    widest_low, widest_high = dtype_range(given[0].dtype)
    if end == "quant_min":
        return (_with(make, quant_min=low - 1, quant_max=high), low - 1) if low > widest_low else None
    return (_with(make, quant_min=low, quant_max=high + 1), high + 1) if high < widest_high else None


def _is_bounded(each: DTypeWithConstraints) -> bool:
    return each.quant_min_lower_bound is not None and each.quant_max_upper_bound is not None  # rule: DTY-03


def _range(given: Sequence[DTypeWithConstraints]) -> tuple[int, int] | None:
    """The widest range that is within all bounds; None: no integers."""
    if not given or not is_quantized_dtype(given[0].dtype):
        return None
    arguments = observer_arguments(*given)
    low, high = dtype_range(arguments["dtype"])
    return arguments.get("quant_min", low), arguments.get("quant_max", high)


def _smallest_scale(given: Sequence[DTypeWithConstraints]) -> float | None:
    """The bound of the smallest scale, where a QConfig can keep it: fixed qparams are not measured."""
    floors = [each.scale_min_lower_bound for each in given if each.scale_min_lower_bound is not None]
    is_fixed = any(each.scale_exact_match is not None for each in given)
    return max(floors) if floors and not is_fixed and max(floors) > 0 else None


def _beside(value: float, towards: float) -> float:
    """The float32 number next to a value: observers hold scales in float32."""
    return float(torch.nextafter(torch.tensor(value), torch.tensor(towards)))


def _finer(_: Claim, given: Sequence[DTypeWithConstraints], make: Constructor) -> tuple[Any, object] | None:
    """A smallest scale just below the bound."""
    bound = _smallest_scale(given)
    if bound is None:
        return None
    eps = _beside(bound, 0.0)
    return _with(make, eps=eps), eps


def _on_bounds(given: Sequence[DTypeWithConstraints], make: Constructor) -> Constructor:
    """A constructor with the range and the smallest scale that the bounds name."""
    bound, ends = _smallest_scale(given), _range([each for each in given if _is_bounded(each)])
    if bound is not None:
        make = _with(make, eps=bound)
    return make if ends is None else _with(make, quant_min=ends[0], quant_max=ends[1])


def _fixed(given: Sequence[DTypeWithConstraints]) -> tuple[float, int] | None:
    """Scale and zero point that are prescribed; DTY-05 takes the two together only."""
    pairs = [(each.scale_exact_match, each.zero_point_exact_match) for each in given]
    return next(((float(s), int(z)) for s, z in pairs if s is not None and z is not None), None)


def _other_scale(_: Claim, given: Sequence[DTypeWithConstraints], make: Constructor) -> tuple[Any, object] | None:
    if (exact := _fixed(given)) is None:
        return None
    scale = _beside(exact[0], float("inf"))
    return _with(make, scale=scale), (scale, exact[1])


def _other_zero_point(_: Claim, given: Sequence[DTypeWithConstraints], make: Constructor) -> tuple[Any, object] | None:
    exact, ends = _fixed(given), _range(given)
    if exact is None or ends is None:
        return None
    zero_point = exact[1] + (1 if exact[1] < ends[1] else -1)
    return _with(make, zero_point=zero_point), (exact[0], zero_point)


def _measured(claim: Claim, given: Sequence[DTypeWithConstraints], _: Constructor) -> tuple[Any, object] | None:
    """Qparams of what is observed, where fixed ones are prescribed."""
    if _fixed(given) is None:
        return None
    arguments = observer_arguments(*given)
    if claim.flow == "qat":
        return FakeQuantize.with_args(observer=MinMaxObserver, **arguments), None
    return MinMaxObserver.with_args(**arguments), None


_OUTSIDE: tuple[tuple[str, str, Side, Change], ...] = (
    ("another activation dtype", "DTY-01", "activation", _other_dtype),
    ("another weight dtype", "DTY-01", "weight", _other_dtype),
    ("the activation's quant_min one lower", "DTY-03", "activation", partial(_wider, "quant_min")),
    ("the activation's quant_max one higher", "DTY-03", "activation", partial(_wider, "quant_max")),
    ("the weight's quant_min one lower", "DTY-03", "weight", partial(_wider, "quant_min")),
    ("the weight's quant_max one higher", "DTY-03", "weight", partial(_wider, "quant_max")),
    ("the activation's smallest scale just below", "DTY-04", "activation", _finer),
    ("the weight's smallest scale just below", "DTY-04", "weight", _finer),
    ("another fixed scale", "DTY-05", "activation", _other_scale),
    ("another fixed zero point", "DTY-05", "activation", _other_zero_point),
    ("measured qparams for fixed ones", "DTY-05", "activation", _measured),
    ("dynamic against static", "DTY-07", "activation", _other_mode),
)

# -- trying them -------------------------------------------------------------------------------------------------------


def _deciding_entries(claim: Claim, config: BackendConfig) -> BackendConfig:
    """Return the entries that decide about the claim's pattern, with the claim's dtype config only.

    What is trained is decided as its QAT class; what is fused as the module that fuse makes, of whichever class; and a
    pattern may leave it to the entry of its function to say where the weight is.
    """
    trained = claim.entry.qat_module
    deciding = functions_with(config, claim.dtypes)
    if claim.entry.fuser_method is not None:
        deciding += modules_with(config, claim.dtypes)
    elif trained is not None:
        deciding += tuple(with_only(entry, claim.dtypes) for entry in config.configs if entry.pattern is trained)
    return BackendConfig().set_backend_pattern_configs([*deciding, with_only(claim.entry, claim.dtypes)])


@lru_cache(maxsize=32)
def modules_with(config: BackendConfig, dtypes: DTypeConfig) -> tuple[BackendPatternConfig, ...]:
    """Return the entries of single modules, each with this dtype config only: what may decide for a fused pattern."""
    return tuple(with_only(entry, dtypes) for entry in config.configs if isinstance(entry.normal_pattern, type))


@lru_cache(maxsize=32)
def functions_with(config: BackendConfig, dtypes: DTypeConfig) -> tuple[BackendPatternConfig, ...]:
    """Return the entries of functions that say where their weight is, likewise: other patterns rely on it. (OBS-06)"""
    return tuple(with_only(entry, dtypes) for entry in config.configs if entry._input_type_to_index)


def with_only(entry: BackendPatternConfig, dtypes: DTypeConfig) -> BackendPatternConfig:
    """Return an entry with this dtype config in the place of its own."""
    return copy.copy(entry).set_dtype_configs([dtypes])


def _prepare(claim: Claim, model: nn.Module, mapping: QConfigMapping, config: BackendConfig) -> GraphModule:
    if claim.flow == "qat":
        return prepare_qat_fx(model.train(), mapping, None, leaves_of(claim), backend_config=config)
    return prepare_fx(model, mapping, None, leaves_of(claim), backend_config=config)


def _prepare_copies(
    claim: Claim, case: Case, model: nn.Module, edges: Sequence[EdgeQConfig], config: BackendConfig
) -> GraphModule:
    """Prepare a copy of the model for each QConfig, all side by side on the same inputs: one pass costs the least."""
    mapping, graph = QConfigMapping(), Graph()
    inputs = tuple(graph.placeholder(f"x{number}") for number in range(len(case.inputs)))
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    names = [_name(number) for number in range(len(edges))]
    graph.output(tuple(graph.call_module(name, inputs) for name in names))
    copies = GraphModule({name: copy.deepcopy(model, dict(shared)) for name in names}, graph)
    for name, edge in zip(names, edges, strict=True):
        mapping.set_module_name(name, edge.qconfig)
    return _prepare(claim, copies.eval(), mapping, config)


def _name(number: int) -> str:
    return f"edge{number}"


def _decisions(prepared: GraphModule, edges: Sequence[EdgeQConfig]) -> Iterator[tuple[EdgeQConfig, list[Decision]]]:
    """Yield what was decided in each copy of the model."""
    decisions = explain(prepared).plan.decisions
    for number, edge in enumerate(edges):
        yield edge, [each for each in decisions if each.places[-1].name.partition(".")[0] == _name(number)]


@guard("refusal.check_taken")
def check_taken(claim: Claim, edges: Sequence[EdgeQConfig], prepared: GraphModule) -> Problem | None:
    """A QConfig within all bounds is taken, by the claim's dtype config. (DTY-02)"""
    for edge, decisions in _decisions(prepared, edges):
        taken = [each for each in decisions if each.dtype_config == claim.dtypes]
        if not taken:
            reasons = "; ".join(each.reason for each in decisions) or "no match"
            return Problem(rule="DTY-02", message=f"a QConfig with {edge.name} is not taken: {reasons}")
    return None


@guard("refusal.check_refused")
def check_refused(edges: Sequence[EdgeQConfig], prepared: GraphModule) -> Problem | None:
    """QConfigs outside leave everything as it was, and the log has rule, value and bound. (DTY-06, DTY-09)"""
    for edge, decisions in _decisions(prepared, edges):
        if any(each.dtype_config is not None for each in decisions):
            text = f"a QConfig with {edge.name} is taken; the pattern must stay float"
            return Problem(rule=edge.rule, message=text)
        if not any(_is_named(edge, each) for each in decisions):
            reasons = "; ".join(each.reason for each in decisions) or "no match"
            text = f"refusing {edge.name}, the log does not name {edge.rule} and {edge.found}: {reasons}"
            return Problem(rule="DTY-09", message=text)
    observed = [slot.value for slot in explain(prepared).plan.slots]
    if observed:
        return Problem(rule="DTY-06", message=f"all QConfigs are refused, yet observed is {', '.join(observed)}")
    converted = convert_to_reference_decomposed_fx(prepared)
    left = [node.name for node in converted.graph.nodes if is_quantize(node) or is_dequantize(node)]
    if left:
        return Problem(rule="DTY-06", message=f"all QConfigs are refused, yet convert makes {', '.join(left)}")
    return None


def _is_named(edge: EdgeQConfig, decision: Decision) -> bool:
    return any(
        (each.rule, each.found, each.where.startswith("weight")) == (edge.rule, str(edge.found), edge.is_weight)
        and each.bound
        for each in decision.refusals
    )
