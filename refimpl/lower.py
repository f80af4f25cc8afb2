"""Lower the reference model to torch's native quantized ops and modules (rules LOW-01, LOW-03, LOW-04).

Every ``dequantize → op → quantize`` that the table names becomes one quantized op or module. The same table serves the
engines qnnpack, fbgemm, x86 and onednn: weights are packed for ``torch.backends.quantized.engine`` as it is set while
lowering. What was not lowered is listed with its reason in ``model.meta["not_lowered"]``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refimpl.convert import convert_to_reference_fx
from refimpl.errors import ModelError
from refimpl.invariants import QUANTIZE, QUANTIZE_PER_CHANNEL, check_graph, is_dequantize
from refimpl.lower_table import (
    BINARY,
    IN_PLACE,
    MODULES,
    ON_QUANTIZED,
    PACKED_FUNCTIONS,
    RELUS,
    SHAPE_OF,
    PackedFunction,
)
from refimpl.tracing import attribute_of, draft_of, no_collection, positional_arguments, tensor_inputs

NOT_LOWERED = "not_lowered"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLowered:
    """A reference pattern that stays a float op between dequantize and quantize, and why. (LOW-04)"""

    node: str
    op: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.reason}"


def convert_fx(
    graph_module: GraphModule,
    convert_custom_config: object | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: object | None = None,
    backend_config: object | None = None,
) -> GraphModule:
    """Convert a prepared model to the reference model and lower it for torch's current quantized engine. (LOW-01)"""
    reference = convert_to_reference_fx(
        graph_module, convert_custom_config, _remove_qconfig, qconfig_mapping, backend_config
    )
    return lower(reference)


@no_collection()
def lower(reference_model: GraphModule) -> GraphModule:
    """Lower a reference model on quantized tensors; the reference model is not changed. (LOW-01)

    Raises ModelError for a model without a graph.
    """
    if not isinstance(reference_model, GraphModule):
        raise ModelError(f"lower: expected a GraphModule, found {type(reference_model).__name__}")
    model = draft_of(reference_model)
    context = _Context(model)
    refused = []
    for node in list(model.graph.nodes):
        if node.op not in ("call_module", "call_function", "call_method"):
            continue
        reason = _Site(context, node).lower()
        if reason is not None:
            refused.append(NotLowered(node=node.name, op=_op_name(model, node), reason=reason))
    model.graph.eliminate_dead_code()
    model.meta[NOT_LOWERED] = tuple(refused)
    check_graph(model, "lower")
    return model.finish()


def _op_name(model: GraphModule, node: Node) -> str:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "__name__", node.target))


class _Blocked(Exception):
    """Why a site cannot be rewritten. (LOW-03)"""


class _Context:
    """What all sites of one model share: how often a module is called, and the qparams of every quantized value."""

    def __init__(self, model: GraphModule) -> None:
        self.model = model
        self.calls = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
        self.qparams = {node: self._read(node) for node in model.graph.nodes if node.target is QUANTIZE}

    def _read(self, quantize: Node) -> tuple[float, int]:
        attributes: Any = quantize.args[1:3]
        scale, zero_point = (attribute_of(self.model, str(argument.target)) for argument in attributes)
        return float(scale), int(zero_point)


class _Site:
    """One candidate: a float op that reads dequantized values and whose result is quantized."""

    def __init__(self, context: _Context, node: Node) -> None:
        self.context = context
        self.model = context.model
        self.node = node

    def lower(self) -> str | None:
        """Rewrite the site if the table has it. Returns why not, or None if done or if it is no site at all."""
        if not any(is_dequantize(value) for value in tensor_inputs((self.node.args, self.node.kwargs))):
            return None
        if self._reads_shape():
            return None
        try:
            rewritten = self._weighted() or self._binary() or self._on_quantized()
        except _Blocked as blocked:
            return str(blocked)
        is_site = rewritten or self._feeds_quantize()
        return None if rewritten else ("LOW-01: no row of the table" if is_site else None)

    def _reads_shape(self) -> bool:
        """Let an op that reads a shape read the quantized tensor's, so that nothing is dequantized for it. (LOW-02)"""
        node = self.node
        is_shape = node.target is getattr and node.args[1] == "shape"
        if not is_shape and not (node.op == "call_method" and node.target in SHAPE_OF):
            return False
        node.args = torch.fx.node.map_arg(
            node.args, lambda value: self._source(value) if is_dequantize(value) else value
        )
        return True

    def _feeds_quantize(self) -> bool:
        return any(user.target is QUANTIZE for user in self.node.users)

    # -- reading the site -------------------------------------------------------------------------------------------

    def _source(self, value: Any) -> Node:
        """The quantized value behind a dequantize."""
        if not is_dequantize(value):
            raise _Blocked(f"LOW-03: argument {value} is not dequantized: the op would mix float and quantized")
        source = value.args[0]
        assert isinstance(source, Node)
        return source

    def _tail(self) -> tuple[Node | None, Node]:
        """The (relu or None, quantize) that follow, each the only user of what it follows. (PAT-06)"""
        user = self._only_user(self.node)
        relu = user if self._is_relu(user) else None
        return relu, self._quantize_after(relu or self.node)

    def _only_user(self, node: Node) -> Node:
        if len(node.users) != 1:
            raise _Blocked(f"LOW-03: {node.name} has {len(node.users)} users; one quantized op has one output")
        return next(iter(node.users))

    def _is_relu(self, node: Node) -> bool:
        if node.op == "call_module":
            return type(self.model.get_submodule(str(node.target))) is nn.ReLU
        return node.op in ("call_function", "call_method") and node.target in RELUS

    # -- rewriting ---------------------------------------------------------------------------------------------------

    def _replace(self, quantize: Node, new: Node) -> bool:
        """Let the new quantized value stand for the quantize node's; dead code is swept at the end."""
        new.meta = dict(self.node.meta)
        self.context.qparams[new] = self.context.qparams[quantize]
        quantize.replace_all_uses_with(new)
        self.model.graph.erase_node(quantize)
        return True

    def _weighted(self) -> bool:
        if self.node.op == "call_module":
            return self._weighted_module()
        packed = PACKED_FUNCTIONS.get(self.node.target) if self.node.op == "call_function" else None
        return packed is not None and self._weighted_function(packed)

    def _weighted_module(self) -> bool:
        """Swap a reference module for the quantized one with packed weights. (LOW-01)"""
        target = str(self.node.target)
        module: Any = self.model.get_submodule(target)
        inner = module[0] if isinstance(module, nn.Sequential) else module
        native = MODULES.get((type(module), type(inner)))
        if native is None:
            return False
        if self.context.calls[target] > 1:
            raise _Blocked(f"LOW-03: module {target!r} is called at more than one place, each with its own qparams")
        if getattr(inner, "padding_mode", "zeros") not in ("zeros", "reflect"):
            raise _Blocked(f"LOW-03: padding_mode {inner.padding_mode!r}: the quantized op pads with zeros")
        if isinstance(getattr(inner, "padding", 0), str):
            raise _Blocked(f"LOW-03: padding {inner.padding!r}: the quantized op takes numbers")
        source = self._source(self.node.args[0])
        quantize = self._quantize_after(self.node)
        scale, zero_point = self.context.qparams[quantize]
        self.model.set_submodule(target, native.from_reference(module, scale, zero_point))
        with self.model.graph.inserting_after(quantize):
            new = self.model.graph.call_module(target, (source,))
        return self._replace(quantize, new)

    def _quantize_after(self, node: Node) -> Node:
        user = self._only_user(node)
        if user.target is not QUANTIZE:
            raise _Blocked(f"LOW-01: {node.name} is not quantized: its user is {user.name}")
        return user

    def _weighted_function(self, packed: PackedFunction) -> bool:
        """Pack a constant quantized weight now, and call the quantized function with it. (LOW-02)"""
        arguments = positional_arguments(self.node, at_least=len(packed.defaults) + 2)
        value, weight, *rest = (*arguments, *packed.defaults[len(arguments) - 2 :])
        relu, quantize = self._tail()
        constant = self._constant(self._source(weight))
        bias = rest[0]
        if isinstance(bias, Node):
            if bias.op != "get_attr":
                raise _Blocked(f"LOW-03: bias {bias.name} is computed; the packed weight holds a constant")
            bias = attribute_of(self.model, str(bias.target))
        if any(isinstance(argument, (str, Node)) for argument in rest[1:]):
            raise _Blocked(f"LOW-03: stride, padding or dilation {rest[1:]}: the quantized op takes numbers")
        name = f"_packed_weight_{self.node.name}"
        setattr(self.model, name, packed.prepack(constant, bias, *packed.geometry(rest[1:])))
        function = packed.relu_function if relu is not None else packed.function
        with self.model.graph.inserting_after(quantize):
            packed_node = self.model.graph.create_node("get_attr", name)
        with self.model.graph.inserting_after(packed_node):
            new = self.model.graph.call_function(
                function, (self._source(value), packed_node, *self.context.qparams[quantize])
            )
        return self._replace(quantize, new)

    def _constant(self, node: Node) -> torch.Tensor:
        """Compute a quantized weight that depends on nothing but attributes of the model."""

        def value_of(argument: Node) -> Any:
            if argument.op == "get_attr":
                return attribute_of(self.model, str(argument.target))
            function: Any = argument.target
            if function not in (QUANTIZE, QUANTIZE_PER_CHANNEL, torch.clamp):
                raise _Blocked(f"LOW-03: weight {node.name} is computed; the packed weight holds a constant")
            args, kwargs = torch.fx.node.map_arg((argument.args, argument.kwargs), value_of)
            return function(*args, **kwargs)

        found: torch.Tensor = value_of(node)
        return found

    def _binary(self) -> bool:
        """add and mul of two quantized tensors, with or without relu. (LOW-02)"""
        row = BINARY.get(self.node.target) if self.node.op == "call_function" else None
        if row is None:
            return False
        left, right = positional_arguments(self.node, at_least=2)[:2]
        if set(self.node.kwargs) - {"input", "other", "alpha"} or self.node.kwargs.get("alpha", 1) != 1:
            raise _Blocked(f"LOW-03: arguments {dict(self.node.kwargs)} cannot be expressed by the quantized op")
        relu, quantize = self._tail()
        sources = (self._source(left), self._source(right))
        with self.model.graph.inserting_after(quantize):
            new = self.model.graph.call_function(
                row.plain if relu is None else row.with_relu, (*sources, *self.context.qparams[quantize])
            )
        return self._replace(quantize, new)

    def _on_quantized(self) -> bool:
        """Run an op that keeps qparams on the quantized tensors themselves. (LOW-02)"""
        node = self.node
        module = self.model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if (node.target if module is None else type(module)) not in ON_QUANTIZED:
            return False
        quantize = self._quantize_after(node)
        inputs = [value for value in tensor_inputs((node.args, node.kwargs)) if is_dequantize(value)]
        sources = {value: self._source(value) for value in inputs}
        is_in_place = node.target in IN_PLACE or node.kwargs.get("inplace") or getattr(module, "inplace", False)
        for value, source in sources.items():
            if self.context.qparams[source] != self.context.qparams[quantize]:
                raise _Blocked(f"LOW-03: {value.name} and the output differ in qparams; the op keeps its input's")
            if is_in_place and (len(value.users), len(source.users)) != (1, 1):
                raise _Blocked(f"LOW-03: {node.name} works in place on {source.name}, which has other users")
        new_args, new_kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: sources.get(value, value))
        with self.model.graph.inserting_after(quantize):
            new = self.model.graph.create_node(node.op, node.target, new_args, new_kwargs)
        return self._replace(quantize, new)
