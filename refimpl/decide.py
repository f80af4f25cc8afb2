"""Deciding, for a whole graph, what is quantized and where observers go (rules QCM-06, QCM-07, OBS-01 to OBS-15).

The result is frozen data that can be printed; nothing here touches the graph. ``prepare`` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import BackendConfig, ObservationType
from refimpl.dtype_choice import ObserverFacts, QConfigFacts, Refusal, choose_dtype_config
from refimpl.dtype_config import DTypeConfig
from refimpl.errors import NotBuiltError
from refimpl.matching import Match, find_matches
from refimpl.observers import is_quantized_dtype
from refimpl.qconfig import GLOBAL, QConfig, QConfigMapping, QConfigResolver
from refimpl.tracing import Places, positional_arguments
from refimpl.values import float_tensors, observable_inputs

DIFFERENT = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
SHARE = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
NOT_OBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done with one match, and why. Nodes are named, so that a decision outlives its graph.

    ``dtype_config`` None: the pattern stays float, for ``reason``. ``observation`` is the type in force (OBS-07).
    ``target``: full name of the root's module; None if the root is a function.
    """

    node: str
    nodes: tuple[str, ...]
    root: str
    target: str | None
    pattern: str
    qconfig: QConfig | None
    source: str
    dtype_config: DTypeConfig | None
    refusals: tuple[Refusal, ...]
    reason: str
    observation: ObservationType


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One place where a value is observed. Slots of one ``group`` have one observer instance. (OBS-02)

    ``consumers``: the users that see the observed value; None: all of them. ``role``: "input", "output" or "weight".
    """

    value: str
    group: int
    make: Callable[..., nn.Module]
    role: str
    consumers: tuple[str, ...] | None
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that prepare decides: what is quantized, and where observers go. (OBS-15)"""

    # rule: OBS-15
    decisions: tuple[Decision, ...]
    slots: tuple[Slot, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self  # frozen, and all of it names nodes: copies of a model share it


def make_plan(model: GraphModule, config: BackendConfig, mapping: QConfigMapping) -> Plan:
    """Decide for a traced and fused model. The graph is not touched. (OBS-15)"""
    places = Places(model)
    matches = find_matches(model.graph, places, config.configs)
    floats = float_tensors(model)
    decide = _Decider(places, QConfigResolver(mapping), floats)
    weights = {entry.pattern: entry._input_type_to_index for entry in config.configs if entry._input_type_to_index}
    placer = _Placer(floats, weights)
    decisions = []
    for match in matches:
        decision = decide(match)
        decisions.append(decision)
        if decision.dtype_config is not None:
            placer.place(match, decision)
    return Plan(decisions=tuple(decisions), slots=placer.slots())


class _Decider:
    """Resolves the QConfig of a match and chooses its dtype config; each QConfig is probed once."""

    def __init__(self, places: Places, resolver: QConfigResolver, floats: set[Node]) -> None:
        self._places = places
        self._resolver = resolver
        self._floats = floats
        self._facts: dict[QConfig, QConfigFacts] = {}

    def __call__(self, match: Match) -> Decision:
        qconfig, source, reason = self._qconfig(match)
        chosen: DTypeConfig | None = None
        refusals: tuple[Refusal, ...] = ()
        if qconfig is not None and match.last not in self._floats:
            reason = f"OBS-10: {match.last.name} is not a float tensor"  # rule: OBS-10
        elif qconfig is not None:
            if qconfig not in self._facts:
                self._facts[qconfig] = QConfigFacts.of(qconfig)
            chosen, refusals = choose_dtype_config(self._facts[qconfig], match.entry.dtype_configs)
            reason = "" if chosen else "; ".join(map(str, refusals)) or "DTY-02: the entry has no dtype config"
        return Decision(
            node=match.last.name,
            nodes=tuple(node.name for node in match.nodes),
            root=match.root.name,
            target=str(match.root.target) if match.root.op == "call_module" else None,
            pattern=match.name,
            qconfig=qconfig,
            source=source,
            dtype_config=chosen,
            refusals=refusals,
            reason=reason,
            observation=_observation_type(match, self._floats),
        )

    def _qconfig(self, match: Match) -> tuple[QConfig | None, str, str]:
        """Return the QConfig of the deciding (last) node, its source, and the reason if there is none."""
        places, resolve = self._places, self._resolver.resolve
        qconfig, source = None, ""
        for node in match.nodes:
            qconfig, source = resolve(places.object_types(node), places.name(node), places.order(node))
            if qconfig is None:
                rule = "QCM-03" if node is match.last else "QCM-07"
                return None, source, f"{rule}: no QConfig for {node.name} ({source})"
            for part in places.fused_parts(node)[1:]:
                inner = resolve((part.object_type,), part.name)
                if inner.qconfig is None and inner.source != GLOBAL:  # rule: QCM-07
                    what = getattr(part.object_type, "__name__", part.object_type)
                    return None, inner.source, f"QCM-07: no QConfig for {what} fused into {node.name} ({inner.source})"
        return qconfig, source, ""  # rule: QCM-06


def _observation_type(match: Match, floats: set[Node]) -> ObservationType:
    """The entry's observation type, or the one for the root's number of tensor arguments. (OBS-07)"""
    by_count = match.entry._num_tensor_args_to_observation_type
    if not by_count:
        return match.entry.observation_type
    arguments = positional_arguments(match.root, at_least=2)
    count = sum(isinstance(argument, Node) and argument in floats for argument in arguments)
    return by_count.get(count, match.entry.observation_type)  # rule: OBS-07


@dataclass(slots=True)
class _Draft:
    """A slot while its group and consumers still grow."""

    value: Node
    group: int
    make: Callable[..., nn.Module]
    facts: ObserverFacts
    role: str
    rule: str
    consumers: list[Node] | None = field(default_factory=list)


class _Placer:
    """Places observers for accepted matches, in graph order; groups are a union-find over slots."""

    def __init__(self, floats: set[Node], weights: dict[Any, dict[str, int]]) -> None:
        self._floats = floats
        self._weights = weights
        self._drafts: list[_Draft] = []
        self._on: dict[Node, list[_Draft]] = {}
        self._parent: list[int] = []
        self._facts: dict[Callable[..., nn.Module], ObserverFacts] = {}

    def place(self, match: Match, decision: Decision) -> None:
        """Place the observers of one accepted match."""
        assert decision.qconfig is not None and decision.dtype_config is not None
        make = decision.qconfig.activation
        if decision.observation is NOT_OBSERVED:
            return  # rule: OBS-03
        if decision.dtype_config.is_dynamic or not is_quantized_dtype(self._facts_of(make).dtype):
            raise NotBuiltError(
                f"{match.name} at {match.last.name}: only static integer quantization is built; found activation "
                f"{make}, is_dynamic={decision.dtype_config.is_dynamic}"
            )
        has_weight = is_quantized_dtype(decision.dtype_config.weight_dtype)
        inputs = self._inputs(match, decision.qconfig, has_weight=has_weight)
        if decision.observation is DIFFERENT:
            self._output(match, make, "OBS-01")  # rule: OBS-01
        elif inputs:
            output = self._output(match, make, "OBS-02")
            for draft in inputs:  # rule: OBS-02, OBS-08
                self._join(inputs[0].group, draft.group)
            self._join(inputs[0].group, output.group)
        # rule: OBS-09 (sharing with nothing observed upstream: no output observer)

    def _inputs(self, match: Match, qconfig: QConfig, *, has_weight: bool) -> list[_Draft]:
        """See that every tensor that enters the match is observed; return the activations' slots in order.

        `has_weight`: the dtype config quantizes the weight; else a weight argument stays float.
        """
        inside = set(match.nodes)
        found = []
        for node in match.nodes:
            weight, bias = self._weight_arguments(node)
            for value in observable_inputs(node, self._floats):
                if value in inside or value is bias:  # rule: OBS-06
                    continue
                if value is weight:
                    if not has_weight:
                        continue
                    self._input(value, node, qconfig.weight, "weight", "OBS-06")
                else:
                    found.append(self._input(value, node, qconfig.activation, "input", "OBS-01"))
        return found

    def _input(self, value: Node, user: Node, make: Callable[..., nn.Module], role: str, rule: str) -> _Draft:
        """Find a slot on a value that gives what a user asks for, or place one. (OBS-04, OBS-14)"""
        wanted = self._facts_of(make)
        for draft in self._on.get(value, ()):
            if _gives(draft.facts, wanted):  # rule: OBS-04
                if draft.consumers is not None and user not in draft.consumers:
                    draft.consumers.append(user)
                return draft
        rule = "OBS-14" if value in self._on else rule  # rule: OBS-14
        draft = self._new(value, make, role, rule)
        draft.consumers = [user]
        return draft

    def _output(self, match: Match, make: Callable[..., nn.Module], rule: str) -> _Draft:
        draft = self._new(match.last, make, "output", rule)
        draft.consumers = None
        return draft

    def _new(self, value: Node, make: Callable[..., nn.Module], role: str, rule: str) -> _Draft:
        group = len(self._parent)
        self._parent.append(group)
        draft = _Draft(value=value, group=group, make=make, facts=self._facts_of(make), role=role, rule=rule)
        self._drafts.append(draft)
        self._on.setdefault(value, []).append(draft)
        return draft

    def _facts_of(self, make: Callable[..., nn.Module]) -> ObserverFacts:
        if make not in self._facts:
            observer = make()
            if type(observer).__name__ == "ReuseInputObserver":
                raise NotBuiltError(f"OBS-12: an activation observer that reuses its input's is not built yet: {make}")
            self._facts[make] = ObserverFacts.of(observer)
        return self._facts[make]

    def _weight_arguments(self, node: Node) -> tuple[Any, Any]:
        """The arguments of a function that are its weight and its bias, or None."""
        indexes = self._weights.get(node.target) if node.op == "call_function" else None
        if not indexes:
            return None, None
        arguments = positional_arguments(node, at_least=max(indexes.values()) + 1)
        weight, bias = (indexes.get(kind, len(arguments)) for kind in ("weight", "bias"))
        named = dict(enumerate(arguments))
        return named.get(weight, node.kwargs.get("weight")), named.get(bias, node.kwargs.get("bias"))

    def _find(self, group: int) -> int:
        while self._parent[group] != group:
            self._parent[group] = self._parent[self._parent[group]]
            group = self._parent[group]
        return group

    def _join(self, into: int, group: int) -> None:
        self._parent[self._find(group)] = self._find(into)

    def slots(self) -> tuple[Slot, ...]:
        """Freeze what was placed, in graph order, groups numbered from 0."""
        numbers: dict[int, int] = {}
        makers: dict[int, Callable[..., nn.Module]] = {}
        for draft in self._drafts:
            root = self._find(draft.group)
            numbers.setdefault(root, len(numbers))
            makers.setdefault(root, draft.make)
        return tuple(
            Slot(
                value=draft.value.name,
                group=numbers[self._find(draft.group)],
                make=makers[self._find(draft.group)],
                role=draft.role,
                consumers=None if draft.consumers is None else tuple(node.name for node in draft.consumers),
                rule=draft.rule,
            )
            for draft in self._drafts
        )


def _gives(found: ObserverFacts, wanted: ObserverFacts) -> bool:
    """Tell whether an observer in place serves another user: same dtype, mode and quantized range. (OBS-04, OBS-14)"""
    return (found.dtype, found.is_dynamic, found.quant_min, found.quant_max) == (
        wanted.dtype, wanted.is_dynamic, wanted.quant_min, wanted.quant_max,
    )  # fmt: skip
