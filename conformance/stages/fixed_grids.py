"""Fixed grids: whether results whose qparams a claim fixes are on just that grid. (CVT-01, DTY-05, OBS-02, OBS-14)

Such a grid does not follow from data: values beyond its ends are clipped, and that is right. Kernels agree with a
reference model that has another grid; only the claim tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims.kinds import fixed_qparams_of
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.oracle.grids import grid_of
from fx_quant_conformance.refimpl.config.backend_config import DIFFERENT
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from fx_quant_conformance.refimpl.graph.tracing import notes_of
from fx_quant_conformance.refimpl.observers.qparams import fill_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts, round_to_float32
from fx_quant_conformance.refimpl.prepare.plan import PLAN, Decision, Plan, Slot
from fx_quant_conformance.refimpl.quality.walk import LayerEdge, QualityWalk


class FixedGrid(NamedTuple):
    """A grid that a claim fixes: scale (as float32), zero point, and the integers that the QConfig asks for."""

    scale: float
    zero_point: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"scale {self.scale!r}, zero point {self.zero_point}, integers {self.low}..{self.high}"


FixedGrids: TypeAlias = Mapping[str, Sequence[tuple[Slot, FixedGrid | None]]]
"""The slots of activations on each value, by its full name, with the grid that claims fix for them; None: none."""


@guard("convert.check_fixed_grids")
def check_fixed_grids(reference: GraphModule) -> Iterator[Fault]:
    """Check that each result whose qparams a claim fixes is on just that grid, with all that shares it.

    What a claim fixes is the grid of its op's result: scale, zero point and range of integers are compared exactly
    (DTY-03, DTY-05). It must not stand on the op's input, which is measured, or on its producer's grid (OBS-14).
    """
    fixed = find_fixed_grids(reference)
    for prefix, model, plan in _models_in(reference):
        for slot in _find_misplaced(plan):
            text = f"{prefix}{slot.value} has the qparams that its consumer fixes for its result; it must be measured"
            yield Fault(rule="OBS-14", message=text)
        if any(grid is not None for given in fixed.values() for _, grid in given):
            for layer in QualityWalk(model, None, prefix, lambda *_: None).layers.values():
                yield from _hold(model, layer, grid_fixed_for(layer, fixed))


def _hold(model: GraphModule, layer: LayerEdge, expected: FixedGrid | None) -> Iterator[Fault]:
    """Hold a layer's grid to the one that is fixed for it."""
    if expected is None or layer.quantize is None or not is_quantize(layer.quantize):
        return
    grid = grid_of(model, layer.quantize)
    found = FixedGrid(round_to_float32(grid.scale), grid.zero_point, grid.low, grid.high)
    if found != expected:
        yield Fault(rule="CVT-01", message=f"{layer.name} is quantized with {found}; the claim fixes {expected}")


def find_fixed_grids(reference: GraphModule) -> FixedGrids:
    """Find which values of a reference model must be on a grid that a claim fixes.

    These are the results of its op, and the values that share them (OBS-02). Where an op joins them with values on
    other grids, they have a second grid for that op, which is measured (OBS-17).
    """
    found: dict[str, list[tuple[Slot, FixedGrid | None]]] = defaultdict(list)
    for prefix, _, plan in _models_in(reference):
        results = {each.node: grid for each in plan.decisions if (grid := _find_result_grid(each)) is not None}
        groups = defaultdict[int, list[Slot]](list)
        for slot in _activations_of(plan):
            groups[slot.group].append(slot)
        for slots in groups.values():
            grid = _find_group_grid(slots, results)
            for slot in slots:
                found[prefix + slot.value].append((slot, grid))
    return found


def grid_fixed_for(layer: LayerEdge, fixed: FixedGrids) -> FixedGrid | None:
    """Return the grid that a layer's values must be on, whatever they are; None: none is fixed."""
    given = fixed.get(layer.name, ())
    found = slot_of(layer, [slot for slot, _ in given])
    return next((grid for slot, grid in given if slot is found), None)


def slot_of(layer: LayerEdge, slots: Sequence[Slot]) -> Slot | None:
    """Return the one of a value's slots that a layer's rounding comes from; several where consumers differ. (OBS-14)"""
    if layer.decision is not None:
        return next((slot for slot in slots if slot.role == "output"), None)
    users = {user.name for user in layer.at.users}
    return next((slot for slot in slots if len(slots) == 1 or users.intersection(slot.consumers or ())), None)


def slots_in(reference: GraphModule) -> list[tuple[str, Slot]]:
    """List the slots of activations of a reference model, each with the prefix of names in its standalone module."""
    return [(prefix, slot) for prefix, _, plan in _models_in(reference) for slot in _activations_of(plan)]


def _models_in(reference: GraphModule) -> Iterator[tuple[str, GraphModule, Plan]]:
    """Yield a reference model and the standalone modules in it, with the prefix of names in each, and its plan."""
    for name, module in reference.named_modules():
        if isinstance(module, GraphModule) and PLAN in notes_of(module):
            yield f"{name}." if name else "", module, notes_of(module)[PLAN]


def _activations_of(plan: Plan) -> Iterator[Slot]:
    return (slot for slot in plan.slots if slot.role not in ("weight", "bias"))


def _find_result_grid(decision: Decision) -> FixedGrid | None:
    """Return the grid that a dtype config fixes for the result of its op; None: none, or the result shares another."""
    dtypes, qconfig = decision.dtype_config, decision.qconfig
    exact = None if dtypes is None else fixed_qparams_of(dtypes)
    if dtypes is None or qconfig is None or exact is None or decision.observation is not DIFFERENT:
        return None
    facts = ObserverFacts.of(qconfig.activation())
    if not is_quantized_dtype(facts.dtype) or facts.is_dynamic:
        return None
    low, high = fill_range(facts.dtype, facts.quant_min, facts.quant_max)  # type: ignore[arg-type]
    for end in (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints):
        if end.quant_min_lower_bound is not None and end.quant_max_upper_bound is not None:  # rule: DTY-03
            low, high = max(low, int(end.quant_min_lower_bound)), min(high, int(end.quant_max_upper_bound))
    return FixedGrid(*exact, low, high)


def _find_group_grid(slots: Sequence[Slot], results: Mapping[str, FixedGrid]) -> FixedGrid | None:
    """Return the grid that is fixed for values that share one observer."""
    joined = [
        slot for slot in slots if slot.rule in ("OBS-02", "OBS-12") or (slot.rule, slot.role) == ("OBS-17", "input")
    ]
    owners = [slot for slot in slots if slot not in joined]
    claimed = [results[slot.value] for slot in owners if slot.role == "output" and slot.value in results]
    if not claimed:
        return None
    asked = _fixed_qparams_asked(slots[0])
    matching = [grid for grid in claimed if grid[:2] == asked]
    if matching:
        return matching[0]
    return claimed[0] if len(claimed) == len(owners) else None  # else the first input of a sharing op is measured


def _find_misplaced(plan: Plan) -> Iterator[Slot]:
    """Find inputs whose own observer has what all their consumers fix, which is for these consumers' results."""
    decided = [(each, fixed_qparams_of(each.dtype_config)) for each in plan.decisions if each.dtype_config is not None]
    fixing = {name: exact for each, exact in decided if exact is not None for name in each.nodes}
    for slot in _activations_of(plan):
        fixed = {fixing[user] for user in slot.consumers or () if user in fixing}
        is_own = slot.role == "input" and slot.rule != "OBS-02" and fixing.keys() >= set(slot.consumers or ())
        if fixed and is_own and _fixed_qparams_asked(slot) in fixed:
            yield slot


def _fixed_qparams_asked(slot: Slot) -> tuple[float, int] | None:
    """Return the qparams that a slot's observer has from the start; None: it measures them."""
    fixed: Any = ObserverFacts.of(slot.make()).fixed
    return None if fixed is None else (round_to_float32(fixed[0]), fixed[1])
