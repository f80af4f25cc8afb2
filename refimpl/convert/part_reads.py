"""Reads of the inside of modules that are called as well: convert puts other modules in their places (rule TRC-03)."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.refimpl.graph.graph_modules import free_name
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, call_node
from fx_quant_conformance.refimpl.graph.values import gives_number


class PartReads:
    """Reads of parameters and buffers, also of those of called modules, as in ``x.to(self.layer.weight.dtype)``.

    ``numbers``: what the graph reads of them that is no tensor: dtypes, sizes, devices, and numbers made of these. They
    are known, so that the tensor need not be kept for them.
    """

    def __init__(self, model: GraphModule) -> None:
        self._model = model
        self._called = {str(node.target) for node in model.graph.find_nodes(op="call_module", sort=False)}
        self._names: dict[str, str] = {}
        self.numbers: dict[Node, Any] = {}
        values: dict[Node, Any] = {}
        for node in model.graph.nodes:
            if node.op == "get_attr":
                values[node] = attribute_of(model, str(node.target))
            elif self._is_known(node, values):
                value = call_node(model, node, values.__getitem__)
                if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    values[node] = self.numbers[node] = value  # rule: TRC-03

    def _is_known(self, node: Node, values: dict[Node, Any]) -> bool:
        """Tell whether a node gives a number that is computed of values that are known."""
        sources = node.all_input_nodes
        return bool(sources) and all(map(values.__contains__, sources)) and gives_number(node, self.numbers)

    def _is_inside(self, target: str) -> bool:
        """Tell whether a name is that of a part of a called module."""
        return any(target[:at] in self._called for at, letter in enumerate(target) if letter == ".")

    def name_of(self, target: str, taken: Container[str]) -> str:
        """Return the name that what is read has after convert: its own, or a free one if it is part of a module."""
        if self._is_inside(target) and target not in self._names:
            self._names[target] = free_name(self._model, target.replace(".", "_"), taken)  # rule: TRC-03
        return self._names.get(target, target)
