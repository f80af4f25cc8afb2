"""Invariants of the graph after each pass, as a table. A bug or a config's callable that breaks one raises."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.errors import RefimplError
from fx_quant_conformance.refimpl.graph.tracing import is_observer
from fx_quant_conformance.refimpl.legacy.quantized_tensors import MAKERS


class InvariantError(RefimplError):
    """The graph that a pass produced breaks one of its invariants."""


def is_quantize(node: Any) -> bool:
    """Tell whether a node quantizes: a float tensor in, integers (or a quantized tensor) out."""
    if isinstance(node, Node) and node.op == "call_method":
        return node.target == "to" and torch.float16 in node.args  # the float16 form (CVT-04)
    target = getattr(node, "target", None)
    return target in MAKERS or _is_decomposed(target, "quantize")


def is_dequantize(node: Any) -> bool:
    """Tell whether a node dequantizes."""
    if isinstance(node, Node) and node.op == "call_method":
        return node.target == "dequantize"
    return _is_decomposed(getattr(node, "target", None), "dequantize")


def _is_decomposed(target: Any, verb: str) -> bool:
    is_ours = getattr(target, "namespace", None) == "quantized_decomposed"
    return is_ours and str(getattr(target, "_opname", "")).startswith(f"{verb}_per_")


def _lint(model: GraphModule) -> Iterator[str]:
    try:
        model.graph.lint()
    except (RuntimeError, ValueError) as error:
        yield str(error)


def find_observers(model: GraphModule) -> list[Node]:
    """Return the calls of the observers that prepare put in."""
    modules, calls = model._modules, model.graph.find_nodes(op="call_module")  # prepare adds them to the model itself
    return [node for node in calls if is_observer(str(node.target), modules.get(str(node.target)))]


def _find_orphans(model: GraphModule) -> Iterator[str]:
    for node in find_observers(model):
        if not node.users and len(node.all_input_nodes[0].users) > 1:  # others read the value past it
            yield f"observer {node.name} has no user"


def _find_left_observers(model: GraphModule) -> Iterator[str]:
    return (f"observer {node.name} was not converted" for node in find_observers(model))


def _find_dequantizes_of_floats(model: GraphModule) -> Iterator[str]:
    for node in filter(is_dequantize, model.graph.nodes):
        value: Any = node.args[0]
        comes_quantized = value.op in ("placeholder", "call_module") or value.target is operator.getitem
        if not comes_quantized and not is_quantize(value):
            yield f"{node.name} dequantizes {value}, which nothing quantized"


def _find_needless_quantizes(model: GraphModule) -> Iterator[str]:
    return (f"{node} quantizes for no user" for node in filter(is_quantize, model.graph.nodes) if not node.users)


class Invariant(NamedTuple):
    """A check that yields problems, its rule, and the passes after which it must yield none."""

    rule: str
    check: Callable[[GraphModule], Iterator[str]]
    passes: tuple[str, ...]


INVARIANTS = (
    Invariant("FUS-03", _lint, ("fuse", "prepare", "lower")),  # convert writes its graph in order
    Invariant("OBS-15", _find_orphans, ("prepare",)),
    Invariant("CVT-01", _find_left_observers, ("convert", "lower")),
    Invariant("CVT-01", _find_dequantizes_of_floats, ("convert",)),
    Invariant("CVT-06", _find_needless_quantizes, ("convert", "lower")),
)


def check_graph(model: GraphModule, after: str) -> None:
    """Raise InvariantError, naming the rule and the node, if the graph that a pass produced is not sound."""
    for invariant in INVARIANTS:
        if after in invariant.passes:
            for problem in invariant.check(model):
                raise InvariantError(f"after {after}: {invariant.rule}: {problem}")
