"""Placing observers for the matches that are quantized (rules OBS-01 to OBS-14, DTY-08). The graph is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fx_quant_conformance.refimpl.config.backend_config import DIFFERENT, NOT_OBSERVED, SHARE
from fx_quant_conformance.refimpl.config.dtype_config import DTypeWithConstraints
from fx_quant_conformance.refimpl.config.qconfig import QConfig
from fx_quant_conformance.refimpl.graph.matching import Match
from fx_quant_conformance.refimpl.graph.tracing import Places, list_nodes, positional_arguments_of
from fx_quant_conformance.refimpl.graph.values import observable_inputs_of
from fx_quant_conformance.refimpl.observers.fake_quantize import FakeQuantize, FixedQParamsFakeQuantize
from fx_quant_conformance.refimpl.observers.observers import FixedQParamsObserver, MinMaxObserver
from fx_quant_conformance.refimpl.observers.qparams import dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.dtype_choice import (
    ObserverFacts,
    ObserverReader,
    find_violations,
    is_observed_dtype,
)
from fx_quant_conformance.refimpl.prepare.grid_losses import read_linear_op
from fx_quant_conformance.refimpl.prepare.plan import Decision, Role, Slot

Make = Callable[..., nn.Module]
_UNBOUNDED = DTypeWithConstraints()


@dataclass(slots=True)
class _OpenSlot:
    """A slot while its group and consumers still grow."""

    value: Node
    group: int
    make: Make
    facts: ObserverFacts
    role: Role
    rule: str
    consumers: list[Node] | None
    """None, of an output: every user."""


class Placer:
    """Places observers in graph order: a node's inputs when it is reached, the output at a match's last node.

    `indexes`: the argument indexes of weight and bias by function. `quantized`: values that come quantized, with their
    dtype (OBS-11). `default`: the mapping's global QConfig. Groups are a union-find over slots; all slots of a group
    have the constructor of its root.
    """

    def __init__(
        self,
        floats: set[Node],
        indexes: Mapping[Any, Mapping[str, int]],
        quantized: dict[Node, torch.dtype],
        reader: ObserverReader,
        default: QConfig | None,
    ) -> None:
        self._floats = floats
        self._indexes = indexes
        self._quantized = quantized
        self._reader = reader
        self._default = default
        self.carried: dict[Node, Node] = {}  # results on the grid of a given value → that value
        self._slots: list[_OpenSlot] = []
        self._on: dict[Node, list[_OpenSlot]] = {}
        self._parent: list[int] = []

    def place(self, nodes: Iterable[Node], accepted: Iterable[tuple[Match, Decision]]) -> None:
        """Place the observers of all accepted matches of a graph with these nodes."""
        at: dict[Node, tuple[Match, Decision, list[_OpenSlot | None]]] = {}
        for match, decision in accepted:
            if decision.observation is not NOT_OBSERVED and decision.qconfig is not None:  # rule: OBS-03
                at |= dict.fromkeys(match.nodes, (match, decision, []))
        for node in filter(at.__contains__, nodes):
            match, decision, inputs = at[node]
            inputs.extend(self._place_inputs(node, match, decision))
            if node is match.last:
                self._finish(match, decision, inputs)

    def _finish(self, match: Match, decision: Decision, inputs: list[_OpenSlot | None]) -> None:
        """Place a match's output observer, its own or its inputs'."""
        assert decision.qconfig is not None
        make = decision.qconfig.activation
        facts = self._reader.read(make)
        if facts.is_dynamic or not is_observed_dtype(facts.dtype):
            return  # rule: OBS-05 (a dynamic output is float)
        if decision.kind == "standalone module" or match.last in self._quantized:
            return  # rule: STD-01 (its output is observed inside, if at all)
        if match.last not in self._floats:
            return  # rule: OBS-10 (a module that returns a tuple: it is no value to be observed)
        sources = [self._find_upstream(match.root)] if facts.reuses_input else inputs  # rule: OBS-12
        placed = [slot for slot in sources if slot is not None]
        if decision.observation is SHARE and inputs and not placed and (owner := self._find_owner(match)) is not None:
            self.carried[match.last] = owner  # rule: OBS-11, OBS-02
            self._quantized[match.last] = self._quantized[owner]
        elif not facts.reuses_input and (decision.observation is DIFFERENT or len(placed) < len(inputs)):
            # rule: OBS-01, OBS-11 (a value given quantized in addition to others has no observer here)
            self._add(match.last, make, "output", "OBS-01", None)
        elif not facts.reuses_input and (own := self._find_own_grid(match, decision, placed)) is not None:
            self._add(match.last, own, "output", "OBS-17", None)  # rule: OBS-17
        elif placed:  # rule: OBS-09 (sharing with nothing observed upstream: no output observer)
            placed = placed if facts.reuses_input else self._part_fixed(placed, match, make)
            first, rule = placed[0], "OBS-12" if facts.reuses_input else "OBS-02"
            joining = [self._free(slot, match, first) for slot in placed[1:]]
            for slot in (*joining, self._add(match.last, first.make, "output", rule, None)):  # rule: OBS-08
                self._parent[self._root_of(slot)] = self._root_of(first)  # rule: OBS-02

    def _free(self, slot: _OpenSlot, match: Match, first: _OpenSlot) -> _OpenSlot:
        """Return a slot; for an op's result that shares with other values than `first`, one only for this match."""
        if slot.rule != "OBS-02" or slot.role != "output" or self._root_of(slot) == self._root_of(first):
            return slot
        users = [node for node in match.nodes if slot.value in node.all_input_nodes]
        return self._add(slot.value, first.make, "input", "OBS-02", users)

    def _find_own_grid(self, match: Match, decision: Decision, placed: list[_OpenSlot]) -> Make | None:
        """Return the constructor of an output observer of its own, for arithmetic that can leave a fixed grid. (OBS-17)

        Where the number is known, its grid is fixed too, and holds what the op can give; else, and where the op's dtype
        config forbids such a grid, it is the QConfig's. None: the op is no such arithmetic, or cannot leave the grid.
        """
        assert decision.qconfig is not None
        make = decision.qconfig.activation
        facts = [self._facts_of(slot) for slot in placed]
        fixed = next((each for each in facts if each.fixed not in (None, self._reader.read(make).fixed)), None)
        if fixed is None or fixed.fixed is None or not match.entry._num_tensor_args_to_observation_type:
            return None
        line, (scale, zero_point), (least, most) = read_linear_op(match.root), fixed.fixed, _range_of(fixed)
        if line is None:
            return make
        old = ((least - zero_point) * scale, (most - zero_point) * scale)
        low, high = line.map_range(*old)
        if old[0] <= low and high <= old[1]:
            return None
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / (most - least)
        grid = {"scale": scale, "zero_point": round(least - low / scale), "dtype": fixed.dtype}
        own = FixedQParamsObserver.with_args(**grid, quant_min=least, quant_max=most)
        own = FixedQParamsFakeQuantize.with_args(observer=own) if _is_fake(fixed) else own
        output = decision.dtype_config.output_dtype_with_constraints if decision.dtype_config else _UNBOUNDED
        return make if any(find_violations(self._reader.read(own), output)) else own

    def _part_fixed(self, placed: list[_OpenSlot], match: Match, make: Make) -> list[_OpenSlot]:
        """Return the slots that an op's inputs share; those on fixed grids get one more, if not all are. (OBS-17)

        The constructor is that of the first input on no fixed grid, or the op's own.
        """
        fixed = [self._facts_of(slot).fixed for slot in placed]
        if len(set(fixed)) == 1:
            return placed
        common = next((slot.make for slot, qparams in zip(placed, fixed, strict=True) if qparams is None), make)
        parted = []
        for slot, qparams in zip(placed, fixed, strict=True):
            users = [node for node in match.nodes if slot.value in node.all_input_nodes]
            is_own = qparams is None or qparams == self._reader.read(common).fixed
            parted.append(slot if is_own else self._add(slot.value, common, "input", "OBS-17", users))
        return parted

    def _facts_of(self, slot: _OpenSlot) -> ObserverFacts:
        """Return the facts of the observer that a slot has: of the first of its group."""
        return self._slots[self._root_of(slot)].facts

    def _find_owner(self, match: Match) -> Node | None:
        """Return the one value whose grid all given inputs of a match are on, if its result is on it too. (OBS-11)

        Arithmetic that shares an observer only because its other operand is a number (OBS-07) leaves the grid.
        """
        values = (value for node in match.nodes for value in node.all_input_nodes if value in self._quantized)
        sources = {self.carried.get(value, value) for value in values}
        return sources.pop() if len(sources) == 1 and not match.entry._num_tensor_args_to_observation_type else None

    def _find_upstream(self, node: Node) -> _OpenSlot | None:
        """Find the observer of a node's first input, through values that are not observed. (OBS-12)"""
        user, value = node, next(iter(list_nodes((node.args, node.kwargs))), None)
        while value is not None:
            for slot in self._on.get(value, ()):
                if slot.consumers is None or user in slot.consumers:
                    return slot
            user, value = value, next(iter(list_nodes((value.args, value.kwargs))), None)  # rule: OBS-12, PAT-08
        return None

    def _place_inputs(self, node: Node, match: Match, decision: Decision) -> Iterable[_OpenSlot | None]:
        """Observe every tensor that enters the match here; yield the activations' slots, None if given."""
        assert decision.qconfig is not None
        activation, indexes = self._reader.read(decision.qconfig.activation), decision.quantized_inputs
        weight, bias = find_weight_arguments(node, match, self._indexes)
        first = next(iter(positional_arguments_of(node, at_least=1)), None)
        for value in observable_inputs_of(node, self._floats):
            if value in match.nodes:
                continue
            if value is bias:
                if self._reader.read_qconfig(decision.qconfig).bias_dtype == torch.float16:  # rule: DTY-08, OBS-06
                    self._observe(value, node, decision.qconfig.activation, "bias", "DTY-08")
            elif value is weight:
                if decision.dtype_config and is_observed_dtype(decision.dtype_config.weight_dtype):
                    self._observe(value, node, decision.qconfig.weight, "weight", "OBS-06")  # rule: OBS-06
            elif activation.reuses_input or not is_observed_dtype(activation.dtype):
                continue  # rule: CVT-11 (weight-only: the activations stay as they are)
            elif activation.is_dynamic and value is not first:
                continue  # rule: OBS-05
            elif self._quantized.get(value) == activation.dtype and not activation.is_dynamic:
                yield None  # rule: OBS-11
            elif indexes is None or any(argument is value and i in indexes for i, argument in enumerate(node.args)):
                # rule: STD-01 (a standalone module's other inputs stay float)
                make, bounds = self._choose_input_constructor(decision), _bounds_of(decision)
                yield self._observe(value, node, make, "input", "OBS-05" if activation.is_dynamic else "OBS-01", bounds)

    def _choose_input_constructor(self, decision: Decision) -> Make:
        """Return the constructor for an op's inputs: not the qparams that its dtype config fixes for outputs. (OBS-14)

        Their place takes the global QConfig's activation if it observes the same dtype, else a min/max observer.
        """
        assert decision.qconfig is not None
        make = decision.qconfig.activation
        facts = self._reader.read(make)
        if facts.fixed is None or not _fixes_qparams(decision):
            return make
        if self._default is not None:
            common = self._reader.read(self._default.activation)
            is_same_kind = (common.dtype, common.is_dynamic) == (facts.dtype, facts.is_dynamic)
            if is_same_kind and common.fixed is None and not common.reuses_input:
                return self._default.activation  # rule: OBS-14
        return (FakeQuantize if _is_fake(facts) else MinMaxObserver).with_args(dtype=facts.dtype)

    def _observe(
        self, value: Node, user: Node, make: Make, role: Role, rule: str, bounds: DTypeWithConstraints = _UNBOUNDED
    ) -> _OpenSlot:
        """Return a slot on a value that fits a user's request; add one if there was none. (OBS-04, OBS-14)

        Two users of an unobserved value share one only if they ask for the same class. `bounds`: the input's in the
        user's dtype config.
        """
        request = self._reader.read(make)
        for slot in self._on.get(value, ()):
            is_same_class = slot.facts.observer_class is request.observer_class
            is_same_kind = (slot.facts.dtype, slot.facts.is_dynamic) == (request.dtype, request.is_dynamic)
            if is_same_kind and (slot.consumers is None or is_same_class):  # rule: OBS-04
                if self._is_too_wide(slot.facts, request, role, bounds):
                    continue  # rule: OBS-14
                if slot.consumers is not None and user not in slot.consumers:
                    slot.consumers.append(user)
                return slot
        return self._add(value, make, role, "OBS-14" if value in self._on else rule, [user])  # rule: OBS-14

    def _is_too_wide(
        self, present: ObserverFacts, request: ObserverFacts, role: Role, bounds: DTypeWithConstraints
    ) -> bool:
        """Tell whether the range of integers of a present slot cannot serve a user. (OBS-14)

        It leaves the bounds of the user's dtype config, or the range that the user's QConfig asks for, unless the
        mapping's global QConfig asks for that one too: then the wider range was requested in particular.
        """
        (low, high), (least, most) = _range_of(present), _range_of(request)
        ends = (bounds.quant_min_lower_bound, bounds.quant_max_upper_bound)
        if None not in ends and not ends[0] <= low <= high <= ends[1]:  # type: ignore[operator]
            return True
        default = self._default if role == "input" else None
        common = None if default is None else _range_of(self._reader.read(default.activation))
        return (least, most) != common and not least <= low <= high <= most

    def _add(self, value: Node, make: Make, role: Role, rule: str, consumers: list[Node] | None) -> _OpenSlot:
        slot = _OpenSlot(value, len(self._parent), make, self._reader.read(make), role, rule, consumers)
        self._parent.append(slot.group)
        self._slots.append(slot)
        self._on.setdefault(value, []).append(slot)
        return slot

    def _root_of(self, slot: _OpenSlot) -> int:
        group = slot.group
        while self._parent[group] != group:
            self._parent[group] = self._parent[self._parent[group]]
            group = self._parent[group]
        return group

    def freeze_slots(
        self, places: Places, is_quantized: Callable[[Node], bool], names: Iterator[str]
    ) -> tuple[Slot, ...]:
        """Freeze the slots, in graph order, with groups numbered from 0.

        `is_quantized` tells whether a QConfig holds for a node: its output is then named after itself. `names`: free
        names for the observers.
        """
        groups: dict[int, int] = {}
        for slot in self._slots:
            groups.setdefault(self._root_of(slot), len(groups))
        return tuple(
            Slot(
                name=name,
                value=slot.value.name,
                group=groups[self._root_of(slot)],
                make=self._slots[self._root_of(slot)].make,  # rule: OBS-02
                role=slot.role,
                consumers=None if slot.consumers is None else tuple(node.name for node in slot.consumers),
                rule=slot.rule,
                scope=self._scope_of(slot, places, is_quantized),
            )
            for name, slot in zip(names, self._slots, strict=False)
        )

    def _scope_of(self, slot: _OpenSlot, places: Places, is_quantized: Callable[[Node], bool]) -> str:
        """Return the prefix of the names of a slot's qparams: the value's module, or ``<user's module>_input``."""
        if slot.role == "input" and self._on[slot.value][0].role == "output":
            return ""  # rule: OBS-14 (it observes the output of the producer's own observer: a value of no module)
        if is_quantized(slot.value) or not slot.consumers:
            return places.name_of(slot.value)
        linear = [user for user in slot.consumers if user.target is torch.nn.functional.linear]
        return f"{places.name_of((linear or slot.consumers)[0])}_input"


def _is_fake(facts: ObserverFacts) -> bool:
    return hasattr(facts.observer_class, "enable_fake_quant")


def _bounds_of(decision: Decision) -> DTypeWithConstraints:
    """Return the chosen dtype config's bounds of inputs; none for a custom or standalone module."""
    return decision.dtype_config.input_dtype_with_constraints if decision.dtype_config else _UNBOUNDED


def _fixes_qparams(decision: Decision) -> bool:
    """Tell whether the chosen dtype config fixes the qparams of an end; an observer of these is its output's."""
    dtypes = decision.dtype_config
    ends = () if dtypes is None else (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    return any(end.scale_exact_match is not None for end in ends)


def _range_of(facts: ObserverFacts) -> tuple[float, float]:
    """Return the range of integers that an observer asks for; of a float dtype, or without an end, the widest."""
    low, high = dtype_range(facts.dtype) if is_quantized_dtype(facts.dtype) else (-inf, inf)  # type: ignore[arg-type]
    return low if facts.quant_min is None else facts.quant_min, high if facts.quant_max is None else facts.quant_max


def find_weight_arguments(node: Node, match: Match, indexes: Mapping[Any, Mapping[str, int]]) -> tuple[Any, Any]:
    """Return the arguments of a function that are its weight and its bias, or None. (OBS-06)

    Their positions in the root are those of the match's own entry, if it has any; else, and in other functions, those
    of the entry for only the function, in `indexes`.
    """
    own = match.entry._input_type_to_index if node is match.root else {}
    positions = own or (indexes.get(node.target) if node.op == "call_function" else None)  # rule: OBS-06
    if not positions:
        return None, None
    arguments = dict(enumerate(positional_arguments_of(node, at_least=max(positions.values()) + 1)))
    weight, bias = (arguments.get(positions.get(kind, -1), node.kwargs.get(kind)) for kind in ("weight", "bias"))
    return weight, bias


def find_tuple_elements(node: Node, shape: Any) -> list[Node]:
    """List the nodes that take a tuple of that shape apart; an element of `shape` that is no tuple is a tensor."""
    parts = [user for user in node.users if user.target is getitem] if isinstance(shape, tuple) else []
    return [element for part in parts for element in (part, *find_tuple_elements(part, shape[part.args[1]]))]
