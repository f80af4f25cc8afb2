"""Deciding, for a whole graph, what is quantized (rules QCM-06, QCM-07, OBS-07, QAT-01, STD-01, CUS-01).

The result is frozen data that can be printed; nothing here touches the graph. ``prepare`` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refimpl.backend_config import BackendConfig, BackendPatternConfig, ObservationType
from refimpl.custom_config import PrepareCustomConfig, QuantType, StandaloneModuleConfigEntry
from refimpl.dtype_choice import ObserverFacts, QConfigFacts, Refusal, choose_dtype_config
from refimpl.dtype_config import DTypeConfig
from refimpl.errors import QConfigError, blaming
from refimpl.example_run import Examples
from refimpl.matching import Match, find_matches
from refimpl.patterns import leaf_name
from refimpl.placing import Placer, tuple_elements, weight_arguments
from refimpl.plan import DIFFERENT, LSTM_RESULT, Decision, Kind, Place, Plan
from refimpl.qconfig import GLOBAL, QConfig, QConfigMapping, QConfigResolver, as_qconfig
from refimpl.tracing import CALLS, Places, positional_arguments
from refimpl.values import float_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller of prepare asks for."""

    config: BackendConfig
    mapping: QConfigMapping
    custom: PrepareCustomConfig
    is_qat: bool = False


def make_plan(model: GraphModule, request: Request, examples: Examples) -> Plan:
    """Decide for a traced and fused model. The graph is not touched. (OBS-15)"""
    places = Places(model, qat_classes(request.config) if request.is_qat else {})
    floats = float_tensors(model, examples)
    decider = _Decider(places, request, floats)
    special = {match.root: (match, kind) for match, kind in _special_matches(model, places, request.custom)}
    found = find_matches(model.graph, places, request.config.configs)
    matches = list(special.values())
    matches += ((match, "pattern") for match in found if special.keys().isdisjoint(match.nodes))
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    matches.sort(key=lambda found: order[found[0].last])
    decided = [(match, decider(match, kind)) for match, kind in matches]
    accepted = [(match, decision) for match, decision in decided if decision.is_quantized]
    common = as_qconfig(request.mapping.global_qconfig, GLOBAL)
    default = None if common is None else common.activation
    placer = Placer(floats, decider.indexes, decider.given(model, accepted), decider.facts, default)
    placer.place(model.graph.nodes, accepted)
    matched = {node for match, _ in matches for node in match.nodes}
    return Plan(
        decisions=tuple(decision for _, decision in decided),
        slots=placer.slots(places, decider.has_qconfig),
        carried=tuple((value.name, source.name) for value, source in placer.carried.items()),
        unmatched=tuple(
            (node.name, leaf_name(places.object_type(node)), decider.qconfig(node))
            for node in model.graph.nodes
            if node.op in CALLS and node not in matched
        ),
    )


def qat_classes(config: BackendConfig) -> dict[type[nn.Module], type[nn.Module]]:
    """Map a (fused) float class to the class that stands for it in training. (QAT-01)"""
    return {
        leaf: entry.qat_module
        for entry in config.configs
        if entry.qat_module is not None and isinstance(leaf := entry.normal_pattern, type)
    }


def _special_matches(model: GraphModule, places: Places, custom: PrepareCustomConfig) -> Iterator[tuple[Match, Kind]]:
    """Yield custom and standalone modules; they come before patterns. (CUS-01, STD-01)"""
    observed = {kind for mapping in custom.float_to_observed_mapping.values() for kind in mapping}
    for node in model.graph.nodes:
        if (module := places.module(node)) is None:
            continue
        is_standalone = standalone_entry(custom, str(node.target), module) is not None  # rule: STD-01
        if is_standalone or type(module) in observed:  # rule: CUS-01
            match = Match(entry=BackendPatternConfig(type(module)), nodes=(node,), nested=node, root=node)
            yield match, "standalone module" if is_standalone else "custom module"


def standalone_entry(custom: PrepareCustomConfig, name: str, module: nn.Module) -> StandaloneModuleConfigEntry | None:
    """Return what is said about a standalone module, by name before class; None: it is not one. (STD-01)"""
    found: StandaloneModuleConfigEntry | None = custom.standalone_module_names.get(name)
    return custom.standalone_module_classes.get(type(module)) if found is None else found


class _Decider:
    """Resolves the QConfig of a match and chooses its dtype config; each constructor is called once."""

    def __init__(self, places: Places, request: Request, floats: set[Node]) -> None:
        self._places = places
        self._request = request
        self._resolver = QConfigResolver(request.mapping)
        self._floats = floats
        self._entries = {id(entry): number for number, entry in enumerate(request.config.configs)}
        self.indexes = {e.pattern: e._input_type_to_index for e in request.config.configs if e._input_type_to_index}
        self._facts: dict[Callable[..., nn.Module], ObserverFacts] = {}

    def given(self, model: GraphModule, accepted: list[tuple[Match, Decision]]) -> dict[Node, torch.dtype]:
        """Return the values that are quantized where they come from, with their dtype. (OBS-11, STD-01, CUS-01)"""
        placeholders = [node for node in model.graph.nodes if node.op == "placeholder"]
        indexes = self._request.custom.input_quantized_indexes
        given = {node: torch.quint8 for index, node in enumerate(placeholders) if index in indexes}  # rule: OBS-11
        for match, decision in accepted:
            if decision.kind == "pattern" or decision.qconfig is None:
                continue
            asked, last = self.facts(decision.qconfig.activation), match.last
            if asked.dtype is None or asked.is_dynamic:
                continue
            if decision.kind == "custom module" and isinstance(self._places.module(last), nn.LSTM):
                given |= dict.fromkeys((last, *tuple_elements(last, LSTM_RESULT)), asked.dtype)  # rule: CUS-01
            elif decision.kind == "standalone module" and decision.quantized_output:
                given[last] = asked.dtype  # rule: STD-01
        return given

    def facts(self, make: Callable[..., nn.Module], source: str = "") -> ObserverFacts:
        """Read what an observer's constructor makes, once. Raises QConfigError with the mapping's key if it fails."""
        if make not in self._facts:
            with blaming(QConfigError, f"QConfig ({source})", f"the observer constructor {make!r}"):
                made = make()
                found = ObserverFacts.of(made)
            if not isinstance(made, nn.Module):
                raise QConfigError(f"QConfig ({source}): {make!r} made {made!r}; expected an observer, an nn.Module")
            self._facts[make] = found
        return self._facts[make]

    def has_qconfig(self, node: Node) -> bool:
        """Tell whether a QConfig holds where a value is made, whether or not it is used there. (QCM-02)"""
        if node.op == "placeholder":
            return False
        if node.op == "get_attr":
            return self._resolver.resolve((), str(node.target).rpartition(".")[0]).qconfig is not None
        return self.qconfig(node) is not None

    def qconfig(self, node: Node) -> QConfig | None:
        """Return the QConfig that holds for a call. (QCM-02)"""
        return self._resolve(node)[0]

    def _resolve(self, node: Node) -> tuple[QConfig | None, str]:
        places = self._places
        return self._resolver.resolve(places.object_types(node), places.name(node), places.order(node))

    def __call__(self, match: Match, kind: Kind) -> Decision:
        """Decide about one match."""
        target = str(match.root.target) if match.root.op == "call_module" else None
        standalone: StandaloneModuleConfigEntry | None = None
        if kind == "standalone module" and target is not None:
            standalone = standalone_entry(self._request.custom, target, self._places.modules[target])
        qconfig, source, reason = self._qconfig(match)
        if qconfig is None and standalone is not None and standalone.qconfig_mapping is not None:  # rule: STD-01
            qconfig, source, reason = standalone.qconfig_mapping.global_qconfig, "global of its own mapping", ""
        chosen: DTypeConfig | None = None
        refusals: tuple[Refusal, ...] = ()
        if qconfig is not None and kind == "pattern":
            chosen, refusals, reason = self._dtype_config(match, qconfig, source)
        inner = None if standalone is None else standalone.prepare_custom_config
        return Decision(
            kind=kind,
            node=match.last.name,
            nodes=tuple(node.name for node in match.nodes),
            root=match.root.name,
            target=target,
            pattern=match.name,
            qconfig=qconfig,
            source=source,
            dtype_config=chosen,
            refusals=refusals,
            reason=reason,
            observation=DIFFERENT if kind != "pattern" else _observation_type(match, self._floats),
            places=tuple(self._place(node) for node in match.nodes),
            entry=self._entries.get(id(match.entry)),
            quantized_inputs=None if standalone is None else tuple(inner.input_quantized_indexes) if inner else (),
            quantized_output=standalone is None or (inner is not None and bool(inner.output_quantized_indexes)),
        )

    def _dtype_config(
        self, match: Match, qconfig: QConfig, source: str
    ) -> tuple[DTypeConfig | None, tuple[Refusal, ...], str]:
        if match.last not in self._floats and match.last.op != "call_module":
            return None, (), f"OBS-10: {match.last.name} is not a float tensor"  # rule: OBS-10
        facts = QConfigFacts(
            activation=self.facts(qconfig.activation, source), weight=self.facts(qconfig.weight, source)
        )
        has_weight, is_module = self._has_weight(match), match.root.op == "call_module"
        configs = match.entry.dtype_configs
        chosen, refusals = choose_dtype_config(facts, configs, has_weight=has_weight, is_module=is_module)
        if chosen is not None:
            return chosen, refusals, ""
        return None, refusals, "; ".join(map(str, refusals)) or "DTY-02: the entry has no dtype config"

    def _has_weight(self, match: Match) -> bool:
        """Tell whether a match has a weight that a dtype config could quantize. (DTY-01)"""
        module = self._places.module(match.root)
        if module is not None:
            return any("weight" in name for name, _ in module.named_parameters())
        return isinstance(weight_arguments(match.root, match, self.indexes)[0], Node)  # rule: DTY-01

    def _place(self, node: Node) -> Place:
        scope, kind, index = self._places.order(node)
        names = tuple(map(leaf_name, self._places.object_types(node)))
        return Place(names, self._places.name(node), (scope, leaf_name(kind), index))

    def _qconfig(self, match: Match) -> tuple[QConfig | None, str, str]:
        """Return the QConfig of the deciding (last) node, its source, and the reason if there is none."""
        for node in match.nodes:
            qconfig, source = self._resolve(node)
            if qconfig is None:
                rule = "QCM-03" if node is match.last else "QCM-07"
                return None, source, f"{rule}: no QConfig for {node.name} ({source})"
            for part in self._places.fused_parts(node)[1:]:
                inner, key = self._resolver.resolve((part.object_type,), part.name)
                if inner is None and key != GLOBAL:  # rule: QCM-07
                    what = getattr(part.object_type, "__name__", part.object_type)
                    return None, key, f"QCM-07: no QConfig for {what} fused into {node.name} ({key})"
        return qconfig, source, ""  # rule: QCM-06


def _observation_type(match: Match, floats: set[Node]) -> ObservationType:
    """The entry's observation type, or the one for the root's number of tensor arguments. (OBS-07)"""
    by_count = match.entry._num_tensor_args_to_observation_type
    if not by_count:
        return match.entry.observation_type
    arguments = positional_arguments(match.root, at_least=2)
    count = sum(isinstance(argument, Node) and argument in floats for argument in arguments)
    return by_count.get(count, match.entry.observation_type)  # rule: OBS-07


def quant_type(qconfig: QConfig) -> QuantType:
    """Return the quantization mode that a QConfig stands for. (CUS-01)"""
    with blaming(QConfigError, "QConfig", f"the observer constructor {qconfig.activation!r}"):
        asked = ObserverFacts.of(qconfig.activation())
    if asked.is_dynamic:
        return QuantType.DYNAMIC
    return QuantType.WEIGHT_ONLY if asked.dtype in (torch.float32, None) else QuantType.STATIC
