"""The graph modules of the passes: one that they work on, and one that they return."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn
from torch.ao.nn.quantized.modules.conv import _ConvNd
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import reduce_graph_module
from torch.fx.node import map_arg


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
        """Save what the model has, and its code, which loading traces again; nodes keep their names. (CVT-12)"""
        _, (state, imports) = super().__reduce__()
        nodes = [(_key_of(node), node.name, _target_of(node), _save_meta(node)) for node in self.graph.nodes]
        return _load, (type(self).__name__, {**state, "_modules": _save_modules(self, {})}, imports, nodes)


def can_be_saved(value: object) -> bool:
    """Tell whether loading finds a class, or an annotation, again: not if it was made in a function. (CVT-12)"""
    try:
        pickle.dumps(value)
    except Exception:  # of several kinds
        return False
    return True


def _load(name: str, state: dict[str, Any], imports: str, nodes: list[tuple[Any, ...]]) -> FlowModule:
    """Return the model that was saved: with its class, names, notes and hooks, which fx's own loading loses."""
    traced: Any = reduce_graph_module(dict(state), imports)
    root = _restore(nn.Module, {key: value for key, value in state.items() if key != "_code"})
    model = FlowModule(root, _rename(traced.graph, nodes), class_name=name)
    model.__dict__.update(vars(root))  # rule: CVT-12
    return model


def _rename(graph: Graph, nodes: list[tuple[Any, ...]]) -> Graph:
    """Copy a graph that was traced again, with the names that nodes and modules had, by which a plan knows them."""
    named = Graph(tracer_cls=graph._tracer_cls)
    named._codegen = graph._codegen
    saved: defaultdict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for key, *row in reversed(nodes):
        saved[key].append(tuple(row))
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        rows = saved[_key_of(node)] or [(None, None, {})]
        name, target, meta = rows.pop()
        args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = named.create_node(node.op, target or node.target, args, kwargs, name, node.type)
        copies[node].meta = meta
    return named


def _key_of(node: Node) -> tuple[str, str | None]:
    """Return what a node has in common with the same one in another trace; equal ones come in the same order."""
    return node.op, _target_of(node) if node.op == "get_attr" else None


def _target_of(node: Node) -> str | None:
    return node.target if isinstance(node.target, str) else None


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
        if isinstance(part, _ConvNd):
            saved[part] = _SavedConv(part)
        elif part is not None and any(isinstance(inner, _ConvNd) for inner in part.modules()):
            saved[part] = type(part).__new__(type(part))
            saved[part].__dict__.update({**vars(part), "_modules": _save_modules(part, saved)})
    return {name: saved.get(part, part) for name, part in module._modules.items()}


class _SavedConv:
    """A quantized convolution as it is saved: with torch's own ``__setstate__`` it cannot be loaded (finding 100)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restore, (type(self.module), self.module.__dict__)


def _restore(kind: type[nn.Module], attributes: dict[str, Any]) -> nn.Module:
    module = kind.__new__(kind)
    module.__dict__.update(attributes)
    return module


class Draft(_Owner):
    """A GraphModule on its way through the passes: it makes no code.

    Modules and tensors are shared with its source; the containers that hold them are its own.
    """

    origin: str  # class name of the source model

    def recompile(self) -> Any:
        """Do nothing: a draft is not run."""
