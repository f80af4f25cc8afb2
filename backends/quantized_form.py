"""The quantized-tensor form of a decomposed reference model, for a backend that takes that form (CVT-01, CVT-07).

Both forms compute the same integers, exact ties of values aside. What quantized tensors cannot say is written out: a
clamp stands before the quantize of a range narrower than the dtype's, and weights lie where they round to the integers
of the decomposed form. (CVT-09)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fx_quant_conformance.refimpl.config.custom_config import QuantType
from fx_quant_conformance.refimpl.convert.emit import QuantizedTensors
from fx_quant_conformance.refimpl.graph.graph_modules import free_name
from fx_quant_conformance.refimpl.graph.invariants import check_graph, is_dequantize
from fx_quant_conformance.refimpl.graph.modules import copy_shallow, remove_qconfig
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, finish, no_collection, notes_of
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE
from fx_quant_conformance.refimpl.legacy.quantized_tensors import QUANTIZE, QUANTIZE_PER_CHANNEL
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.observers.observers import PlaceholderObserver, asks_whole_range
from fx_quant_conformance.refimpl.observers.qparams import QParams, dtype_range, is_quantized_dtype
from fx_quant_conformance.refimpl.prepare.decide import quant_type_of
from fx_quant_conformance.refimpl.prepare.plan import PLAN, Plan

_CAST = OPS.convert_element_type.no_fuse
_NEEDLESS = (OPS.choose_qparams.tensor, OPS.choose_qparams_symmetric.tensor, operator.getitem, "dequantize")
_QUANTIZED_DTYPES = {PLAIN_DTYPE[dtype]: dtype for dtype in QuantizedTensors.dtypes}


@no_collection()
def to_quantized_form(reference: GraphModule) -> GraphModule:
    """Return a reference model of the decomposed form on torch's quantized tensors; the model itself is not changed.

    Inputs and outputs stay floats, and there are no ``qconfig`` attributes. A model that is in that form already stays
    as it is. Raises QConfigError for a value that quantized tensors cannot have (CVT-10).
    """
    attributes: dict[str, Any] = {}
    graph = _Rewriting(reference, attributes).write()
    targets = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    model = finish({name: value for name, value in attributes.items() if name in targets}, graph, reference)
    check_graph(model, "convert")
    return remove_qconfig(model)


class _BoundedTensors(QuantizedTensors):
    """Writes quantize and dequantize on torch's quantized tensors, with a clamp for a narrow range. (CVT-09)"""

    def write_static(self, value: Node, qparams: QParams, scope: str) -> tuple[Node, Node]:
        """Write a clamp to the reals at the ends of a narrow range per tensor, then what the base class writes."""
        ends = (qparams.quant_min, qparams.quant_max)
        if qparams.axis is None and qparams.dtype in self.dtypes and ends != dtype_range(qparams.dtype):
            low, high = (float((end - qparams.zero_point.to(torch.float32)) * qparams.scale) for end in ends)
            value = self.graph.call_function(torch.clamp, (value, low, high))  # rule: CVT-09
        return super().write_static(value, qparams, scope)


class _Rewriting:
    """Writes a graph again, node by node. ``values``: what stands for each node."""

    def __init__(self, reference: GraphModule, attributes: dict[str, Any]) -> None:
        self.reference, self.attributes = reference, attributes
        self.graph = Graph()
        self.emitter = _BoundedTensors(self.graph, attributes, reference, ())
        self.values: dict[Node, Any] = {}
        self.quantized: dict[Any, Node] = {}  # a dequantized value → the quantized one
        plan: Plan | None = notes_of(reference).get(PLAN)
        self.decisions = {} if plan is None else {name: each for each in plan.decisions for name in each.nodes}
        slots = () if plan is None else plan.slots
        self.scopes = {slot.value: slot.scope for slot in slots}
        plain = {make for make in {slot.make for slot in slots} if make().dtype in _QUANTIZED_DTYPES}
        self.plain = {slot.value for slot in slots if slot.make in plain}  # values of which plain integers are asked
        self.writers: Mapping[Any, Callable[[Node], tuple[Node, Node]]] = {
            OPS.quantize_per_tensor.default: self._write_static,
            OPS.quantize_per_channel.default: self._write_static,
            OPS.quantize_per_tensor.tensor: self._write_dynamic,
        }

    def write(self) -> Graph:
        """Return the new graph; what it holds is in the attributes."""
        for node in self.reference.graph.nodes:
            self.values[node] = self._write(node)
        for node in reversed(self.graph.nodes):  # qparams that are held otherwise now, and reals that nothing reads
            if not node.users and (node.op == "get_attr" or node.target in _NEEDLESS):
                self.graph.erase_node(node)
        return self.graph

    def _write(self, node: Node) -> Any:
        is_cast = node.target is _CAST and node.args[1:] == (torch.float16,)
        write = self._write_cast if is_cast else self.writers.get(node.target)
        if write is not None:
            quantized, dequantized = write(node)
            self.quantized[dequantized] = quantized
            return dequantized
        source = self.values[node.all_input_nodes[0]] if node.all_input_nodes else None
        if source in self.quantized and (node.target is _CAST or (is_dequantize(node) and node.op == "call_function")):
            return source  # written with what it dequantizes
        copied = self.graph.node_copy(node, self._quantized_of if self._takes_integers(node) else self.values.get)
        target = str(node.target)
        if node.op == "get_attr":
            self.attributes[target] = attribute_of(self.reference, target)
        elif node.op == "call_module" and target not in self.attributes:
            part = self.reference.get_submodule(target)
            self.attributes[target] = _put_on_tensors(part)
        return copied

    def _takes_integers(self, node: Node) -> bool:
        """Tell whether a node calls a static custom module: what it returns is dequantized. (CUS-01)"""
        decision = self.decisions.get(node.name)
        if decision is not None and decision.kind == "custom module" and decision.qconfig is not None:
            return quant_type_of(decision.qconfig) is QuantType.STATIC
        users = [user for each in node.users for user in (each, *each.users)]
        return node.op == "call_module" and any(user.target == "dequantize" for user in users)

    def _quantized_of(self, node: Node) -> Any:
        value = self.values[node]
        return self.quantized.get(value, value)

    def _write_static(self, node: Node) -> tuple[Node, Node]:
        """Write quantize per tensor or, with an axis, per channel. (CVT-01)"""
        value = node.all_input_nodes[0]
        held = (attribute_of(self.reference, str(a.target)) if isinstance(a, Node) else a for a in node.args[1:])
        arguments: tuple[Any, ...] = tuple(held)
        scale, zero_point, *axis, low, high, dtype = arguments
        qparams = QParams(
            scale=torch.as_tensor(scale),
            zero_point=torch.as_tensor(zero_point),
            axis=axis[0] if axis else None,
            dtype=self._find_dtype(value, dtype),
            quant_min=low,
            quant_max=high,
        )
        source = self.values[value]
        if value.op == "get_attr" and qparams.dtype in QuantizedTensors.dtypes:
            source = self._place_weight(node, arguments, qparams)
            low, high = dtype_range(qparams.dtype)
            qparams = replace(qparams, quant_min=low, quant_max=high)
        return self.emitter.write_static(source, qparams, self.scopes.get(value.name, value.name))

    def _place_weight(self, node: Node, arguments: tuple[Any, ...], qparams: QParams) -> Node:
        """Return a weight of a function that is quantized to the same integers as before. (CVT-07, CVT-09)"""
        value, quantize = node.all_input_nodes[0], cast(Any, node.target)
        weight = attribute_of(self.reference, str(value.target))
        if qparams.axis is None:
            found = QUANTIZE(weight, qparams.scale, qparams.zero_point, qparams.dtype)
        else:
            numbers = (qparams.scale, qparams.zero_point, qparams.axis)
            found = QUANTIZE_PER_CHANNEL(weight, *numbers, qparams.dtype)
        wanted = quantize(weight, *arguments)
        dequantize = next(cast(Any, user.target) for user in node.users if is_dequantize(user))
        moved = _move(weight, found, wanted, dequantize(wanted, *arguments))
        if moved is weight:
            return self.values[value]  # type: ignore[no-any-return]
        name = free_name(self.reference, f"{value.name}_on_grid", self.attributes)
        self.attributes[name] = moved
        return self.graph.get_attr(name)

    def _find_dtype(self, value: Node, plain: torch.dtype) -> torch.dtype:
        """Return the quantized dtype of integers; the plain one where that was asked for, and for what has none."""
        return plain if value.name in self.plain else _QUANTIZED_DTYPES.get(plain, plain)

    def _write_dynamic(self, node: Node) -> tuple[Node, Node]:
        """Write quantize_per_tensor_dynamic, of 8 bits on every engine where the QConfig asks for that. (CVT-03)"""
        arguments: Any = node.args
        value, scale, _, low, high, dtype = arguments
        is_whole = any(map(asks_whole_range, self._observers_of(node)))
        is_symmetric = scale.all_input_nodes[0].target is OPS.choose_qparams_symmetric.tensor
        observer = PlaceholderObserver(
            self._find_dtype(value, dtype),
            quant_min=low,
            quant_max=high,
            is_dynamic=True,
            qscheme=torch.per_tensor_symmetric if is_symmetric else torch.per_tensor_affine,
            reduce_range=False if is_whole else None,
        )
        return self.emitter.write_dynamic(self.values[value], observer)

    def _write_cast(self, node: Node) -> tuple[Node, Node]:
        """Write a cast to float16; for what casts its input at run time, the dynamic op. (CVT-03, CVT-04)"""
        source = node.all_input_nodes[0]
        value, observers = self.values[source], () if source.op == "get_attr" else self._observers_of(node)
        dynamic = next((each for each in observers if getattr(each, "is_dynamic", False)), None)
        return self.emitter.write_float16(value) if dynamic is None else self.emitter.write_dynamic(value, dynamic)

    def _observers_of(self, node: Node) -> Iterator[Any]:
        """Yield an observer of each QConfig for which a value is quantized."""
        for user in (user for dequantize in node.users for user in dequantize.users):
            decision = self.decisions.get(user.name)
            if decision is not None and decision.qconfig is not None:
                yield decision.qconfig.activation()


def _put_on_tensors(module: nn.Module) -> nn.Module:
    """Return a module whose reference modules quantize their weights on quantized tensors, to the same integers."""
    if isinstance(module, GraphModule):  # a standalone module (STD-01)
        return to_quantized_form(module)
    if not any(getattr(part, "is_decomposed", False) for part in module.modules()):
        return module
    copied: Any = copy_shallow(module)
    copied._modules |= {name: _put_on_tensors(part) for name, part in module._modules.items() if part is not None}
    if getattr(module, "is_decomposed", False):
        copied.is_decomposed = False
        if is_quantized_dtype(getattr(module, "weight_dtype", None)) and hasattr(module, "get_quantized_weight"):
            _keep_integers(copied, module)
    return copied  # type: ignore[no-any-return]


def _keep_integers(copied: Any, module: Any) -> None:
    """Move elements of a weight that quantized tensors would round to other integers onto those of the module.

    All other elements keep their bits.
    """
    found, wanted = copied.get_quantized_weight(), module.get_quantized_weight()
    if found.is_quantized:  # else it is the vendor's own way
        copied.weight = _move(module.weight, found, wanted, module.get_weight())


def _move(weight: Tensor, found: Tensor, wanted: Tensor, reals: Tensor) -> Tensor:
    """Return a weight that is quantized to `wanted`, whose values are `reals`; itself where it is `found` so already.

    Elements that are moved lie beyond a narrow range (CVT-09), or at a tie (CVT-07).
    """
    is_same = found.int_repr() == wanted
    if bool(is_same.all()):  # rule: CVT-09
        return weight
    moved = weight.detach().where(is_same, reals.to(weight.dtype))
    return nn.Parameter(moved, weight.requires_grad) if isinstance(weight, nn.Parameter) else moved
