"""Writing the reference graph node by node (rules CVT-01 to CVT-06, OBS-11, STD-01, CUS-01).

Observers become quantize and dequantize with the qparams that they measured, root modules become reference modules that
carry their weight's qparams; the ops between still run in float.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fx_quant_conformance.refimpl.config.custom_config import ConvertCustomConfig
from fx_quant_conformance.refimpl.convert.emit import Decomposed, Emitter
from fx_quant_conformance.refimpl.convert.part_reads import PartReads
from fx_quant_conformance.refimpl.convert.reference import make_reference, measure_weights, refuse_nan
from fx_quant_conformance.refimpl.convert.reference_convs import settle_size
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, QConfigError, blame
from fx_quant_conformance.refimpl.graph.graph_modules import ModeConstant, free_name
from fx_quant_conformance.refimpl.graph.modules import add_qconfig, float_module_of, swap_module
from fx_quant_conformance.refimpl.graph.tracing import (
    attribute_of,
    class_of,
    compute_constants,
    find_constants,
    is_effect,
)
from fx_quant_conformance.refimpl.legacy import QuantizableLSTM
from fx_quant_conformance.refimpl.legacy.quantized_tensors import QUANTIZE
from fx_quant_conformance.refimpl.observers.qparams import is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.decide import quant_type_of
from fx_quant_conformance.refimpl.prepare.dtype_choice import is_observed_dtype
from fx_quant_conformance.refimpl.prepare.plan import LSTM_RESULT, Decision, Plan, Slot
from fx_quant_conformance.refimpl.prepare.prepare import Prepared


@dataclass(eq=False)
class ConvertWalk:
    """Writes the reference graph node by node. ``env``: prepared node → the float value that stands for it."""

    prepared: GraphModule
    plan: Plan
    state: Prepared
    custom: ConvertCustomConfig
    floating: frozenset[str]
    form: type[Emitter]
    convert_child: Callable[[GraphModule, bool], GraphModule]  # of a standalone module: whether it is left in float

    def __post_init__(self) -> None:
        self.is_decomposed = self.form is Decomposed
        self.slots = {slot.name: slot for slot in self.plan.slots}
        self.decisions = {name: decision for decision in self.plan.decisions for name in decision.nodes}
        self.modules = dict(self.prepared.named_modules(remove_duplicate=False))
        self.weight_qparams = measure_weights(
            (self.modules[d.target], d.qconfig)
            for d in self.plan.decisions
            if d.target and d.dtype_config and is_quantized_dtype(d.dtype_config.weight_dtype)
        )
        self.graph = Graph()
        self.attributes: dict[str, Any] = {}
        observers = [self.modules[name] for name in self.slots if name in self.modules]  # packages keep one name
        self.emitter = self.form(self.graph, self.attributes, self.prepared, observers)
        self.env: dict[Node, Any] = {}
        self.quantized: dict[Node, Node] = {}  # float value → the value that was dequantized to it
        nodes = {node.name: node for node in self.prepared.graph.nodes}
        self.carried = {} if self.is_decomposed else {nodes[node]: nodes[source] for node, source in self.plan.carried}
        self.grids: dict[Node, tuple[Node, Node]] = {}  # a quantized value → the qparams that only it knows
        self.tuples: dict[Node, Any] = {}  # a custom module's tuple → the float values of its elements
        self.leaves = {name: qconfig for name, _, qconfig in self.plan.unmatched if qconfig is not None}
        self.customs = {kind for kinds in self.custom.observed_to_quantized_mapping.values() for kind in kinds}
        self.absorbed: set[Node] = set()  # static custom modules, which contain their output's observers
        self.reads = PartReads(self.prepared)
        self.constants = find_constants(self.prepared)

    def write(self) -> tuple[Graph, dict[str, Any]]:
        """Return the new graph and the attributes that it uses."""
        inputs = self.prepared.graph.find_nodes(op="placeholder")
        quantized = {node for index, node in enumerate(inputs) if index in self.state.quantized_inputs}
        for node in self.prepared.graph.nodes:
            if node.target is operator.getitem and node.args[0] in self.tuples:
                part = self.tuples[node.args[0]][node.args[1]]  # a float value, or a tuple again
                (self.env if isinstance(part, Node) else self.tuples)[node] = part
            elif node.op == "output":
                self._write_output(node)
            elif node.op == "call_module":
                self._write_module(node)
            else:
                self._copy(node)
                if node in quantized:
                    self.env[node] = self._dequantize(self.env[node])  # rule: OBS-11
            if node in self.carried:
                self._carry(node)
        for node in reversed(self.graph.nodes):  # no quantize or dequantize stays without need (CVT-06)
            if node.users:
                continue
            if node.op in ("call_module", "get_attr") or not (node.is_impure() or is_effect(node)):
                self.graph.erase_node(node)
        targets = {str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr")}
        return self.graph, {name: value for name, value in self.attributes.items() if name in targets}

    def find_width(self, slot: Slot) -> float | None:
        """Return how wide the grid of a slot is, largest minus smallest real number; None if it is not known yet."""
        observer: Any = self.modules[slot.name]
        if not is_quantized_dtype(observer.dtype) or getattr(observer, "is_dynamic", False):
            return None
        qparams = self.emitter.find_qparams(observer, slot)
        return (qparams.quant_max - qparams.quant_min) * float(qparams.scale) if qparams.axis is None else None

    def _float_of(self, node: Node) -> Any:
        return self.tuples[node] if node in self.tuples else self.env[node]

    def _copy(self, node: Node) -> None:
        """Copy a node whose inputs are floats. (CVT-06)"""
        if self.reads.numbers and node in self.reads.numbers:
            self.env[node] = self.reads.numbers[node]  # rule: TRC-03
            return
        copied = self.graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        copied.args, copied.kwargs = map_arg((node.args, node.kwargs), self._float_of)  # rule: CVT-06
        copied.meta = node.meta.copy()
        self.env[node] = copied
        if node.op == "get_attr":
            copied.target = self.reads.name_of(str(node.target), self.attributes)
            self.attributes[copied.target] = attribute_of(self.prepared, str(node.target))

    def _dequantize(self, value: Node, shape: Any = None) -> Any:
        """Dequantize a value that comes quantized; if it is a tuple of that shape, its parts."""
        if isinstance(shape, tuple):
            parts = (self.graph.call_function(operator.getitem, (value, index)) for index in range(len(shape)))
            return tuple(map(self._dequantize, parts, shape))
        dequantized = self.graph.call_method("dequantize", (value,))
        self.quantized[dequantized] = value
        return dequantized

    def _carry(self, node: Node) -> None:
        """Quantize the result of a sharing op with the qparams that its given input has at run time. (OBS-11)"""
        source, decision = self.quantized.get(self.env[self.carried[node]]), self.decisions[node.name]
        producer = self.decisions.get(self.carried[node].name)
        if source is None or (producer is not None and producer.node in self.floating):  # the given value is a float
            return
        if decision.node in self.floating and self._are_left(node, *node.users):  # rule: CVT-05
            return
        assert decision.dtype_config is not None
        if source not in self.grids:
            scale, zero_point = (self.graph.call_method(name, (source,)) for name in ("q_scale", "q_zero_point"))
            self.grids[source] = scale, zero_point
        arguments = (self.env[node], *self.grids[source], decision.dtype_config.output_dtype)
        quantized = self.graph.call_function(QUANTIZE, arguments)  # rule: OBS-11
        self.env[node] = self._dequantize(quantized)

    def _are_left(self, *nodes: Node) -> bool:
        """Tell whether all nodes stay in float. (CVT-05)"""
        around = (self.decisions.get(node.name) for node in nodes)
        return all(d is None or not d.is_quantized or d.node in self.floating for d in around)

    def _integers_of(self, node: Node) -> Any:
        """Return the quantized value (or tuple) of a prepared node; else its float value."""
        return map_arg(self._float_of(node), lambda value: self.quantized.get(value, value))

    def _write_output(self, node: Node) -> None:
        """Copy the output, without the dequantize of outputs that must be quantized. (OBS-11)

        In the decomposed form all outputs are float: plain integers do not carry their qparams.
        """
        result, indexes = node.args[0], () if self.is_decomposed else self.state.quantized_outputs
        if isinstance(result, (list, tuple)):
            parts = [map_arg(r, self._integers_of if i in indexes else self._float_of) for i, r in enumerate(result)]
            output: Any = type(result)(parts)
        else:
            output = map_arg(result, self._integers_of if 0 in indexes else self._float_of)
        self.graph.output(output)  # rule: OBS-11

    def _write_module(self, node: Node) -> None:
        name = str(node.target)
        decision = self.decisions.get(node.name)
        if name in self.slots:
            self._write_observer(node, name)
        elif isinstance(self.modules[name], ModeConstant):
            self.env[node] = self.modules[name].in_deployment  # rule: QAT-04
        elif decision is not None and decision.kind == "standalone module":
            self._convert_standalone(node, name, decision)
        elif decision is None and node.name in self.leaves and class_of(self.modules[name]) in self.customs:
            self._swap_custom(node, name, self.leaves[node.name])  # rule: CUS-01
        elif decision is None or not decision.is_quantized or decision.node in self.floating:
            self._copy(node)
            self.env[node].target = target = self.reads.name_of(name, self.attributes)
            self.attributes[target] = float_module_of(self.modules[name], where=name)
        elif decision.kind == "custom module":
            self._swap_custom(node, name, decision.qconfig)
        else:
            self._copy(node)
            if name not in self.attributes:
                self.attributes[name] = self._make_root(name, decision)
            settle_size(self.attributes[name], node)

    def _write_observer(self, node: Node, name: str) -> None:
        """Put quantize and dequantize in the place of an observer call, or nothing. (CVT-01, CVT-05)"""
        value = node.args[0]
        assert isinstance(value, Node)
        observer: Any = self.modules[name]
        slot = self.slots[name]
        self.env[node] = self.env[value]
        if value in self.absorbed:
            return  # rule: CUS-01 (its output is quantized already)
        if self.floating and self._are_left(*node.all_input_nodes, *node.users):
            return  # rule: CVT-05  the producer and all users are left in float
        if not is_observed_dtype(observer.dtype):
            return
        source = self.env[value]
        if slot.role == "weight":
            observer, source = self._observe_weight(value, observer)
        scope = self._find_scope(node, slot) if self.floating else slot.scope
        quantized, dequantized = self.emitter.write(source, observer, scope, slot)  # rule: CVT-01
        self.env[node] = dequantized
        self.quantized[dequantized] = quantized

    def _find_scope(self, node: Node, slot: Slot) -> str:
        """Return the scope of a value; if its producer is left in float, its first quantized user's. (CVT-05)"""
        producer = self.decisions.get(slot.value)
        if producer is None or producer.node not in self.floating:
            return slot.scope
        users = [d for user in node.users if (d := self.decisions.get(user.name)) and d.node not in self.floating]
        return f"{users[0].places[0].name}_input" if users else slot.scope

    def _observe_weight(self, value: Node, observer: Any) -> tuple[Any, Node]:
        """Return a copy of an observer that has seen a weight, held or computed by the model; and the weight. (OBS-06)

        A computed one is held from then on. Convert does not change the prepared model. A weight that depends on the
        input, or is another each time, was seen in calibration.
        """
        values = compute_constants(self.prepared, value) if value in self.constants else None
        if values is None:
            return observer, self.env[value]
        observer = copy.deepcopy(observer)
        with torch.no_grad(), blame(QConfigError, f"observer of {value.name!r} (weight)", "it"):
            refuse_nan(values[value])
            observer(values[value])  # rule: OBS-06, CVT-11
        if getattr(observer, "ch_axis", 0) < 0:  # counted from the end, as no quantize op takes it
            observer.ch_axis %= values[value].dim()
        if value.op == "get_attr":
            return observer, self.env[value]
        name = free_name(self.prepared, f"{value.name}_folded", self.attributes)
        self.attributes[name] = values[value]
        return observer, self.graph.get_attr(name)  # rule: OBS-16

    def _make_root(self, name: str, decision: Decision) -> nn.Module:
        """Return the module that takes a root module's place. (CVT-02)"""
        assert decision.dtype_config is not None
        module, dtype = self.modules[name], decision.dtype_config.weight_dtype
        if name != decision.target or (dtype is not None and not is_observed_dtype(dtype)):  # rule: DTY-01
            return float_module_of(module, where=name)
        return make_reference(  # rule: CVT-02, CVT-10
            module,
            decision.qconfig,
            self.state.references,
            is_decomposed=self.is_decomposed,
            where=name,
            weight_dtype=dtype,
            weight_qparams=self.weight_qparams.get(id(module)),
        )

    def _swap_custom(self, node: Node, name: str, qconfig: Any) -> None:
        """Swap an observed custom module for its quantized class; static ones work on quantized tensors. (CUS-01)

        In the decomposed form they take floats, as plain integers do not carry their qparams. (CVT-07)
        """
        module: Any = self.modules[name]
        mode = quant_type_of(qconfig)
        to = self.custom.observed_to_quantized_mapping.get(mode, {}).get(class_of(module))
        if to is None:
            raise ConfigError(
                f"custom module {name!r}: observed_to_quantized_mapping has no class for {type(module).__name__} in "
                f"mode {mode.name.lower()}; found {self.custom.observed_to_quantized_mapping}"
            )
        is_static, key = mode.name == "STATIC", name
        observers = [user for user in node.users if user.op == "call_module" and str(user.target) in self.slots]
        are_quantized = (self._float_of(value) in self.quantized for value in node.all_input_nodes)
        if is_static and node.name in self.leaves and not (observers and all(are_quantized)):
            raise ConfigError(
                f"custom module {name!r}: a static one takes and returns quantized tensors, and not all of these are "
                f"observed here; name {class_of(module).__name__} in set_float_to_observed_mapping"
            )
        for user in observers if is_static else ():
            module = add_qconfig(module, qconfig)
            module.activation_post_process = self.modules[str(user.target)]  # from_observed reads it
            self.absorbed.add(node)
            while key in self.attributes:  # called before, with other qparams
                key += "_again"
        is_quantized = is_static and not self.is_decomposed  # rule: CVT-07
        call = self.graph.node_copy(node, self._integers_of if is_quantized else self._float_of)
        call.target = key
        if key not in self.attributes:  # rule: CUS-01
            self.attributes[key] = swap_module(module, qconfig, to, how="from_observed", where=name)
        self.env[node] = self._dequantize(call) if is_static and not isinstance(module, QuantizableLSTM) else call
        if is_static and isinstance(module, QuantizableLSTM):
            self.tuples[node] = self._dequantize(call, LSTM_RESULT)

    def _convert_standalone(self, node: Node, name: str, decision: Decision) -> None:
        """Convert a standalone module separately; its own config says what its boundary is. (STD-01)"""
        child: Any = self.modules[name]
        indexes = () if self.is_decomposed else decision.quantized_inputs or ()
        args = tuple(map_arg(a, self._integers_of if i in indexes else self._float_of) for i, a in enumerate(node.args))
        call = self.graph.call_module(name, args, map_arg(node.kwargs, self._float_of))
        call.meta = dict(node.meta)
        if name not in self.attributes:
            is_left = decision.node in self.floating  # rule: CVT-05
            with blame(ModelError, f"standalone module {name!r}", "convert"):  # rule: STD-01
                self.attributes[name] = self.convert_child(child, is_left)
        self.env[node] = self._dequantize(call) if decision.quantized_output and not self.is_decomposed else call
