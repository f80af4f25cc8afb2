"""Models without their roundings: a prepared model that observes nothing, a reference model that quantizes nothing.

Each is a float model, and computes what the model does that it was made of, if the flow is right. (OBS-15, CVT-01)
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.stages.meaning import SWITCHES
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.modules import float_module_of
from fx_quant_conformance.refimpl.graph.tracing import layer_of, notes_of
from fx_quant_conformance.refimpl.observers.decomposed import OPS
from fx_quant_conformance.refimpl.prepare.plan import PLAN
from fx_quant_conformance.refimpl.quality.walk import FLOAT_WEIGHTS


def without_observers(prepared: GraphModule) -> GraphModule:
    """Return a copy of a prepared model, in eval mode: its observers see nothing, its fake quantizes pass values on."""
    copied = copy.deepcopy(prepared).eval()
    for model in [each for each in copied.modules() if PLAN in notes_of(each)]:  # standalone modules too
        for slot in notes_of(model)[PLAN].slots:
            if slot.name in model._modules:
                model.add_module(slot.name, nn.Identity())
    for module in copied.modules():
        for name in SWITCHES:
            if hasattr(module, name):
                getattr(module, name).zero_()
    return copied


def without_roundings(reference: GraphModule, floating: GraphModule) -> GraphModule:
    """Return a copy of a reference model in which nothing is quantized, and each module has its float weight.

    ``floating``: the prepared model, without observers. It has the nodes that convert did not write, the float weights,
    and the modules that a reference model holds no float weights of: custom modules, and a vendor's own without them.
    """
    copied = copy.deepcopy(reference)
    written = find_written(copied, floating)
    for node in filter(_rounds, written):
        node.replace_all_uses_with(node.all_input_nodes[0])
    for node in reversed(written):  # with their qparams
        if not node.users:
            copied.graph.erase_node(node)
    for call in list_modules(copied, floating):
        if isinstance(call.quantized, GraphModule) and isinstance(call.original, GraphModule):  # standalone
            copied.set_submodule(call.target, without_roundings(call.quantized, call.original))
        elif call.weights:
            layer_of(call.quantized).__dict__.update(call.weights)
        elif type(call.quantized) is not type(call.floating):
            copied.set_submodule(call.target, call.original)
    copied.recompile()
    return copied


def find_written(reference: GraphModule, floating: GraphModule) -> list[Node]:
    """List the nodes of a reference model that convert wrote: the prepared model has no such name.

    What convert takes of the qparams that it has chosen at run time may have a name that the model has elsewhere.
    """
    own = {node.name for node in floating.graph.nodes}
    written: dict[Node, None] = {}
    for node in reference.graph.nodes:
        is_item = node.target is operator.getitem and node.all_input_nodes[0] in written
        if node.op not in ("placeholder", "output") and (is_item or node.name not in own):
            written[node] = None
    return list(written)


def _rounds(node: Node) -> bool:
    """Tell whether a node that convert wrote passes a value on, rounded or dequantized."""
    is_cast = node.target is OPS.convert_element_type.no_fuse
    return is_cast or is_quantize(node) or is_dequantize(node)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """A module that a reference model calls, by its name there, and what stands for it in the prepared model."""

    target: str
    quantized: nn.Module
    original: nn.Module
    floating: nn.Module
    """``original`` as convert takes it, a batch norm of training folded."""
    weights: Mapping[str, Callable[[], Any]]
    """The methods by which a reference module gives its weights, each giving the float ones; none of any other
    module."""


def list_modules(reference: GraphModule, floating: GraphModule) -> Iterator[ModuleCall]:
    """Yield the modules that a reference model calls and prepare has, once each, in the order of the graph."""
    decisions = {name: each for each in notes_of(reference)[PLAN].decisions for name in each.nodes}
    own, seen = {node.name: node for node in floating.graph.nodes}, set[str]()
    for node in reference.graph.find_nodes(op="call_module"):
        target, source = str(node.target), own.get(node.name)
        if target in seen or source is None or source.op != "call_module":
            continue
        seen.add(target)
        quantized, original = reference.get_submodule(target), floating.get_submodule(str(source.target))
        module = float_module_of(original, where=target)
        is_custom = node.name in decisions and decisions[node.name].kind == "custom module"
        names = [] if is_custom else [name for name in FLOAT_WEIGHTS if hasattr(layer_of(quantized), name)]
        yield ModuleCall(
            target=target,
            quantized=quantized,
            original=original,
            floating=module,
            weights={name: partial(FLOAT_WEIGHTS[name], layer_of(module)) for name in names},
        )
