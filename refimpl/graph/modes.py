"""Constants of the mode: what a model in training and the same model in deployment differ in. (QAT-04)

Tracing runs forward in one mode, and `F.dropout(x, p, self.training)` leaves the constant True in the graph. A second
trace, in the other mode, tells such a constant from one that the user means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.graph_modules import Draft, ModeConstant, free_names
from fx_quant_conformance.refimpl.graph.in_place import trace_values
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, line_of, list_nodes

MODE_DIFFERENCE = "mode_difference"
"""The key of a model's notes that says at which node its graph differs between the modes; absent if it does not."""


def trace_modes(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> Draft:
    """Trace a model in its mode, as `trace_values` does; constants that the mode decides then follow it. (QAT-04)

    Where the other mode has other ops, the graph is that of the model's mode, and the notes say at which node.
    """
    draft = trace_values(model, leaf_names, leaf_classes)
    try:
        with _other_mode(model):
            other = trace_values(model, leaf_names, leaf_classes)
    except ModelError as error:
        draft.meta[MODE_DIFFERENCE] = f"in the other mode it cannot be traced: {error}"
        return draft
    _Comparison(draft, other).follow()
    return draft


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model in the mode that it is not in, without a call of theirs; restore each after."""
    before, mode = {module: module.training for module in model.modules()}, not model.training
    try:
        for module in before:
            module.training = mode
        yield
    finally:
        for module, own in before.items():
            module.training = own


@dataclass(frozen=True, slots=True)
class _Choice:
    """A constant of the model's own mode, and that of the other."""

    own: Any
    other: Any


class _Differs(Exception):
    """The arguments of two nodes differ in more than constants."""


class _Comparison:
    """Compares the graphs of a model in its two modes, and lets constants follow the mode."""

    def __init__(self, draft: Draft, other: Draft) -> None:
        self.draft, self.other = draft, other
        self.names = free_names(draft, "mode_constant_")
        self.of_choice: dict[str, str] = {}  # the modules by the text of their constants
        self.partners: dict[Node, Node] = {}

    def follow(self) -> None:
        """Change the draft; note the first node at which more differs than constants."""
        own, theirs = list(self.draft.graph.nodes), list(self.other.graph.nodes)
        self._find_partners(own, theirs)
        found = set(self.partners.values())
        differing = [node for node in own if not self._follow_node(node)]
        differing += (node for node in theirs if node not in found)
        if differing:
            self.draft.meta[MODE_DIFFERENCE] = f"{differing[0].name}{line_of(differing[0])}"

    def _find_partners(self, own: list[Node], theirs: list[Node]) -> None:
        """Pair the nodes that call the same, in order."""
        keys, other_keys = ([(node.op, _name_target(node)) for node in nodes] for nodes in (own, theirs))
        if keys == other_keys:
            self.partners = dict(zip(own, theirs, strict=True))
            return
        for at, to, size in SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks():
            self.partners.update(zip(own[at : at + size], theirs[to : to + size], strict=True))

    def _follow_node(self, node: Node) -> bool:
        """Let the constants of a node follow the mode; False, and nothing is changed, where more differs."""
        if (other := self.partners.get(node)) is None:
            return False
        if node.op == "get_attr":
            value, its = (attribute_of(model, str(n.target)) for model, n in ((self.draft, node), (self.other, other)))
            return value is its or (value.shape == its.shape and torch.equal(value, its))
        try:
            merged = self._merge((node.args, dict(node.kwargs)), (other.args, dict(other.kwargs)))
        except _Differs:
            return False
        with self.draft.graph.inserting_before(node):
            node.args, node.kwargs = map_aggregate(merged, self._call_choice)  # rule: QAT-04
        return True

    def _merge(self, own: Any, other: Any) -> Any:
        """Return an argument structure with a choice in the place of each constant that differs."""
        if isinstance(own, Node) or isinstance(other, Node):
            if not isinstance(own, Node) or self.partners.get(own) is not other:
                raise _Differs
            return own
        if isinstance(own, dict) and isinstance(other, dict) and own.keys() == other.keys():
            return {key: self._merge(value, other[key]) for key, value in own.items()}
        if isinstance(own, (tuple, list)) and isinstance(other, (tuple, list)) and len(own) == len(other):
            merged = [self._merge(*pair) for pair in zip(own, other, strict=True)]
            return tuple(merged) if isinstance(own, tuple) else merged
        if isinstance(own, slice) and isinstance(other, slice):
            return slice(*map(self._merge, _ends_of(own), _ends_of(other)))
        if list_nodes((own, other)):
            raise _Differs
        return own if type(own) is type(other) and (own == other or own != own) else _Choice(own, other)

    def _call_choice(self, value: Any) -> Any:
        """Return the call that gives a choice's constant of the mode; any other argument as it is."""
        if not isinstance(value, _Choice):
            return value
        if repr(value) not in self.of_choice:
            constants = (value.own, value.other) if self.draft.training else (value.other, value.own)
            name = self.of_choice[repr(value)] = next(self.names)
            self.draft.add_module(name, ModeConstant(*constants).train(self.draft.training))
        return self.draft.graph.call_module(self.of_choice[repr(value)])


def _name_target(node: Node) -> Any:
    """Return what a node calls or reads; a constant tensor has another name in each trace."""
    is_constant = node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
    return "" if is_constant else node.target


def _ends_of(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step
