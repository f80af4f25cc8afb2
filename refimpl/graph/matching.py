"""Matching patterns in a graph, from the output backwards, in time linear in its nodes (rules PAT-03 to PAT-09)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fx_quant_conformance.refimpl.config.backend_config import BackendPatternConfig
from fx_quant_conformance.refimpl.config.forms import Form, coerce, instance_of
from fx_quant_conformance.refimpl.config.patterns import Pattern, is_match_all, leaves, pattern_name
from fx_quant_conformance.refimpl.errors import ConfigError, blame
from fx_quant_conformance.refimpl.graph.tracing import CALLS, Places, positional_arguments_of

Nested: TypeAlias = Any  # a Node, or a tuple (Node, Nested, …) in the shape of the normal form

_ROOT = instance_of(Node, "a node of the match")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A pattern found in the graph."""

    entry: BackendPatternConfig
    nodes: tuple[Node, ...]
    """The claimed nodes in forward order (arguments first)."""
    nested: Nested
    """Matched nodes in the shape of the normal form, wildcards included, as root_node_getter and extra_inputs_getter
    take it."""
    root: Node
    """The node whose module or weight is quantized. (FUS-03)"""

    @property
    def last(self) -> Node:
        """The node whose value is the pattern's output."""
        return self.nodes[-1]

    @property
    def name(self) -> str:
        """The pattern's readable name."""
        return pattern_name(self.entry.normal_pattern)


def find_matches(graph: Graph, places: Places, entries: Iterable[BackendPatternConfig]) -> list[Match]:
    """Match entries in a graph; the result is in graph order of the last nodes. (PAT-07)

    Of several patterns that match at a node, the one with most leaves wins, then the earlier registered one; a node
    belongs to one match at most.
    """
    table: dict[Any, list[tuple[Pattern, BackendPatternConfig]]] = defaultdict(list)  # by the leaf a pattern ends in
    candidates = [(entry.normal_pattern, entry) for entry in entries]
    for pattern, entry in sorted(candidates, key=lambda candidate: -len(list(leaves(candidate[0])))):  # rule: PAT-07
        table[pattern[0] if isinstance(pattern, tuple) else pattern].append((pattern, entry))
    matched: set[Node] = set()
    matches: list[Match] = []
    for node in reversed(graph.nodes):  # rule: PAT-07
        for pattern, entry in () if node in matched else table.get(places.object_type_of(node), ()):
            claimed: list[Node] = []
            nested = _descend(node, pattern, places, claimed)
            if nested is not None and matched.isdisjoint(claimed):
                root, getter = claimed[0], entry._root_node_getter
                if getter is not None:  # rule: FUS-03
                    root = run_getter(getter, "root node getter", entry, nested, _ROOT)
                    if root not in claimed:
                        name = pattern_name(entry.normal_pattern)
                        raise ConfigError(f"root node getter of {name}: it gives {root.name!r}, which is not matched")
                matches.append(Match(entry=entry, nodes=tuple(claimed), nested=nested, root=root))
                matched.update(claimed)
                break
    return matches[::-1]


def run_getter(getter: Callable[[Any], Any], what: str, entry: BackendPatternConfig, nested: Nested, form: Form) -> Any:
    """Return the result of an entry's getter for a match. Raises ConfigError if it fails, or has another form."""
    where = f"{what} of {pattern_name(entry.normal_pattern)}"
    with blame(ConfigError, where, "it"):
        value = getter(nested)
    return coerce(ConfigError, where, form, value)


def count_reads(node: Node) -> int:
    """Count the arguments that a node is, of all its users. (PAT-06)"""
    leaves: list[Node] = []
    for user in node.users:
        map_arg((user.args, user.kwargs), leaves.append)
    return leaves.count(node)


def _descend(
    node: Any, pattern: Pattern, places: Places, claimed: list[Node], *, is_inner: bool = False
) -> Nested | None:
    """Match one node and, recursively, its arguments; append claimed nodes in forward order. None: no match."""
    if is_match_all(pattern):
        return node  # rule: PAT-05, PAT-09
    if not isinstance(node, Node) or node.op not in CALLS or node in claimed:
        return None
    if is_inner and count_reads(node) != 1:  # rule: PAT-06
        return None
    head, *inner = pattern if isinstance(pattern, tuple) else (pattern,)
    if places.object_type_of(node) != head:
        return None  # rule: PAT-03
    parts: list[Nested] = []
    if inner:
        arguments = positional_arguments_of(node, at_least=len(inner))
        if len(arguments) != len(inner):  # rule: PAT-04
            return None
        for argument, part in zip(arguments, inner, strict=True):
            nested = _descend(argument, part, places, claimed, is_inner=True)
            if nested is None and not is_match_all(part):  # a wildcard matches the argument None too
                return None
            parts.append(nested)
    claimed.append(node)
    return (node, *parts) if parts else node
