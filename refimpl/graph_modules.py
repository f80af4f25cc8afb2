"""The graph modules of the passes: one that they work on, and one that they return."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import count
from typing import Any
from weakref import ref

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


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


class Draft(_Owner):
    """A GraphModule on its way through the passes: it makes no code.

    Modules and tensors are shared with its source; the containers that hold them are its own.
    """

    origin: str  # class name of the source model

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
    owner = model.get_submodule(scope)
    for number in count():
        name = f"{prefix}{number}"
        if not hasattr(owner, f"{start}{number}") and name not in taken:  # rule: TRC-02
            yield name


def free_name(model: nn.Module, name: str, taken: Container[str] = ()) -> str:
    """Return a name if no attribute of a model has it, else the first numbered one that is free. (TRC-02)"""
    is_free = not hasattr(model, name) and name not in taken
    return name if is_free else next(free_names(model, f"{name}_", taken))
