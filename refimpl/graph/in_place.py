"""Writes in place become values: what a graph computes no longer depends on who shares memory with whom. (TRC-01)

Later passes put observers, quantize and dequantize between a value and its readers, where a write into memory reaches
nobody. Here each write gets a value, and what reads that memory later reads the value.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.graph_modules import Draft
from fx_quant_conformance.refimpl.graph.tracer import IN_PLACE, trace
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, is_effect, line_of
from fx_quant_conformance.refimpl.graph.values import find_kinds, part_of


def _set_of(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Methods that change a tensor's shape or what autograd keeps of it, but no number; and methods that change neither.
_RESHAPES = _set_of("squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ detach_")
_KEEPS = _set_of("requires_grad_ share_memory_ rename_")
_RESIZES = _set_of("resize_ resize_as_ set_ as_strided_")  # what is behind the end is not known
# Methods whose name without the underscore is another op, or none.
_NO_TWIN = _set_of("bernoulli_ random_ uniform_ normal_ geometric_ exponential_ cauchy_ log_normal_")
_SETITEM = frozenset({"setitem", "__setitem__"})
_AUGMENTED = {f"__i{name}__": getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "pow")}

# Methods, and functions of torch, whose result is a view of their first argument, or a tuple of views.
_TUPLES = _set_of("chunk split unbind tensor_split hsplit vsplit dsplit")
_VIEWS = _TUPLES | _set_of(
    "view view_as transpose permute t swapaxes swapdims movedim moveaxis squeeze unsqueeze expand expand_as narrow "
    "select diagonal unfold unflatten detach"
)
_VIEWING_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real"})
# Those whose result is a view, the argument itself or a copy, by its layout, dtype or mode.
_SOMETIMES_VIEWS = _set_of(
    "reshape reshape_as flatten ravel contiguous to type type_as float double half bfloat16 cpu dropout"
)
_SOMETIMES_VIEWING_MODULES = (nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)


class _Step(NamedTuple):
    """A view of a value."""

    node: Node
    """The node that takes it."""
    is_sure: bool
    """Whether it shares memory whatever the layout is."""


_Path: TypeAlias = tuple[_Step, ...]


class _Memory(NamedTuple):
    """Where a value lies: in the memory of its owner, at the end of a path of views."""

    owner: Node
    path: _Path


def trace_values(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> Draft:
    """Trace a model, as `trace` does, to a graph in which each write in place is a value. (TRC-01)

    Raises ModelError for a model that cannot be traced, and for a write whose readers cannot be known.
    """
    draft = trace(model, leaf_names, leaf_classes)
    make_functional(draft)
    return draft


def make_functional(model: Draft) -> None:
    """Give each write in place a value, and let what reads the memory later read it, in place. (TRC-01)

    Raises ModelError, with the node and the line, where it depends on the layout whether a later reader is reached.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    writing = {node for node in model.graph.nodes if node.meta.pop(IN_PLACE, False) or writes(node, modules)}
    if writing:
        _Rewriter(model, writing).run()


def write_part(whole: Tensor, part: Any, *views: tuple[str, tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """Return a copy of `whole` in which a view has the values of `part`. (TRC-01)

    `views`: the views that lead to it, each (method, arguments, keywords); "getitem" and "getattr" take the place of a
    method. `part`: a tensor that can be broadcast to the view, or a number. Without views it is the whole.
    """
    copied = whole.clone()
    view: Any = copied
    for name, args, kwargs in views[:-1]:
        view = _take_view(view, name, args, kwargs)
    index: Any = ...
    if views and views[-1][0] == "getitem" and isinstance(view, Tensor):
        index = views[-1][1][0]  # an index that copies can be written to all the same
    elif views:
        view = _take_view(view, *views[-1])
    view[index] = part
    return copied


def _take_view(value: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "getitem":
        return value[args[0]]
    return getattr(value, args[0]) if name == "getattr" else getattr(value, name)(*args, **kwargs)


# -- what writes, and what is a view ----------------------------------------------------------------------------------


def writes(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Tell whether a node writes into the memory of a value that it is given."""
    if node.op == "call_module":
        return getattr(modules[str(node.target)], "inplace", False) is True
    if node.op not in ("call_method", "call_function"):
        return False
    name = _name_of(node)
    is_named = name.endswith("_") and not name.endswith("__") and name not in _KEEPS
    has_flag = node.kwargs.get("inplace") is True or isinstance(node.kwargs.get("out"), Node)
    return is_named or has_flag or name in _SETITEM or name in _AUGMENTED


def works_in_place(node: Node) -> bool:
    """Tell whether the schema of an op, such as aten's, says that it changes what it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _written_by(node: Node) -> Any:
    """Return the value into whose memory a node writes."""
    return node.kwargs.get("out") or _first_argument_of(node)


def _first_argument_of(node: Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _name_of(node: Node) -> str:
    """Return the name of the method or function that a node calls; "" for a module."""
    if node.op == "call_module":
        return ""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _is_tuple(node: Node) -> bool:
    return node.op in ("call_method", "call_function") and _name_of(node) in _TUPLES


def _find_view(model: Draft, node: Node, tensors: set[Node]) -> _Step | None:
    """Return the step from a node's first argument to its result, if that is, or may be, a view of it."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        return _Step(node, is_sure=False) if isinstance(module, _SOMETIMES_VIEWING_MODULES) else None
    if node.op not in ("call_method", "call_function"):
        return None
    name = _name_of(node)
    if node.target is getattr:
        return _Step(node, is_sure=True) if node.args[1] in _VIEWING_ATTRIBUTES else None
    if node.target is operator.getitem:
        indices = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        is_tensor = (isinstance(index, Node) and index in tensors for index in indices)
        copies = any(isinstance(index, (list, Tensor)) for index in indices) or any(is_tensor)
        return None if copies else _Step(node, is_sure=True)
    if node.op == "call_function" and node.target not in (getattr(torch, name, None), getattr(F, name, None)):
        return None
    name = name.removesuffix("_") if name in _RESHAPES else name
    return _Step(node, name in _VIEWS) if name in _VIEWS or name in _SOMETIMES_VIEWS else None


class _Write(NamedTuple):
    """A write: its node, and the value into whose memory it writes."""

    node: Node
    value: Node
    before: list[Node]
    """What that memory held."""
    updated: dict[Node, Node]
    """What that memory holds now."""

    def refusal(self, other: Node, unsure: Node) -> ModelError:
        """Return the error for a value of which nobody can say whether the write reaches it."""
        return ModelError(
            f"{self.node.name} writes in place into {self.value.name}{line_of(self.node)}, and {other.name} is read "
            f"later, which shares its memory or not, by the layout of {unsure.name}: use the result of an op that "
            "returns a new tensor, such as y = y.mul(2) for y.mul_(2), or clone() the value before"
        )


# -- rewriting --------------------------------------------------------------------------------------------------------


class _Rewriter:
    """Gives a graph's writes their values, in one sweep.

    ``tuples``: the values of several tensors, each with memory of its own, and their kinds; ``parts``: the reader of
    each of these. ``places``: of the values that share memory. ``sharing``: by owner, the values that hold what its
    memory holds at this point of the sweep. ``touched``: the nodes that share memory, or were added.
    """

    def __init__(self, model: Draft, writes: set[Node]) -> None:
        self.model, self.graph, self.writes = model, model.graph, writes
        kinds = find_kinds(model)
        self.tensors = set(kinds)
        self.tuples = {node: kind for node, kind in kinds.items() if isinstance(kind, tuple) and not _is_tuple(node)}
        self.parts: dict[tuple[Node, int], Node] = {}
        self.places: dict[Node, _Memory] = {}
        self.sharing: defaultdict[Node, list[Node]] = defaultdict(list)
        self.attributes: dict[str, Node] = {}
        self.touched: set[Node] = set()
        self.end: Node

    def run(self) -> None:
        """Visit each node of the graph as it was."""
        self._read_parts_once()
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                self._join(node, _Memory(self.attributes.setdefault(str(node.target), node), ()))
            elif node in self.writes and _written_by(node) in self.tensors:
                self._visit_write(node, _written_by(node))
            elif isinstance(source := _first_argument_of(node), Node) and node.op != "output":
                self._visit_reader(node, source)
        for node in reversed(self.graph.nodes):
            if node in self.touched and not node.users and node.op.startswith("call_") and not is_effect(node):
                self.graph.erase_node(node)

    def _read_parts_once(self) -> None:
        """Let one node read each part of a tuple: what another one reads is the same tensor."""
        for node in list(self.graph.nodes):
            source: Any = _first_argument_of(node) if node.target in (getattr, operator.getitem) else None
            part = part_of(node, self.tuples[source]) if source in self.tuples else None
            first = node if part is None else self.parts.setdefault((source, part), node)
            if first is not node:
                node.replace_all_uses_with(first)
                self.graph.erase_node(node)

    def _join(self, node: Node, place: _Memory) -> None:
        """Note that a value lies at a place, and holds what is there now."""
        self.places[node] = place
        self.touched.add(node)
        self.sharing[place.owner].append(node)

    def _place_of(self, value: Node) -> _Memory:
        if value not in self.places:
            self._join(value, _Memory(value, ()))
        return self.places[value]

    def _visit_reader(self, node: Node, source: Node) -> None:
        """Note where the result of a view lies."""
        if node.op == "call_module" and type(self.model.get_submodule(str(node.target))) is nn.Identity:
            self._join(node, self._place_of(source))
        elif source not in self.tuples and (step := _find_view(self.model, node, self.tensors)) is not None:
            place = self._place_of(source)
            self._join(node, _Memory(place.owner, (*place.path, step)))

    def _visit_write(self, node: Node, value: Node) -> None:
        """Let later readers of the memory read what the write leaves there."""
        place = self._place_of(value)
        before = self.sharing[place.owner]
        readers = {each: [user for user in each.users if node < user] for each in before}
        if _name_of(node) in _RESHAPES:  # of this value only: its memory stays as it is
            result = self._make_value(node, value) if readers[value] else node
            self._replace(value, result, readers[value])
            self._join(result, _Memory(place.owner, (*place.path, _Step(node, is_sure=True))))
            return
        whole: Any = _first_argument_of(place.owner)
        if whole in self.tuples and any(node < user and user not in self.parts.values() for user in whole.users):
            where = f"{node.name} writes in place into a part of {whole.name}{line_of(node)}"
            raise ModelError(f"{where}, which is read as a whole later: write to a clone() of the part")
        is_outside = place.owner.op == "get_attr" or (place.owner.op == "placeholder" and not node.users)
        if not is_outside and not any(readers.values()):
            self.sharing[place.owner] = []
            self._join(node, place)  # what reads the value reads this node
            return
        if _name_of(node) in _RESIZES:
            advice = "make a new tensor of that size in its place"
            raise ModelError(f"{node.name} resizes {value.name}, which is read later{line_of(node)}: {advice}")
        write = _Write(node, value, before, {})
        self.sharing[place.owner] = []
        write.updated[value] = self._make_value(node, value)  # rule: TRC-01
        self._join(write.updated[value], place)
        for other in sorted(filter(readers.__getitem__, before), key=self._depth_of):
            self._replace(other, self._update(other, write), readers[other])
        root = next((each for each in before if not self._depth_of(each)), None)
        is_outside |= place.owner.op == "placeholder"
        if is_outside and root is not None and all(step.is_sure for step in place.path):
            self._write_back(place.owner, self._update(root, write))

    def _depth_of(self, value: Node) -> int:
        return len(self.places[value].path)

    def _replace(self, value: Node, by: Node, readers: Iterable[Node]) -> None:
        for reader in readers:
            reader.replace_input_with(value, by)

    def _update(self, other: Node, write: _Write) -> Node:
        """Return what a value that shares memory with the written one holds after the write."""
        if other in write.updated:
            return write.updated[other]
        path, own = self.places[write.value].path, self.places[other].path
        common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(path, own, strict=False)))
        unsure = next((step.node for step in (*path[common:], *own[common:]) if not step.is_sure), None)
        if unsure is not None:
            raise write.refusal(other, unsure)
        if common == len(path):  # it, or a part of it
            made = self._repeat(write.updated[write.value], own[common:])
        elif common == len(own) and not _is_tuple(other):  # what it is a part of
            made = self._insert(write_part, (other, write.updated[write.value], *map(_spell, path[common:])))
        else:
            wholes = (each for each in write.before if not _is_tuple(each))
            around = (each for each in wholes if path[:common][: self._depth_of(each)] == self.places[each].path)
            base = max(around, key=self._depth_of, default=None)
            if base is None:
                raise write.refusal(other, other)
            made = self._repeat(self._update(base, write), own[self._depth_of(base) :])
        write.updated[other] = made
        if made not in self.places:
            self._join(made, self.places[other])
        return made

    # -- new nodes, each after those that were made before it

    def _insert(self, target: Any, args: tuple[Any, ...]) -> Node:
        """Add a call after the last node that was made."""
        with self.graph.inserting_after(self.end):
            call = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            made = call(target, args)
        made.meta = dict(self.end.meta)
        self._note(made)
        return made

    def _note(self, made: Node) -> None:
        self.end = made
        self.touched.add(made)
        self.tensors.add(made)

    def _repeat(self, value: Node, path: _Path) -> Node:
        """Take the views of a path of another value."""
        for step in path:
            source = _first_argument_of(step.node)
            with self.graph.inserting_after(self.end):
                value = self.graph.node_copy(step.node, {source: value}.get)
            self._note(value)
        return value

    def _write_back(self, owner: Node, value: Node) -> None:
        """Let the caller's tensor, or the model's, have the numbers too."""
        is_parameter = owner.op == "get_attr" and isinstance(attribute_of(self.model, str(owner.target)), nn.Parameter)
        memory = self._insert(getattr, (owner, "data")) if is_parameter else owner
        self._insert("copy_", (memory, value))

    def _make_value(self, node: Node, value: Node) -> Node:
        """Return a node that has what a write leaves in a value's memory: the node itself, where it can be changed."""
        name, self.end = _name_of(node), node
        if name in _SETITEM or name == "copy_":
            views: list[Any] = [("getitem", (node.args[1],), {})] if name in _SETITEM else []
            made = self._insert(write_part, (value, node.args[2 if views else 1], *views))
            node.replace_all_uses_with(made, lambda user: user is not made)
            self.graph.erase_node(node)
            return made
        twin = _AUGMENTED.get(name) or _find_twin(node)
        if twin is not None:
            node.op, node.target = "call_method" if isinstance(twin, str) else "call_function", twin
        elif name.endswith("_"):
            with self.graph.inserting_before(node):
                copied = self.graph.call_method("clone", (value,))
            node.replace_input_with(value, copied)
        flags = {"inplace": False} if "inplace" in node.kwargs else {}
        node.kwargs = {key: each for key, each in node.kwargs.items() if key != "out"} | flags
        return node


def _find_twin(node: Node) -> Any:
    """Return the method or function that does what one does in place, and returns a new tensor; None: there is none."""
    name = _name_of(node)
    twin = name.removesuffix("_")
    if twin == name or name in _NO_TWIN:
        return None
    if node.op == "call_method":
        return twin if hasattr(Tensor, twin) else None
    return next((getattr(owner, twin) for owner in (torch, F) if hasattr(owner, twin)), None)


def _spell(step: _Step) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a view in the form that `write_part` takes."""
    node: Any = step.node
    name = {getattr: "getattr", operator.getitem: "getitem"}.get(node.target, _name_of(node))
    return name, node.args[1:], {key: value for key, value in node.kwargs.items() if key != "input"}
