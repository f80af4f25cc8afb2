"""What must hold of the graph after each pass: a table of checks, run by fuse, prepare, convert and lower.

A broken invariant is a bug of refimpl (or of a callable in the config), so it raises at once instead of leaving a wrong
model behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from refimpl.errors import RefimplError

QUANTIZE = torch.quantize_per_tensor
QUANTIZE_PER_CHANNEL = torch.quantize_per_channel


class InvariantError(RefimplError):
    """The graph that a pass produced breaks one of its invariants."""


def is_quantize(node: Any) -> bool:
    """Tell whether a node quantizes: a float tensor in, integers (or a quantized tensor) out."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    return node.target in (QUANTIZE, QUANTIZE_PER_CHANNEL) or _decomposed_name(node).startswith("quantize_per_")


def is_dequantize(node: Any) -> bool:
    """Tell whether a node dequantizes."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_method":
        return node.target == "dequantize"
    return node.op == "call_function" and _decomposed_name(node).startswith("dequantize_per_")


def _decomposed_name(node: Node) -> str:
    target = node.target
    if getattr(target, "namespace", None) != "quantized_decomposed":
        return ""
    return str(getattr(target, "_opname", ""))


def _is_well_formed(model: GraphModule) -> Iterator[str]:
    try:
        model.graph.lint()
    except (RuntimeError, ValueError) as error:
        yield str(error)


def _no_orphan_observer(model: GraphModule) -> Iterator[str]:
    for node in model.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX) and not node.users:
            yield f"observer {node.name} has no user"


def _no_observer_left(model: GraphModule) -> Iterator[str]:
    for node in model.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX):
            yield f"observer {node.name} was not converted"


def _dequantize_has_quantize(model: GraphModule) -> Iterator[str]:
    for node in model.graph.nodes:
        if is_dequantize(node) and not is_quantize(node.args[0]):
            yield f"{node.name} dequantizes {node.args[0]}, which nothing quantized"


def _quantize_is_needed(model: GraphModule) -> Iterator[str]:
    for node in model.graph.nodes:
        if is_quantize(node) and not node.users:
            yield f"{node.name} quantizes for no user"


OBSERVER_PREFIX = "activation_post_process_"


class Invariant(NamedTuple):
    """A check, the rule that it stands for, and the passes after which it must hold."""

    rule: str
    check: Callable[[GraphModule], Iterator[str]]
    passes: tuple[str, ...]


INVARIANTS = (
    Invariant("FUS-03", _is_well_formed, ("fuse", "prepare", "convert", "lower")),
    Invariant("OBS-15", _no_orphan_observer, ("prepare",)),
    Invariant("CVT-01", _no_observer_left, ("convert", "lower")),
    Invariant("CVT-01", _dequantize_has_quantize, ("convert",)),
    Invariant("CVT-06", _quantize_is_needed, ("convert", "lower")),
)


def check_graph(model: GraphModule, after: str) -> None:
    """Raise InvariantError, naming the rule and the node, if the graph that a pass produced is not sound."""
    for invariant in INVARIANTS:
        if after in invariant.passes:
            for problem in invariant.check(model):
                raise InvariantError(f"after {after}: {invariant.rule}: {problem}")
