"""Walking a reference model together with the float model, to measure each layer's error (rule OBS-15).

Each node has up to five values. ``floating``: the float model's; nothing is rounded, weights are float. ``actual``: the
reference model's. ``rounded``: the float model's where a pattern takes it, rounded as its input is. ``own_float`` and
``own_actual``: a pattern's results for ``rounded``, in float and quantized: their difference is the error that this
pattern adds. A rounding counts once: an output's in the pattern that returns it, a weight's, and one made while
running, in the pattern that takes it; any other is its own layer.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fx_quant_conformance.refimpl.errors import ModelError, blame
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.modules import float_module_of
from fx_quant_conformance.refimpl.graph.tracing import CALLS, attribute_of, call_node, class_of, memory_of, notes_of
from fx_quant_conformance.refimpl.legacy import nni
from fx_quant_conformance.refimpl.legacy.quantized_tensors import QUANTIZE, QUANTIZE_DYNAMIC
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.qparams import dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.plan import PLAN, Decision
from fx_quant_conformance.refimpl.prepare.prepare import PREPARED

Values = dict[Node, Any]

FLOAT_WEIGHTS: dict[str, Callable[[Any], Any]] = {  # float weights by the methods of torch's reference modules
    "get_weight": lambda module: module.weight,
    "get_weight_ih": lambda module: module.weight_ih,
    "get_weight_hh": lambda module: module.weight_hh,
    "get_flat_weights": lambda module: [getattr(module, name) for name in module._flat_weights_names],
}


class OutputGrid(NamedTuple):
    """A layer's output grid: its step, and the ends of its range (real numbers)."""

    scale: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerEdge:
    """A layer to be measured, and its nodes."""

    name: str
    """The value's name in the float model."""
    prefix: str
    source: Node
    """The value before it is rounded."""
    quantize: Node | None
    """The node that rounds it, if its qparams are known before running."""
    at: Node
    """The node after both."""
    decision: Decision | None
    """None for a value that is rounded for its users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The values of a layer in one batch, tensors or structures; or the reason why its float side is unknown."""

    floating: Any
    actual: Any
    own_float: Any = None
    own_actual: Any = None
    grid: OutputGrid | None = None
    reason: str = ""


Measure = Callable[[LayerEdge, Reading], None]


class QualityWalk:
    """A run of batches through a reference model, or a standalone module in it.

    `origin`: the prepared model that it was converted from, for its float modules; None: they are made of the reference
    modules. `prefix`: the standalone module's full name and a dot.
    """

    def __init__(self, model: GraphModule, origin: GraphModule | None, prefix: str, measure: Measure) -> None:
        self.model, self.origin, self.prefix, self.measure = model, origin, prefix, measure
        plan = notes_of(model)[PLAN]
        quantized = [d for d in plan.decisions if d.is_quantized and d.kind != "standalone module"]
        self.nodes: list[Node] = list(model.graph.nodes)
        self.decisions = {name: decision for decision in quantized for name in decision.nodes}
        names = {name for decision in plan.decisions for name in decision.nodes} | {name for name, *_ in plan.unmatched}
        weights = {slot.value for slot in plan.slots if slot.role in ("weight", "bias")}
        calls = [node for node in self.nodes if node.op in CALLS]
        self.inserted = {node for node in calls if node.name not in names}
        self.quantizes = {node for node in self.inserted if is_rounding(node)}
        self.bounds = {n for n in self.inserted if n.target is torch.clamp and self.quantizes.issuperset(n.users)}
        self.back = {node for node in self.inserted if is_dequantize(node) or _is_cast(node, torch.float32)}
        self.of_user = {q for q in self.quantizes if self._source_of(q).name in weights or _is_dynamic(q)}
        self.layers = {layer.at: layer for layer in self._find_layers()}
        self.last_use = self._find_last_uses()
        self.children: dict[Node, QualityWalk] = {}
        self.floats: dict[str, nn.Module | None] = {}
        self.floating: Values = {}
        self.actual: Values = {}
        self.rounded: Values = {}
        self.own_float: Values = {}
        self.own_actual: Values = {}
        self.float_state: dict[Hashable, Any] = {}
        self.actual_state: dict[Hashable, Any] = {}

    def _source_of(self, quantize: Node) -> Node:
        """Return the value that a node rounds, before the clamp to a narrower range. (CVT-09)"""
        value: Any = quantize.args[0]
        source: Node = value.args[0] if value in self.bounds else value
        return source

    def _find_layers(self) -> Iterator[LayerEdge]:
        """Yield a layer for each rounding that is no part of a pattern that takes it, and for each other pattern."""
        rounded = set()
        for quantize in (node for node in self.nodes if node in self.quantizes and node not in self.of_user):
            source = self._source_of(quantize)
            at = next((user for user in quantize.users if user in self.back), quantize)
            decision = self._decision_at(source) if source not in rounded else None
            rounded.add(source)
            yield self._make_layer(source, quantize, at, decision)
        for node in self.nodes:
            decision = self._decision_at(node)
            if decision is not None and node not in rounded:
                yield self._make_layer(node, None, node, decision)

    def _make_layer(self, source: Node, quantize: Node | None, at: Node, decision: Decision | None) -> LayerEdge:
        value: Any = source
        while value in self.back or value in self.quantizes or value in self.bounds:  # rounded before (OBS-14)
            value = value.args[0]
        name = self.prefix + value.name
        return LayerEdge(name=name, prefix=self.prefix, source=source, quantize=quantize, at=at, decision=decision)

    def _decision_at(self, node: Node) -> Decision | None:
        """Return the decision of the pattern that ends at a node."""
        decision = self.decisions.get(node.name)
        return decision if decision is not None and decision.node == node.name else None

    def _find_last_uses(self) -> dict[Node, list[Node]]:
        """Return the values that are not read after a node, by node."""
        last = {value: node for node in self.nodes for value in (node, *node.all_input_nodes)}
        order = {node: index for index, node in enumerate(self.nodes)}
        for layer in self.layers.values():
            last[layer.source] = max(last[layer.source], layer.at, key=order.__getitem__)
        values: dict[Node, list[Node]] = {}
        for value, node in last.items():
            values.setdefault(node, []).append(value)
        return values

    def run(self, floating: tuple[Any, ...], actual: tuple[Any, ...]) -> tuple[Any, Any]:
        """Run a batch: the inputs of the float model and of the reference model; return the results of both.

        Raises ModelError, naming the node, if that fails.
        """
        placeholders = self.model.graph.find_nodes(op="placeholder")
        for side, inputs in ((self.floating, floating), (self.actual, actual)):
            side.update(zip(placeholders, inputs_of(self.model, inputs), strict=True))
        result: tuple[Any, Any] = (None, None)
        for node in self.nodes:
            if node.op == "output":
                of_float, of_actual = (map_arg(node.args[0], side.__getitem__) for side in (self.floating, self.actual))
                result = (of_float, of_actual)
            elif node.op != "placeholder":
                with blame(ModelError, f"explain: node {self.prefix + node.name!r}", str(node.target)):
                    self._visit(node)
            if node in self.layers:
                self.measure(self.layers[node], self._read_layer(self.layers[node]))
            for value in self.last_use.get(node, ()):
                for side in (self.floating, self.actual, self.rounded, self.own_float, self.own_actual):
                    side.pop(value, None)
        return result

    def _visit(self, node: Node) -> None:
        child = self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(child, GraphModule) and PLAN in notes_of(child):
            self._run_standalone(node, child)
        elif node in self.inserted:
            self._run_inserted(node)
        elif node.op == "get_attr":
            self._read_state(node)
        elif node.name in self.decisions:
            self._run_pattern(node, self.decisions[node.name])
        else:
            self.floating[node] = call_node(self.model, node, self.floating.__getitem__)
            self.actual[node] = call_node(self.model, node, self.actual.__getitem__)

    def _read_state(self, node: Node) -> None:
        """Read what the model holds: each side has its own, which lasts over the batches, as the model may write it."""
        held = attribute_of(self.model, str(node.target))
        for side, state in ((self.floating, self.float_state), (self.actual, self.actual_state)):
            side[node] = _read_copy(held, state)

    def _rounded_of(self, node: Node) -> Any:
        return self.rounded[node] if node in self.rounded else self.floating[node]

    def _run_standalone(self, node: Node, child: GraphModule) -> None:
        """Run a standalone module in its own walk; its layers are in the report, and it is none."""
        if node not in self.children:
            name = str(node.target)
            origin: Any = None if self.origin is None else self.origin.get_submodule(name)
            self.children[node] = QualityWalk(child, origin, f"{self.prefix}{name}.", self.measure)
        inputs = (map_arg(node.args, side.__getitem__) for side in (self.floating, self.actual))
        self.floating[node], self.actual[node] = self.children[node].run(*inputs)

    def _run_inserted(self, node: Node) -> None:
        """Run a node that convert wrote; the float model has none there, or one like a multiplication. (EQL-01)"""
        value: Any = node.args[0]
        passes = node in self.quantizes or node in self.back or node in self.bounds
        of_float = self.floating.__getitem__
        self.floating[node] = as_float(self.floating[value]) if passes else call_node(self.model, node, of_float)
        self.actual[node] = call_node(self.model, node, self.actual.__getitem__)
        self.rounded[node] = call_node(self.model, node, self._rounded_of)
        if value in self.own_actual:
            self.own_actual[node] = call_node(self.model, node, lambda n: self.own_actual.get(n, self._rounded_of(n)))

    def _run_pattern(self, node: Node, decision: Decision) -> None:
        """Run a node of a pattern, in float and quantized; its own values first, on copies: it may work in place."""

        def of_own(own: Values, is_float: bool) -> Callable[[Node], Any]:
            def value_of(source: Node) -> Any:
                if source.name in decision.nodes:
                    return copy_tensors(own[source])
                is_exact = is_float and source in self.back and source.args[0] in self.of_user
                value = self.floating[source] if is_exact else self._rounded_of(source)
                return copy_tensors(as_float(value) if is_float else value)

            return value_of

        module = self._find_float_module(node, decision) if node.op == "call_module" else None
        is_known = node.op != "call_module" or module is not None
        self.own_actual[node] = call_node(self.model, node, of_own(self.own_actual, is_float=False))
        self.own_float[node] = None
        if is_known and all(self.own_float.get(source, source) is not None for source in node.all_input_nodes):
            self.own_float[node] = call_node(self.model, node, of_own(self.own_float, is_float=True), module)
        fallback = map_aggregate(self.own_actual[node], as_float)  # if the float side is not known
        self.floating[node] = call_node(self.model, node, self.floating.__getitem__, module) if is_known else fallback
        self.actual[node] = call_node(self.model, node, self.actual.__getitem__)

    def _find_float_module(self, node: Node, decision: Decision) -> nn.Module | None:
        """Return the float module of a call; None if it is not known."""
        name = str(node.target)
        if name not in self.floats:
            if self.origin is not None:
                self.floats[name] = float_module_of(self.origin.get_submodule(name), where=name)
            elif decision.kind == "custom module":
                self.floats[name] = None
            else:
                module = self.model.get_submodule(name)
                self.floats[name] = self._float_of_reference(module, decision, name == decision.target)
        return self.floats[name]

    def _float_of_reference(self, module: nn.Module, decision: Decision, is_root: bool) -> nn.Module | None:
        """Return a copy of a reference module with its float weights; a float module as it is; else None."""
        root = module[0] if isinstance(module, nni._FusedModule) else module
        weight = decision.dtype_config.weight_dtype if decision.dtype_config and is_root else None
        methods = [name for name in FLOAT_WEIGHTS if hasattr(root, name)]
        if methods and weight is torch.float16:
            return None  # rounded when it was made (CVT-04)
        if not methods:
            holds_none = not [*root.parameters(), *root.buffers()]  # a dtype config may name a weight all the same
            is_float = not is_quantized_dtype(weight) or class_of(root) in notes_of(self.model)[PREPARED].references
            return module if is_float or holds_none else None
        copied = copy.copy(root)
        for name in methods:
            copied.__dict__[name] = partial(FLOAT_WEIGHTS[name], root)
        if root is module:
            return copied
        fused: Any = copy.copy(module)
        fused._modules = {**module._modules, "0": copied}
        return fused  # type: ignore[no-any-return]

    def _read_layer(self, layer: LayerEdge) -> Reading:
        """Collect the values of a layer. A plain integer tensor's are the real numbers of its integers."""
        floating, actual = self.floating[layer.source], map_aggregate(self.actual[layer.at], as_float)
        if layer.decision is None:
            own_float, own_actual = self._rounded_of(layer.source), self._rounded_of(layer.at)
        else:
            own_float, own_actual = self.own_float[layer.source], self.own_actual[layer.at]
        if own_float is None:
            assert layer.decision is not None
            kind = type(self.model.get_submodule(str(layer.decision.target))).__name__
            reason = f"{kind} holds no float weights; give the prepared model as against="
            return Reading(floating=None, actual=actual, reason=reason)
        grid = None if layer.quantize is None else self._grid_of(layer.quantize)
        own_float, own_actual = (map_aggregate(own, as_float) for own in (own_float, own_actual))
        return Reading(floating=floating, actual=actual, own_float=own_float, own_actual=own_actual, grid=grid)

    def _grid_of(self, quantize: Node) -> OutputGrid | None:
        """Return the grid of a node that quantizes per tensor; None for any other."""
        if quantize.target not in (QUANTIZE, OPS.quantize_per_tensor.default):
            return None
        numbers: list[Any] = [
            attribute_of(self.model, str(number.target)) if isinstance(number, Node) else number
            for number in quantize.args[1:]
        ]
        scale, zero_point, *form = numbers  # a dtype, or ends and a dtype
        ends = form[:2] if len(form) == 3 else dtype_range(form[0])
        low, high = ((end - int(zero_point)) * float(scale) for end in ends)
        value: Any = quantize.args[0]
        if value in self.bounds:
            low, high = value.args[1:3]
        return OutputGrid(float(scale), low, high)


def _read_copy(held: Any, state: dict[Hashable, Any]) -> Any:
    """Return a copy of what a model holds; copies of what shares memory share it as well."""
    is_plain = isinstance(held, Tensor) and held.layout is torch.strided and not held.is_quantized
    if not is_plain or held.is_conj() or held.is_neg():
        return state.setdefault(id(held), copy_tensors(held))
    memory: Any = held.untyped_storage()
    storage = state.setdefault(memory_of(held), memory.clone())
    return held.new_empty(0).set_(storage, held.storage_offset(), held.shape, held.stride())


def is_rounding(node: Node) -> bool:
    """Tell whether a node rounds a value, in either form: to integers, or to float16. (CVT-01, CVT-04)"""
    return is_quantize(node) or _is_cast(node, torch.float16)


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    return node.target is OPS.convert_element_type.no_fuse and node.args[1] is dtype


def _is_dynamic(quantize: Node) -> bool:
    """Tell whether qparams are chosen while running. (CVT-03)"""
    scale = quantize.args[1] if quantize.op == "call_function" else None
    return quantize.target is QUANTIZE_DYNAMIC or (isinstance(scale, Node) and scale.target is operator.getitem)


def as_float(value: Any) -> Any:
    """Return a quantized or float16 tensor in float32, and anything else as it is."""
    if isinstance(value, Tensor) and (value.is_quantized or value.dtype == torch.float16):
        return value.dequantize()
    return value


def flatten(values: Any) -> list[Any]:
    """List the leaves of a structure, in order; quantized and float16 tensors in float32."""
    leaves: list[Any] = []
    map_aggregate(values, lambda value: leaves.append(as_float(value)))
    return leaves


def copy_tensors(values: Any) -> Any:
    """Copy the tensors in a structure."""
    return map_aggregate(values, lambda value: value.clone() if isinstance(value, Tensor) else value)


def inputs_of(model: GraphModule, inputs: tuple[Any, ...]) -> list[Any]:
    """Lay positional inputs out, one for each placeholder. Raises ModelError for another number of them."""
    placeholders, remaining = model.graph.find_nodes(op="placeholder"), list(inputs)
    values: list[Any] = []
    for node in placeholders:
        if str(node.target).startswith("**"):
            values.append({})
        elif str(node.target).startswith("*"):
            values, remaining = [*values, tuple(remaining)], []
        elif remaining or node.args:
            values.append(remaining.pop(0) if remaining else node.args[0])
    if remaining or len(values) != len(placeholders):
        names = ", ".join(str(node.target) for node in placeholders)
        raise ModelError(
            f"explain: sample_inputs: {type(model).__name__} takes ({names}), found {len(inputs)} inputs; a tuple "
            "holds the inputs of one call, a list holds several calls"
        )
    return values


def record(model: GraphModule, inputs: tuple[Any, ...], prefix: str, values: dict[str, Any]) -> Any:
    """Run a model; put its nodes' values, in float, into `values` under prefix and name; return its result."""
    remaining = iter(inputs_of(model, inputs))
    here: Values = {}
    for node in model.graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], here.__getitem__)
        part = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        with blame(ModelError, f"explain: node {prefix + node.name!r}", str(node.target)):
            if node.op == "placeholder":
                here[node] = next(remaining)
            elif isinstance(part, GraphModule):
                args = map_arg(node.args, here.__getitem__)
                here[node] = record(part, args, f"{prefix}{node.target}.", values)
            else:
                here[node] = call_node(model, node, here.__getitem__)
        values[prefix + node.name] = map_aggregate(here[node], as_float)
    return None
