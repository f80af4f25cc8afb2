"""Matching patterns in a graph, from the output backwards (rules PAT-03 to PAT-09).

Candidates are found by a table from a node's object type to the patterns that end in it, so that the cost of a pass is
linear in the number of nodes, however many patterns a config has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import Graph, Node

from refimpl.backend_config import BackendPatternConfig
from refimpl.patterns import Pattern, is_match_all, leaves, pattern_name
from refimpl.tracing import Places, positional_arguments

Nested: TypeAlias = Any  # a Node, or a tuple (Node, Nested, …) in the shape of the normal form


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A pattern found in the graph.

    ``nodes``: the claimed nodes in forward order (arguments first). ``nested``: matched nodes in the shape of the
    normal form, wildcards included, as root_node_getter and extra_inputs_getter take it. ``root``: the node whose
    module or weight is quantized (FUS-03).
    """

    entry: BackendPatternConfig
    nodes: tuple[Node, ...]
    nested: Nested
    root: Node

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
    table = _candidates(entries)
    taken: set[Node] = set()
    found: list[Match] = []
    for node in reversed(graph.nodes):  # rule: PAT-07
        if node in taken or node.op not in ("call_module", "call_function", "call_method"):
            continue
        for pattern, entry in table.get(places.object_type(node), ()):
            match = _match(node, pattern, entry, places, taken)
            if match is not None:
                taken.update(match.nodes)
                found.append(match)
                break
    return found[::-1]


def _candidates(entries: Iterable[BackendPatternConfig]) -> dict[Any, list[tuple[Pattern, BackendPatternConfig]]]:
    """Group entries by the leaf that their patterns end in, best first."""
    table: dict[Any, list[tuple[Pattern, BackendPatternConfig]]] = defaultdict(list)
    for entry in entries:
        pattern = entry.normal_pattern
        table[pattern[0] if isinstance(pattern, tuple) else pattern].append((pattern, entry))
    for candidates in table.values():
        candidates.sort(key=lambda candidate: -sum(1 for _ in leaves(candidate[0])))  # rule: PAT-07
    return table


def _match(node: Node, pattern: Pattern, entry: BackendPatternConfig, places: Places, taken: set[Node]) -> Match | None:
    claimed: list[Node] = []
    nested = _descend(node, pattern, places, claimed)
    if nested is None or not taken.isdisjoint(claimed):
        return None
    getter = entry._root_node_getter
    root = claimed[0] if getter is None else getter(nested)  # rule: FUS-03
    return Match(entry=entry, nodes=tuple(claimed), nested=nested, root=root)


def _descend(
    node: Any, pattern: Pattern, places: Places, claimed: list[Node], *, is_inner: bool = False
) -> Nested | None:
    """Match one node and, recursively, its arguments; append what is claimed in forward order. None: no match."""
    if is_match_all(pattern):
        return node  # rule: PAT-05, PAT-09
    if not isinstance(node, Node) or (is_inner and len(node.users) != 1):  # rule: PAT-06
        return None
    head, *inner = pattern if isinstance(pattern, tuple) else (pattern,)
    if node.op not in ("call_module", "call_function", "call_method") or places.object_type(node) != head:
        return None  # rule: PAT-03
    parts: list[Nested] = []
    if inner:
        arguments = positional_arguments(node, at_least=len(inner))
        if len(arguments) != len(inner):  # rule: PAT-04
            return None
        for argument, part in zip(arguments, inner, strict=True):
            found = _descend(argument, part, places, claimed, is_inner=True)
            if found is None:
                return None
            parts.append(found)
    claimed.append(node)
    return (node, *parts) if parts else node
