"""The graph modules of the passes: one that they work on, and one that they return."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pkgutil import resolve_name
from typing import Any
from weakref import ref

from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import _get_qualified_name, map_aggregate, map_arg

from fx_quant_conformance.refimpl.legacy.quantized_tensors import QuantizedConv


class _Owned(Graph):
    """A graph that does not keep its graph module alive: without that cycle a dropped model is freed at once."""

    _owner: Callable[[], GraphModule | None] | None = None

    @property
    def owning_module(self) -> GraphModule | None:
        """The graph module that last got the graph, while it lives."""
        return None if self._owner is None else self._owner()

    @owning_module.setter
    def owning_module(self, module: GraphModule | None) -> None:
        self._owner, self._owning_module = None if module is None else ref(module), None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": None}  # a weak reference cannot be pickled


class _Owner(GraphModule):
    """A graph module whose graph does not keep it alive."""

    @property
    def graph(self) -> Graph:
        """The graph of the code."""
        if self._graph.owning_module is None:  # another module that had the same graph is gone
            self._graph.owning_module = self
        return self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        if type(graph) is Graph:
            graph.__class__ = _Owned
        self._graph = graph
        graph.owning_module = self
        self.recompile()


class FlowModule(_Owner, _LazyGraphModule):
    """The passes' result: it makes its Python code, most of a graph module's cost, when it is first run or read."""

    __jit_unused_properties__ = [*GraphModule.__jit_unused_properties__, "code"]  # noqa: RUF012

    def _real_recompile(self) -> Any:
        """Make the code, and be called as any module is: of an error, fx's own way in prints what the traceback says.

        To print it, it imports torch's compiler, which takes longer than all else that a small model needs.
        """
        code = super()._real_recompile()
        del type(self).__call__
        return code

    def __prepare_scriptable__(self) -> GraphModule:
        self.real_recompile()
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Save what the model has, and its graph as it is: fx would save code, and trace it to load it. (CVT-12)"""
        places = {node: index for index, node in enumerate(self.graph.nodes)}
        state = {key: value for key, value in vars(self).items() if key != "_graph"}
        rows = [_save_node(node, places) for node in places]
        return _load, (type(self).__name__, {**state, "_modules": _save_modules(self, {})}, rows)


def can_be_saved(value: object) -> bool:
    """Tell whether loading finds a class, or an annotation, again: not if it was made in a function. (CVT-12)"""
    try:
        pickle.dumps(value)
    except Exception:  # of several kinds
        return False
    return True


def _load(name: str, state: dict[str, Any], rows: list[tuple[Any, ...]]) -> FlowModule:
    """Return the model that was saved: with its class, names, notes and hooks, which fx's own loading loses."""
    graph, nodes = Graph(), list[Node]()
    for op, target, arguments, node_name, kind, meta in rows:
        args, kwargs = map_aggregate(arguments, lambda arg: nodes[arg.place] if isinstance(arg, _SavedArg) else arg)
        target = resolve_name(target.name) if isinstance(target, _SavedName) else target
        nodes.append(graph.create_node(op, target, args, kwargs, node_name, kind))
        nodes[-1].meta = meta
    root = _restore(nn.Module, state)
    model = FlowModule(root, graph, class_name=name)
    model.__dict__.update(vars(root))  # rule: CVT-12
    return model


@dataclass(frozen=True)  # no tuple, which the arguments of a node may hold
class _SavedArg:
    """An argument that is the result of a node, by its place in the graph."""

    place: int


@dataclass(frozen=True)
class _SavedName:
    """A function that cannot be saved, such as one of ``torch.ops``, and is found by its name."""

    name: str


def _save_node(node: Node, places: Mapping[Node, int]) -> tuple[Any, ...]:
    arguments = map_arg((node.args, dict(node.kwargs)), lambda arg: _SavedArg(places[arg]))  # type: ignore[arg-type,return-value]
    target: Any = node.target
    if callable(target) and not can_be_saved(target):
        target = _SavedName(_get_qualified_name(target))
    return node.op, target, arguments, node.name, node.type, _save_meta(node)


def _save_meta(node: Node) -> dict[str, Any]:
    """Return what is saved of a node's meta: where it comes from, with nn.Module for a class that cannot be saved."""
    stack = node.meta.get("nn_module_stack") or {}
    scopes = {key: (name, kind if can_be_saved(kind) else nn.Module) for key, (name, kind) in stack.items()}
    return {"stack_trace": node.meta.get("stack_trace"), "nn_module_stack": scopes}


def _save_modules(module: nn.Module, saved: dict[nn.Module | None, Any]) -> dict[str, Any]:
    """Return what is saved in the place of a module's parts: copies that can be loaded, if they have convolutions."""
    for part in module._modules.values():
        if part in saved or isinstance(part, FlowModule):
            continue  # it saves itself
        if isinstance(part, QuantizedConv):
            saved[part] = _SavedConv(part)
        elif part is not None and any(isinstance(inner, QuantizedConv) for inner in part.modules()):
            saved[part] = type(part).__new__(type(part))
            saved[part].__dict__.update({**vars(part), "_modules": _save_modules(part, saved)})
    return {name: saved.get(part, part) for name, part in module._modules.items()}


class _SavedConv:
    """A quantized convolution as it is saved: with torch's own ``__setstate__`` it cannot be loaded (finding 109)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore, (type(self.module), self.module.__dict__)


def _restore(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = kind.__new__(kind)
    module.__dict__.update(attributes)
    return module


class Draft(_Owner):
    """A GraphModule on its way through the passes: it makes no code. Its class has the name of the source's.

    Modules and tensors are shared with its source; the containers that hold them are its own.
    """

    def recompile(self) -> Any:
        """Do nothing: a draft is not run."""


class ModeConstant(nn.Module):
    """A constant that follows the mode, as by ``self.training``: one in training, another in deployment. (QAT-04)"""

    def __init__(self, in_training: Any, in_deployment: Any) -> None:
        super().__init__()
        self.in_training, self.in_deployment = in_training, in_deployment

    def forward(self) -> Any:
        """Return the value of the mode that the module is in."""
        return self.in_training if self.training else self.in_deployment

    def extra_repr(self) -> str:
        """Return both values, as printed models show them."""
        return f"in_training={self.in_training}, in_deployment={self.in_deployment}"


def free_names(model: nn.Module, prefix: str, taken: Container[str] = ()) -> Iterator[str]:
    """Yield, in order, the numbered names with a prefix that no attribute of a model has, at any level. (TRC-02)

    `prefix`: with the path of the module that is to hold the attribute. `taken`: further names that are not free.
    """
    scope, _, start = prefix.rpartition(".")
    owner = model.get_submodule(scope) if scope else model
    for number in count():
        name = f"{prefix}{number}"
        if not _has(owner, f"{start}{number}") and name not in taken:  # rule: TRC-02
            yield name


def _has(owner: nn.Module, name: str) -> bool:
    """Tell whether a module has an attribute, as hasattr does, which takes longer where it has none."""
    if type(owner).__getattr__ is not nn.Module.__getattr__:
        return hasattr(owner, name)
    is_part = name in owner._modules or name in owner._buffers or name in owner._parameters
    return is_part or name in vars(owner) or hasattr(type(owner), name)


def free_name(model: nn.Module, name: str, taken: Container[str] = ()) -> str:
    """Return a name if no attribute of a model has it, else the first numbered one that is free. (TRC-02)"""
    is_free = not _has(model, name) and name not in taken
    return name if is_free else next(free_names(model, f"{name}_", taken))
