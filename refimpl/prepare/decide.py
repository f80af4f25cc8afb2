"""Deciding, for a whole graph, what is quantized (rules QCM-06, QCM-07, OBS-07, QAT-01, STD-01, CUS-01).

The result is frozen data that can be printed; nothing here touches the graph. ``prepare`` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.config.backend_config import (
    DIFFERENT,
    BackendConfig,
    BackendPatternConfig,
    ObservationType,
)
from fx_quant_conformance.refimpl.config.custom_config import (
    PrepareCustomConfig,
    QuantType,
    StandaloneModuleConfigEntry,
)
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.config.qconfig import (
    GLOBAL,
    QConfig,
    QConfigMapping,
    QConfigResolver,
    ResolvedQConfig,
    as_qconfig,
)
from fx_quant_conformance.refimpl.errors import QConfigError, blame
from fx_quant_conformance.refimpl.graph.example_run import Examples
from fx_quant_conformance.refimpl.graph.graph_modules import free_names
from fx_quant_conformance.refimpl.graph.matching import Match, find_matches
from fx_quant_conformance.refimpl.graph.tracing import (
    CALLS,
    OBSERVER_PREFIX,
    Places,
    find_constants,
    positional_arguments_of,
)
from fx_quant_conformance.refimpl.graph.values import find_float_tensors
from fx_quant_conformance.refimpl.legacy import quint8
from fx_quant_conformance.refimpl.prepare.dtype_choice import (
    ObserverFacts,
    ObserverReader,
    Refusal,
    choose_dtype_config,
)
from fx_quant_conformance.refimpl.prepare.infinite import find_infinite_values
from fx_quant_conformance.refimpl.prepare.placing import Placer, find_tuple_elements, find_weight_arguments
from fx_quant_conformance.refimpl.prepare.plan import LSTM_RESULT, Decision, Kind, Place, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of prepare's caller."""

    config: BackendConfig
    mapping: QConfigMapping
    custom: PrepareCustomConfig
    is_qat: bool = False


def make_plan(model: GraphModule, request: Request, examples: Examples) -> Plan:
    """Decide for a traced and fused model. The graph is not touched. (OBS-15)"""
    places = Places(model, qat_classes_of(request.config) if request.is_qat else {})
    floats = find_float_tensors(model, examples)
    decider = _Decider(model, places, request, floats)
    special = {match.root: (match, kind) for match, kind in _match_special(model, places, request.custom)}
    patterns = find_matches(model.graph, places, request.config.configs)
    matches = list(special.values())
    matches += ((match, "pattern") for match in patterns if special.keys().isdisjoint(match.nodes))
    order = {node: index for index, node in enumerate(model.graph.nodes)}
    matches.sort(key=lambda item: order[item[0].last])
    decided = [(match, decider.decide(match, kind)) for match, kind in matches]
    accepted = [(match, decision) for match, decision in decided if decision.is_quantized]
    default = as_qconfig(request.mapping.global_qconfig, GLOBAL)
    quantized = decider.find_quantized_values(model, accepted)
    placer = Placer(floats, decider.indexes, quantized, decider.reader, default)
    placer.place(model.graph.nodes, accepted)
    matched = {node for match, _ in matches for node in match.nodes}
    names = free_names(model, OBSERVER_PREFIX, request.custom.preserved_attributes)
    return Plan(
        decisions=tuple(decision for _, decision in decided),
        slots=placer.freeze_slots(places, decider.has_qconfig, names),
        carried=tuple((value.name, source.name) for value, source in placer.carried.items()),
        unmatched=tuple(
            (node.name, leaf_name(places.object_type_of(node)), decider.resolve(node).qconfig)
            for node in model.graph.nodes
            if node.op in CALLS and node not in matched
        ),
    )


def qat_classes_of(config: BackendConfig) -> dict[type[nn.Module], type[nn.Module]]:
    """Map a (fused) float class to the class that replaces it in training. (QAT-01)"""
    return {
        leaf: entry.qat_module
        for entry in config.configs
        if entry.qat_module is not None and isinstance(leaf := entry.normal_pattern, type)
    }


def _match_special(model: GraphModule, places: Places, custom: PrepareCustomConfig) -> Iterator[tuple[Match, Kind]]:
    """Yield custom and standalone modules; they have priority over patterns. (CUS-01, STD-01)"""
    observed = {kind for mapping in custom.float_to_observed_mapping.values() for kind in mapping}
    for node in model.graph.nodes:
        if (module := places.module_of(node)) is None:
            continue
        is_standalone = find_standalone(custom, str(node.target), module) is not None  # rule: STD-01
        if is_standalone or type(module) in observed:  # rule: CUS-01
            match = Match(entry=BackendPatternConfig(type(module)), nodes=(node,), nested=node, root=node)
            yield match, "standalone module" if is_standalone else "custom module"


def find_standalone(custom: PrepareCustomConfig, name: str, module: nn.Module) -> StandaloneModuleConfigEntry | None:
    """Return the entry of a standalone module, by name before class; None: it is not one. (STD-01)"""
    by_name: StandaloneModuleConfigEntry | None = custom.standalone_module_names.get(name)
    return custom.standalone_module_classes.get(type(module)) if by_name is None else by_name


class _Decider:
    """Resolves the QConfig of a match and chooses its dtype config."""

    def __init__(self, model: GraphModule, places: Places, request: Request, floats: set[Node]) -> None:
        self._places = places
        self._request = request
        self._resolver = QConfigResolver(request.mapping)
        self._floats, self._constants, self._infinite = floats, find_constants(model), find_infinite_values(model)
        self._entries = {id(entry): number for number, entry in enumerate(request.config.configs)}
        self.indexes = {e.pattern: e._input_type_to_index for e in request.config.configs if e._input_type_to_index}
        self.reader = ObserverReader()

    def find_quantized_values(
        self, model: GraphModule, accepted: list[tuple[Match, Decision]]
    ) -> dict[Node, torch.dtype]:
        """Return the values that come quantized, with their dtype. (OBS-11, STD-01, CUS-01)"""
        inputs = enumerate(model.graph.find_nodes(op="placeholder"))
        indexes = self._request.custom.input_quantized_indexes
        dtypes: dict[Node, torch.dtype] = {node: quint8 for i, node in inputs if i in indexes}  # rule: OBS-11
        for match, decision in accepted:
            if decision.kind == "pattern" or decision.qconfig is None:
                continue
            facts, last = self.reader.read(decision.qconfig.activation), match.last
            if facts.dtype is None or facts.is_dynamic:
                continue
            if decision.kind == "custom module" and isinstance(self._places.module_of(last), nn.LSTM):
                dtypes |= dict.fromkeys((last, *find_tuple_elements(last, LSTM_RESULT)), facts.dtype)  # rule: CUS-01
            elif decision.kind == "standalone module" and decision.quantized_output:
                dtypes[last] = facts.dtype  # rule: STD-01
        return dtypes

    def has_qconfig(self, node: Node) -> bool:
        """Tell whether a QConfig holds where a value is made, whether or not it is used there. (QCM-02)"""
        if node.op == "placeholder":
            return False
        if node.op == "get_attr":
            return self._resolver.resolve((), str(node.target).rpartition(".")[0]).qconfig is not None
        return self.resolve(node).qconfig is not None

    def resolve(self, node: Node) -> ResolvedQConfig:
        """Return the QConfig that holds for a call, and its source. (QCM-02)"""
        places = self._places
        return self._resolver.resolve(places.object_types_of(node), places.name_of(node), places.order_of(node))

    def decide(self, match: Match, kind: Kind) -> Decision:
        """Decide about one match."""
        target = str(match.root.target) if match.root.op == "call_module" else None
        standalone: StandaloneModuleConfigEntry | None = None
        if kind == "standalone module" and target is not None:
            standalone = find_standalone(self._request.custom, target, self._places.modules[target])
        qconfig, source, reason = self._resolve_match(match)
        if qconfig is None and standalone is not None and standalone.qconfig_mapping is not None:  # rule: STD-01
            qconfig, source, reason = standalone.qconfig_mapping.global_qconfig, "global of its own mapping", ""
        dtype_config: DTypeConfig | None = None
        refusals: tuple[Refusal, ...] = ()
        if qconfig is not None and kind == "pattern":
            dtype_config, refusals, reason = self._choose_dtype_config(match, qconfig, source)
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
            dtype_config=dtype_config,
            refusals=refusals,
            reason=reason,
            observation=DIFFERENT if kind != "pattern" else _choose_observation_type(match, self._floats),
            places=tuple(self._place_of(node) for node in match.nodes),
            entry=self._entries.get(id(match.entry)),
            quantized_inputs=None if standalone is None else tuple(inner.input_quantized_indexes) if inner else (),
            quantized_output=standalone is None or (inner is not None and bool(inner.output_quantized_indexes)),
        )

    def _choose_dtype_config(
        self, match: Match, qconfig: QConfig, source: str
    ) -> tuple[DTypeConfig | None, tuple[Refusal, ...], str]:
        if self._is_constant(match):
            return None, (), "OBS-16: it is computed of parameters and buffers only"  # rule: OBS-16
        around = (*match.nodes, *(value for node in match.nodes for value in node.all_input_nodes))
        infinite = next(filter(self._infinite.__contains__, around), None) if self._infinite else None
        if infinite is not None:
            return None, (), f"OBS-18: {infinite.name} is infinite, by a constant"  # rule: OBS-18
        if match.last not in self._floats and match.last.op != "call_module":
            return None, (), f"OBS-10: {match.last.name} is not a float tensor"  # rule: OBS-10
        facts, configs = self.reader.read_qconfig(qconfig, source), match.entry.dtype_configs
        has_weight, is_module = self._has_weight(match), match.root.op == "call_module"
        chosen, refusals = choose_dtype_config(facts, configs, has_weight=has_weight, is_module=is_module)
        if chosen is not None:
            return chosen, refusals, ""
        return None, refusals, "; ".join(map(str, refusals)) or "DTY-02: the entry has no dtype config"

    def _is_constant(self, match: Match) -> bool:
        """Tell whether a match without parameters of its own is computed of the model's parameters and buffers only."""
        return bool(self._constants) and self._constants.issuperset(match.nodes)

    def _has_weight(self, match: Match) -> bool:
        """Tell whether a match has a weight that a dtype config could quantize. (DTY-01)"""
        module = self._places.module_of(match.root)
        if module is not None:
            return any("weight" in name for name, _ in module.named_parameters())
        return isinstance(find_weight_arguments(match.root, match, self.indexes)[0], Node)  # rule: DTY-01

    def _place_of(self, node: Node) -> Place:
        scope, kind, index = self._places.order_of(node)
        names = tuple(map(leaf_name, self._places.object_types_of(node)))
        return Place(names, self._places.name_of(node), (scope, leaf_name(kind), index))

    def _resolve_match(self, match: Match) -> tuple[QConfig | None, str, str]:
        """Return the QConfig of the deciding (last) node, its source, and the reason for None."""
        for node in match.nodes:
            qconfig, source = self.resolve(node)
            if qconfig is None:
                rule = "QCM-03" if node is match.last else "QCM-07"
                return None, source, f"{rule}: no QConfig for {node.name} ({source})"
            for part in self._places.fused_parts_of(node)[1:]:
                inner, key = self._resolver.resolve((part.object_type,), part.name)
                if inner is None and key != GLOBAL:  # rule: QCM-07
                    kind = getattr(part.object_type, "__name__", part.object_type)
                    return None, key, f"QCM-07: no QConfig for {kind} fused into {node.name} ({key})"
        return qconfig, source, ""  # rule: QCM-06


def _choose_observation_type(match: Match, floats: set[Node]) -> ObservationType:
    """Return the entry's observation type, or the one for the root's number of tensor arguments. (OBS-07)"""
    by_count = match.entry._num_tensor_args_to_observation_type
    if not by_count:
        return match.entry.observation_type
    arguments = positional_arguments_of(match.root, at_least=2)
    count = sum(isinstance(argument, Node) and argument in floats for argument in arguments)
    return by_count.get(count, match.entry.observation_type)  # rule: OBS-07


def quant_type_of(qconfig: QConfig) -> QuantType:
    """Return the quantization mode of a QConfig. (CUS-01)"""
    with blame(QConfigError, "QConfig", f"the observer constructor {qconfig.activation!r}"):
        facts = ObserverFacts.of(qconfig.activation())
    if facts.is_dynamic:
        return QuantType.DYNAMIC
    return QuantType.WEIGHT_ONLY if facts.dtype in (torch.float32, None) else QuantType.STATIC
