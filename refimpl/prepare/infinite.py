"""Values that are infinite stay float: no grid reaches them, and a clipped mask lets masked positions through. (OBS-18)

Masks of attention add -inf, or the smallest float32, to scores. Constants show it before anything runs, observers
afterwards.
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.graph.tracing import attribute_of
from fx_quant_conformance.refimpl.observers.qparams import INFINITE, is_infinite, may_have_seen_infinite, saw_infinite
from fx_quant_conformance.refimpl.prepare.plan import Plan

# Ops whose result holds what an operand holds.
_PASSING = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "neg",
        "mul",
        "div",
        "truediv",
        "masked_fill",
        "where",
        "full",
        "full_like",
        "fill",
        "cat",
        "concat",
        "stack",
        "getitem",
        "clone",
        "contiguous",
        "to",
        "float",
        "type_as",
        "dropout",
        "tril",
        "triu",
        "view",
        "reshape",
        "permute",
        "transpose",
        "expand",
        "expand_as",
        "repeat",
        "unsqueeze",
        "squeeze",
        "flatten",
    }
)


def find_infinite_values(model: GraphModule) -> set[Node]:
    """Return the values that parameters, buffers or numbers make infinite. (OBS-18)"""
    infinite: set[Node] = set()
    for node in model.graph.nodes:
        if node.op == "get_attr":
            value = attribute_of(model, str(node.target))
            if isinstance(value, Tensor) and value.is_floating_point() and is_infinite(value):
                infinite.add(node)
        elif (_has_infinite_number(node) or not infinite.isdisjoint(node.all_input_nodes)) and _is_passing(node):
            infinite.add(node)
    return infinite


def _is_passing(node: Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and str(getattr(node.target, "__name__", node.target)) in _PASSING


def _has_infinite_number(node: Node) -> bool:
    return any(isinstance(each, float) and abs(each) >= INFINITE for each in (*node.args, *node.kwargs.values()))


def find_infinite_matches(prepared: GraphModule, plan: Plan) -> dict[str, str]:
    """Return the last nodes of quantized matches that saw an infinite value in calibration, with reasons. (OBS-18)"""
    modules = prepared._modules  # packages keep one name
    slots = [slot for slot in plan.slots if slot.role != "weight" and slot.name in modules]
    if not may_have_seen_infinite([modules[slot.name] for slot in slots]):
        return {}
    seen = {slot.name: slot.value for slot in slots if saw_infinite(modules[slot.name])}
    nodes = {node.name: node for node in prepared.graph.nodes}
    found: dict[str, str] = {}
    for decision in plan.decisions:
        around = [value for name in decision.nodes for value in nodes[name].all_input_nodes]
        around += nodes[decision.node].users
        values = [seen[str(node.target)] for node in around if node.op == "call_module" and str(node.target) in seen]
        if decision.is_quantized and values:
            found[decision.node] = f"OBS-18: {values[0]} is infinite in calibration"  # rule: OBS-18
    return found
