"""Placing observers for the matches that are quantized (rules OBS-01 to OBS-14, DTY-08). The graph is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refimpl.dtype_choice import ObserverFacts, QConfigFacts, is_observed_dtype
from refimpl.dtype_config import DTypeWithConstraints
from refimpl.fake_quantize import FakeQuantize
from refimpl.matching import Match
from refimpl.observers import MinMaxObserver, dtype_range, is_quantized_dtype
from refimpl.plan import DIFFERENT, NOT_OBSERVED, OBSERVER_PREFIX, SHARE, Decision, Role, Slot
from refimpl.tracing import Places, positional_arguments, tensor_inputs
from refimpl.values import observable_inputs

Make = Callable[..., nn.Module]
_UNBOUNDED = DTypeWithConstraints()


@dataclass(slots=True)
class _Draft:
    """A slot while its group and consumers still grow. ``consumers`` None: every user, it is an output's."""

    value: Node
    group: int
    make: Make
    facts: ObserverFacts
    role: Role
    rule: str
    consumers: list[Node] | None


class Placer:
    """Places observers in graph order: a node's inputs when it is reached, the output at a match's last node.

    `weights`: the argument indexes of weight and bias by function. `given`: values that come quantized, with their
    dtype (OBS-11). `default`: the activation constructor of the mapping's global QConfig. Groups are a union-find over
    slots; the root of a group is the slot whose constructor all of it has.
    """

    def __init__(
        self,
        floats: set[Node],
        weights: Mapping[Any, Mapping[str, int]],
        given: dict[Node, torch.dtype],
        facts_of: Callable[[Make], ObserverFacts],
        default: Make | None,
    ) -> None:
        self._default = default
        self._floats = floats
        self._weights = weights
        self._given = given
        self._facts_of = facts_of
        self.carried: dict[Node, Node] = {}  # results on the grid of a given value → that value
        self._drafts: list[_Draft] = []
        self._on: dict[Node, list[_Draft]] = {}
        self._parent: list[int] = []

    def place(self, nodes: Iterable[Node], accepted: Iterable[tuple[Match, Decision]]) -> None:
        """Place the observers of all accepted matches of a graph with these nodes."""
        at: dict[Node, tuple[Match, Decision, list[_Draft | None]]] = {}
        for match, decision in accepted:
            if decision.observation is not NOT_OBSERVED and decision.qconfig is not None:  # rule: OBS-03
                at |= dict.fromkeys(match.nodes, (match, decision, []))
        for node in filter(at.__contains__, nodes):
            match, decision, inputs = at[node]
            inputs.extend(self._inputs(node, match, decision))
            if node is match.last:
                self._finish(match, decision, inputs)

    def _finish(self, match: Match, decision: Decision, inputs: list[_Draft | None]) -> None:
        """Place a match's output observer, alone or shared with its inputs."""
        assert decision.qconfig is not None
        make = decision.qconfig.activation
        facts = self._facts_of(make)
        if facts.is_dynamic or not is_observed_dtype(facts.dtype):
            return  # rule: OBS-05 (a dynamic output is float)
        if decision.kind == "standalone module" or match.last in self._given:
            return  # rule: STD-01 (its output is observed inside, if at all)
        if match.last not in self._floats:
            return  # rule: OBS-10 (a module that returns a tuple: it is no value to be observed)
        sources = [self._upstream(match.root)] if facts.reuses_input else inputs  # rule: OBS-12
        placed = [draft for draft in sources if draft is not None]
        if decision.observation is SHARE and inputs and not placed and (given := self._only_given(match)) is not None:
            self.carried[match.last] = given  # rule: OBS-11, OBS-02
            self._given[match.last] = self._given[given]
        elif not facts.reuses_input and (decision.observation is DIFFERENT or len(placed) < len(inputs)):
            # rule: OBS-01, OBS-11 (a value given quantized beside others has no observer here)
            self._new(match.last, make, "output", "OBS-01", None)
        elif placed:  # rule: OBS-09 (sharing with nothing observed upstream: no output observer)
            rule = "OBS-12" if facts.reuses_input else "OBS-02"
            joining = [self._own(d, match, placed[0]) if self._is_settled(d, placed[0]) else d for d in placed[1:]]
            for draft in (*joining, self._new(match.last, placed[0].make, "output", rule, None)):  # rule: OBS-08
                self._parent[self._find(draft.group)] = self._find(placed[0].group)  # rule: OBS-02

    def _is_settled(self, draft: _Draft, other: _Draft) -> bool:
        """Tell whether a value is the result of an op that shares with values that `other` does not. (OBS-02)"""
        return draft.rule == "OBS-02" and draft.role == "output" and self._find(draft.group) != self._find(other.group)

    def _own(self, draft: _Draft, match: Match, first: _Draft) -> _Draft:
        """Place a slot behind a value's own that this match alone sees."""
        users = [node for node in match.nodes if draft.value in node.all_input_nodes]
        return self._new(draft.value, first.make, "input", "OBS-02", users)

    def _only_given(self, match: Match) -> Node | None:
        """The one value whose grid all given inputs of a match are on, if its result is on it too. (OBS-11)

        Arithmetic that shares an observer only because its other operand is a number (OBS-07) leaves the grid.
        """
        values = (value for node in match.nodes for value in node.all_input_nodes if value in self._given)
        given = {self.carried.get(value, value) for value in values}
        return given.pop() if len(given) == 1 and not match.entry._num_tensor_args_to_observation_type else None

    def _upstream(self, node: Node) -> _Draft | None:
        """Find the observer of a node's first input, through what is not observed. (OBS-12)"""
        user, value = node, next(iter(tensor_inputs((node.args, node.kwargs))), None)
        while value is not None:
            for draft in self._on.get(value, ()):
                if draft.consumers is None or user in draft.consumers:
                    return draft
            user, value = value, next(iter(tensor_inputs((value.args, value.kwargs))), None)  # rule: OBS-12, PAT-08
        return None

    def _inputs(self, node: Node, match: Match, decision: Decision) -> Iterable[_Draft | None]:
        """See that every tensor that enters the match here is observed; yield the activations' slots, None if given."""
        assert decision.qconfig is not None
        activation, entries = self._facts_of(decision.qconfig.activation), decision.quantized_inputs
        weight, bias = weight_arguments(node, match, self._weights)
        first = next(iter(positional_arguments(node, at_least=1)), None)
        for value in observable_inputs(node, self._floats):
            if value in match.nodes:
                continue
            if value is bias:
                asked = QConfigFacts(activation=activation, weight=self._facts_of(decision.qconfig.weight))
                if asked.bias_dtype == torch.float16:  # rule: DTY-08, OBS-06
                    self._input(value, node, decision.qconfig.activation, "bias", "DTY-08")
            elif value is weight:
                if decision.dtype_config and is_observed_dtype(decision.dtype_config.weight_dtype):
                    self._input(value, node, decision.qconfig.weight, "weight", "OBS-06")  # rule: OBS-06
            elif activation.reuses_input or not is_observed_dtype(activation.dtype):
                continue  # rule: CVT-11 (weight-only: the activations stay as they are)
            elif activation.is_dynamic and value is not first:
                continue  # rule: OBS-05
            elif self._given.get(value) == activation.dtype and not activation.is_dynamic:
                yield None  # rule: OBS-11
            elif entries is None or any(argument is value and i in entries for i, argument in enumerate(node.args)):
                # rule: STD-01 (a standalone module's other inputs stay float)
                rule = "OBS-05" if activation.is_dynamic else "OBS-01"
                yield self._input(value, node, self._of_input(decision), "input", rule, _bounds(decision))

    def _of_input(self, decision: Decision) -> Make:
        """Return what observes an op's inputs: not the qparams that its dtype config fixes for its output. (OBS-14)

        In their place stands the global QConfig's activation if it observes the same dtype, else a min/max observer.
        """
        assert decision.qconfig is not None
        make = decision.qconfig.activation
        facts = self._facts_of(make)
        if _bounds(decision).scale_exact_match is None or facts.fixed is None:
            return make
        if self._default is not None:
            common = self._facts_of(self._default)
            is_same_kind = (common.dtype, common.is_dynamic) == (facts.dtype, facts.is_dynamic)
            if is_same_kind and common.fixed is None and not common.reuses_input:
                return self._default  # rule: OBS-14
        is_fake = hasattr(facts.observer_class, "enable_fake_quant")
        return (FakeQuantize if is_fake else MinMaxObserver).with_args(dtype=facts.dtype)

    def _input(
        self, value: Node, user: Node, make: Make, role: Role, rule: str, bounds: DTypeWithConstraints = _UNBOUNDED
    ) -> _Draft:
        """Find a slot on a value that gives what a user asks for, or place one. (OBS-04, OBS-14)

        Two users of an unobserved value share one only if they ask for the same class. `bounds`: those of the user's
        dtype config for its input.
        """
        wanted = self._facts_of(make)
        for draft in self._on.get(value, ()):
            is_same_class = draft.facts.observer_class is wanted.observer_class
            is_same_kind = (draft.facts.dtype, draft.facts.is_dynamic) == (wanted.dtype, wanted.is_dynamic)
            if is_same_kind and (draft.consumers is None or is_same_class):  # rule: OBS-04
                if self._is_too_wide(draft.facts, wanted, role, bounds):
                    continue  # rule: OBS-14
                if draft.consumers is not None and user not in draft.consumers:
                    draft.consumers.append(user)
                return draft
        return self._new(value, make, role, "OBS-14" if value in self._on else rule, [user])  # rule: OBS-14

    def _is_too_wide(
        self, found: ObserverFacts, wanted: ObserverFacts, role: Role, bounds: DTypeWithConstraints
    ) -> bool:
        """Tell whether a range of integers that is there already cannot serve a user. (OBS-14)

        It leaves the bounds of the user's dtype config, or the range that the user's QConfig asks for, unless that is
        the one that the mapping has for everything: then the wider range is what was asked for in particular.
        """
        (low, high), (least, most) = _range(found), _range(wanted)
        ends = (bounds.quant_min_lower_bound, bounds.quant_max_upper_bound)
        if None not in ends and not ends[0] <= low <= high <= ends[1]:  # type: ignore[operator]
            return True
        common = None if role != "input" or self._default is None else _range(self._facts_of(self._default))
        return (least, most) != common and not least <= low <= high <= most

    def _new(self, value: Node, make: Make, role: Role, rule: str, consumers: list[Node] | None) -> _Draft:
        draft = _Draft(value, len(self._parent), make, self._facts_of(make), role, rule, consumers)
        self._parent.append(draft.group)
        self._drafts.append(draft)
        self._on.setdefault(value, []).append(draft)
        return draft

    def _find(self, group: int) -> int:
        while self._parent[group] != group:
            self._parent[group] = self._parent[self._parent[group]]
            group = self._parent[group]
        return group

    def slots(self, places: Places, is_quantized: Callable[[Node], bool]) -> tuple[Slot, ...]:
        """Freeze what was placed, in graph order, groups numbered from 0.

        `is_quantized` tells whether a QConfig holds for a node: its output is then named after itself.
        """
        groups: dict[int, int] = {}
        for draft in self._drafts:
            groups.setdefault(self._find(draft.group), len(groups))
        return tuple(
            Slot(
                name=f"{OBSERVER_PREFIX}{index}",
                value=draft.value.name,
                group=groups[self._find(draft.group)],
                make=self._drafts[self._find(draft.group)].make,  # rule: OBS-02
                role=draft.role,
                consumers=None if draft.consumers is None else tuple(node.name for node in draft.consumers),
                rule=draft.rule,
                scope=self._scope(draft, places, is_quantized),
            )
            for index, draft in enumerate(self._drafts)
        )

    def _scope(self, draft: _Draft, places: Places, is_quantized: Callable[[Node], bool]) -> str:
        """Return the name that a slot's qparams begin with: the value's module, or ``<user's module>_input``."""
        if draft.role == "input" and self._on[draft.value][0].role == "output":
            return ""  # rule: OBS-14 (it observes what the producer's own observer gives: a value of no module)
        if is_quantized(draft.value) or not draft.consumers:
            return places.name(draft.value)
        linear = [user for user in draft.consumers if user.target is torch.nn.functional.linear]
        return f"{places.name((linear or draft.consumers)[0])}_input"


def _bounds(decision: Decision) -> DTypeWithConstraints:
    """What the chosen dtype config says of the inputs; nothing for a custom or standalone module."""
    return decision.dtype_config.input_dtype_with_constraints if decision.dtype_config else _UNBOUNDED


def _range(facts: ObserverFacts) -> tuple[float, float]:
    """The range of integers that an observer asks for; of what is no integer, or names no end, the widest."""
    ends = dtype_range(facts.dtype) if is_quantized_dtype(facts.dtype) else (-inf, inf)  # type: ignore[arg-type]
    asked = (facts.quant_min, facts.quant_max)
    low, high = (end if own is None else own for end, own in zip(ends, asked, strict=True))
    return low, high


def weight_arguments(node: Node, match: Match, indexes: Mapping[Any, Mapping[str, int]]) -> tuple[Any, Any]:
    """Return the arguments of a function that are its weight and its bias, or None. (OBS-06)

    Their positions in the root are those that the match's own entry gives, if any; else, and in other functions, those
    of the entry for the function alone, in `indexes`.
    """
    own = match.entry._input_type_to_index if node is match.root else {}
    at = own or (indexes.get(node.target) if node.op == "call_function" else None)  # rule: OBS-06
    if not at:
        return None, None
    named = dict(enumerate(positional_arguments(node, at_least=max(at.values()) + 1)))
    weight, bias = (named.get(at.get(kind, -1), node.kwargs.get(kind)) for kind in ("weight", "bias"))
    return weight, bias


def tuple_elements(node: Node, shape: Any) -> list[Node]:
    """List the nodes that take a tuple of that shape apart; what is not a tuple in `shape` is a tensor."""
    parts = [user for user in node.users if user.target is getitem] if isinstance(shape, tuple) else []
    return [element for part in parts for element in (part, *tuple_elements(part, shape[part.args[1]]))]
