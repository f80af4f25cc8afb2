"""Walking a reference model with the float model's values beside its own, to measure each layer's error (rule OBS-15).

At each node up to five values go side by side. ``floating``: the float model's; nothing is rounded, weights are float.
``actual``: the reference model's. ``rounded``: the float model's where a pattern takes it, rounded as its input is.
``own_float`` and ``own_actual``: what a pattern makes of ``rounded``, in float and as quantized: their difference is
the error that this pattern adds. A rounding counts once: that of an output in the pattern that gives it, those of
weights, and those made while running, in the pattern that takes them; any other is a layer of its own.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.ao.nn.intrinsic as nni
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from refimpl.decomposed import OPS
from refimpl.errors import ModelError, blaming
from refimpl.explain import PLAN
from refimpl.invariants import QUANTIZE_DYNAMIC, is_dequantize, is_quantize
from refimpl.plan import Decision
from refimpl.prepare import PREPARED
from refimpl.qparams import dtype_range, is_quantized_dtype
from refimpl.reference import float_module
from refimpl.tracing import CALLS, attribute_of, module_type, notes_of

Values = dict[Node, Any]

_FLOAT_WEIGHTS: dict[str, Callable[[Any], Any]] = {  # how torch's reference modules ask for weights, by method
    "get_weight": lambda module: module.weight,
    "get_weight_ih": lambda module: module.weight_ih,
    "get_weight_hh": lambda module: module.weight_hh,
    "get_flat_weights": lambda module: [getattr(module, name) for name in module._flat_weights_names],
}


class OutputGrid(NamedTuple):
    """Where a layer's output may lie: its step, and the ends of its range (real numbers)."""

    scale: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerEdge:
    """What is measured, and where.

    ``name``: the value's, as the float model has it. ``source``: the value before it is rounded. ``quantize``: what
    rounds it, if its qparams are known before running. ``at``: the node behind both. ``decision``: None for a value
    that is rounded for those who take it.
    """

    name: str
    prefix: str
    source: Node
    quantize: Node | None
    at: Node
    decision: Decision | None


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
    """A reference model, or a standalone module in it, that batches are taken through.

    `origin`: the prepared model that it was converted from, for its float modules; None: they are made of the reference
    modules. `prefix`: the standalone module's full name and a dot.
    """

    def __init__(self, model: GraphModule, origin: GraphModule | None, prefix: str, measure: Measure) -> None:
        self.model, self.origin, self.prefix, self.measure = model, origin, prefix, measure
        plan = notes_of(model)[PLAN]
        made = [decision for decision in plan.decisions if decision.is_quantized]
        self.nodes: list[Node] = list(model.graph.nodes)
        self.decisions = {name: d for d in made if d.kind != "standalone module" for name in d.nodes}
        known = {name for decision in plan.decisions for name in decision.nodes} | {name for name, *_ in plan.unmatched}
        weights = {slot.value for slot in plan.slots if slot.role in ("weight", "bias")}
        calls = [node for node in self.nodes if node.op in CALLS]
        self.inserted = {node for node in calls if node.name not in known}
        self.quantizes = {node for node in self.inserted if is_rounding(node)}
        self.bounds = {n for n in self.inserted if n.target is torch.clamp and self.quantizes.issuperset(n.users)}
        self.back = {node for node in self.inserted if is_dequantize(node) or _is_cast(node, torch.float32)}
        self.of_user = {q for q in self.quantizes if self._source(q).name in weights or _is_dynamic(q)}
        self.layers = {layer.at: layer for layer in self._layers()}
        self.last_use = self._last_uses()
        self.children: dict[Node, QualityWalk] = {}
        self.floats: dict[str, nn.Module | None] = {}
        self.floating: Values = {}
        self.actual: Values = {}
        self.rounded: Values = {}
        self.own_float: Values = {}
        self.own_actual: Values = {}

    # -- what stands in the graph --------------------------------------------------------------------------------------

    def _source(self, quantize: Node) -> Node:
        """The value that a node rounds, before the clamp to a narrower range. (CVT-09)"""
        value: Any = quantize.args[0]
        source: Node = value.args[0] if value in self.bounds else value
        return source

    def _layers(self) -> Iterator[LayerEdge]:
        """Yield a layer for each rounding that is no part of a pattern that takes it, and for each other pattern."""
        rounded = set()
        for quantize in (node for node in self.nodes if node in self.quantizes and node not in self.of_user):
            source = self._source(quantize)
            at = next((user for user in quantize.users if user in self.back), quantize)
            decision = self._ended(source) if source not in rounded else None
            rounded.add(source)
            yield self._layer(source, quantize, at, decision)
        for node in self.nodes:
            decision = self._ended(node)
            if decision is not None and node not in rounded:
                yield self._layer(node, None, node, decision)

    def _layer(self, source: Node, quantize: Node | None, at: Node, decision: Decision | None) -> LayerEdge:
        named: Any = source
        while named in self.back or named in self.quantizes or named in self.bounds:  # rounded before (OBS-14)
            named = named.args[0]
        name = self.prefix + named.name
        return LayerEdge(name=name, prefix=self.prefix, source=source, quantize=quantize, at=at, decision=decision)

    def _ended(self, node: Node) -> Decision | None:
        """The decision of the pattern that ends at a node."""
        decision = self.decisions.get(node.name)
        return decision if decision is not None and decision.node == node.name else None

    def _last_uses(self) -> dict[Node, list[Node]]:
        """The values that are not read after a node."""
        last = {value: node for node in self.nodes for value in (node, *node.all_input_nodes)}
        order = {node: index for index, node in enumerate(self.nodes)}
        for layer in self.layers.values():
            last[layer.source] = max(last[layer.source], layer.at, key=order.__getitem__)
        found: dict[Node, list[Node]] = {}
        for value, node in last.items():
            found.setdefault(node, []).append(value)
        return found

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, floating: tuple[Any, ...], actual: tuple[Any, ...]) -> tuple[Any, Any]:
        """Take a batch through: the inputs of the float model and of the reference model, and what they return.

        Raises ModelError, naming the node, if that fails.
        """
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        for side, given in ((self.floating, floating), (self.actual, actual)):
            side.update(zip(inputs, inputs_of(self.model, given), strict=True))
        result: tuple[Any, Any] = (None, None)
        for node in self.nodes:
            if node.op == "output":
                of_float, of_actual = (map_arg(node.args[0], side.__getitem__) for side in (self.floating, self.actual))
                result = (of_float, of_actual)
            elif node.op != "placeholder":
                with blaming(ModelError, f"explain: node {self.prefix + node.name!r}", str(node.target)):
                    self._visit(node)
            if node in self.layers:
                self.measure(self.layers[node], self._reading(self.layers[node]))
            for value in self.last_use.get(node, ()):
                for side in (self.floating, self.actual, self.rounded, self.own_float, self.own_actual):
                    side.pop(value, None)
        return result

    def _visit(self, node: Node) -> None:
        child = self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "get_attr":
            self.floating[node] = self.actual[node] = attribute_of(self.model, str(node.target))
        elif isinstance(child, GraphModule) and PLAN in notes_of(child):
            self._standalone(node, child)
        elif node in self.inserted:
            self._inserted(node)
        elif node.name in self.decisions:
            self._pattern(node, self.decisions[node.name])
        else:
            self.floating[node] = self._call(node, self.floating.__getitem__)
            self.actual[node] = self._call(node, self.actual.__getitem__)

    def _call(self, node: Node, value_of: Callable[[Node], Any], module: nn.Module | None = None) -> Any:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        called: Any = node.target
        if node.op == "call_module":
            called = self.model.get_submodule(str(node.target)) if module is None else module
        return called(*args, **kwargs)

    def _rounded(self, node: Node) -> Any:
        return self.rounded[node] if node in self.rounded else self.floating[node]

    def _standalone(self, node: Node, child: GraphModule) -> None:
        """A standalone module is walked by itself; its layers are in the report, and it is none."""
        if node not in self.children:
            name = str(node.target)
            origin: Any = None if self.origin is None else self.origin.get_submodule(name)
            self.children[node] = QualityWalk(child, origin, f"{self.prefix}{name}.", self.measure)
        given = (map_arg(node.args, side.__getitem__) for side in (self.floating, self.actual))
        self.floating[node], self.actual[node] = self.children[node].run(*given)

    def _inserted(self, node: Node) -> None:
        """What convert wrote; the float model has nothing in its place, or something like a multiplication. (EQL-01)"""
        value: Any = node.args[0]
        passes = node in self.quantizes or node in self.back or node in self.bounds
        self.floating[node] = as_float(self.floating[value]) if passes else self._call(node, self.floating.__getitem__)
        self.actual[node] = self._call(node, self.actual.__getitem__)
        self.rounded[node] = self._call(node, self._rounded)
        if value in self.own_actual:
            self.own_actual[node] = self._call(node, lambda each: self.own_actual.get(each, self._rounded(each)))

    def _pattern(self, node: Node, decision: Decision) -> None:
        """A node of a pattern, in float and quantized; by itself first, and on copies: it may work in place."""

        def of_own(own: Values, is_float: bool) -> Callable[[Node], Any]:
            def value_of(each: Node) -> Any:
                if each.name in decision.nodes:
                    return copied(own[each])
                is_exact = is_float and each in self.back and each.args[0] in self.of_user
                value = self.floating[each] if is_exact else self._rounded(each)
                return copied(as_float(value) if is_float else value)

            return value_of

        module = self._float_module(node, decision) if node.op == "call_module" else None
        is_known = node.op != "call_module" or module is not None
        self.own_actual[node] = self._call(node, of_own(self.own_actual, is_float=False))
        self.own_float[node] = None
        if is_known and all(self.own_float.get(each, each) is not None for each in node.all_input_nodes):
            self.own_float[node] = self._call(node, of_own(self.own_float, is_float=True), module)
        going_on = map_aggregate(self.own_actual[node], as_float)  # from what there is, if the float side is not known
        self.floating[node] = self._call(node, self.floating.__getitem__, module) if is_known else going_on
        self.actual[node] = self._call(node, self.actual.__getitem__)

    def _float_module(self, node: Node, decision: Decision) -> nn.Module | None:
        """Return the float module of a call; None if nobody knows it."""
        name = str(node.target)
        if name not in self.floats:
            if self.origin is not None:
                self.floats[name] = float_module(self.origin.get_submodule(name), where=name)
            elif decision.kind == "custom module":
                self.floats[name] = None
            else:
                self.floats[name] = self._of_reference(
                    self.model.get_submodule(name), decision, name == decision.target
                )
        return self.floats[name]

    def _of_reference(self, module: nn.Module, decision: Decision, is_root: bool) -> nn.Module | None:
        """Return a copy of a reference module that takes its float weights; a float module as it is; else None."""
        root = module[0] if isinstance(module, nni._FusedModule) else module  # type: ignore[attr-defined]
        weight = decision.dtype_config.weight_dtype if decision.dtype_config and is_root else None
        asked = [name for name in _FLOAT_WEIGHTS if hasattr(root, name)]
        if asked and weight is torch.float16:
            return None  # rounded when it was made (CVT-04)
        if not asked:
            is_float = not is_quantized_dtype(weight) or module_type(root) in notes_of(self.model)[PREPARED].references
            return module if is_float else None
        made = copy.copy(root)
        for name in asked:
            made.__dict__[name] = partial(_FLOAT_WEIGHTS[name], root)
        if root is module:
            return made
        fused: Any = copy.copy(module)
        fused._modules = {**module._modules, "0": made}
        return fused  # type: ignore[no-any-return]

    # -- reading -------------------------------------------------------------------------------------------------------

    def _reading(self, layer: LayerEdge) -> Reading:
        """Collect what there is about a layer. The values of a plain integer tensor are those that it stands for."""
        floating, actual = self.floating[layer.source], map_aggregate(self.actual[layer.at], as_float)
        if layer.decision is None:
            own_float, own_actual = self._rounded(layer.source), self._rounded(layer.at)
        else:
            own_float, own_actual = self.own_float[layer.source], self.own_actual[layer.at]
        if own_float is None:
            assert layer.decision is not None
            kind = type(self.model.get_submodule(str(layer.decision.target))).__name__
            reason = f"{kind} holds no float weights; give the prepared model as against="
            return Reading(floating=None, actual=actual, reason=reason)
        grid = None if layer.quantize is None else self._grid(layer.quantize)
        own_actual = map_aggregate(own_actual, as_float)
        own_float = map_aggregate(own_float, as_float)
        return Reading(floating=floating, actual=actual, own_float=own_float, own_actual=own_actual, grid=grid)

    def _grid(self, quantize: Node) -> OutputGrid | None:
        """The grid of a node that quantizes per tensor; None for any other."""
        if quantize.target not in (torch.quantize_per_tensor, OPS.quantize_per_tensor.default):
            return None
        numbers: list[Any] = [
            attribute_of(self.model, str(number.target)) if isinstance(number, Node) else number
            for number in quantize.args[1:]
        ]
        scale, zero_point, *rest = numbers
        ends = rest[:2] if len(rest) == 3 else dtype_range(rest[0])
        low, high = ((end - int(zero_point)) * float(scale) for end in ends)
        value: Any = quantize.args[0]
        if value in self.bounds:
            low, high = value.args[1:3]
        return OutputGrid(float(scale), low, high)


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


def leaves(values: Any) -> list[Any]:
    """List what is in a structure, in order; quantized and float16 tensors in float32."""
    found: list[Any] = []
    map_aggregate(values, lambda value: found.append(as_float(value)))
    return found


def copied(values: Any) -> Any:
    """Copy the tensors in a structure."""
    return map_aggregate(values, lambda value: value.clone() if isinstance(value, Tensor) else value)


def inputs_of(model: GraphModule, given: tuple[Any, ...]) -> list[Any]:
    """Lay positional inputs out, one for each placeholder. Raises ModelError for another number of them."""
    taken, rest = model.graph.find_nodes(op="placeholder"), list(given)
    found: list[Any] = []
    for node in taken:
        if str(node.target).startswith("**"):
            found.append({})
        elif str(node.target).startswith("*"):
            found, rest = [*found, tuple(rest)], []
        elif rest or node.args:
            found.append(rest.pop(0) if rest else node.args[0])
    if rest or len(found) != len(taken):
        names = ", ".join(str(node.target) for node in taken)
        raise ModelError(
            f"explain: sample_inputs: {type(model).__name__} takes ({names}), found {len(given)} inputs; a tuple holds "
            "the inputs of one call, a list holds several calls"
        )
    return found


def recorded(model: GraphModule, given: tuple[Any, ...], prefix: str, values: dict[str, Any]) -> Any:
    """Run a model; put into `values` what its nodes give, in float, under prefix and name; return what it returns."""
    inputs = iter(inputs_of(model, given))
    here: Values = {}
    for node in model.graph.nodes:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), here.__getitem__)
        part = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        with blaming(ModelError, f"explain: node {prefix + node.name!r}", str(node.target)):
            if node.op == "output":
                return args[0]
            if node.op == "placeholder":
                here[node] = next(inputs)
            elif node.op == "get_attr":
                here[node] = attribute_of(model, str(node.target))
            elif isinstance(part, GraphModule):
                here[node] = recorded(part, args, f"{prefix}{node.target}.", values)
            else:
                called: Any = part if part is not None else node.target
                if node.op == "call_method":
                    called = getattr(type(args[0]), str(node.target))
                here[node] = called(*args, **kwargs)
        values[prefix + node.name] = map_aggregate(here[node], as_float)
    return None
