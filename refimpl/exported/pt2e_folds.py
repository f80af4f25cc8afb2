"""Which batch norms torchao folds into which layers of an exported program, and who reads what it changes there.

``prepare_pt2e`` folds a batch norm into the convolution or linear layer that it reads. ``prepare_qat_pt2e`` writes
convolutions and batch norms again, and ``convert_pt2e`` folds these. Here the same ones are found, and none is folded.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.exported.calls import arguments_of
from fx_quant_conformance.refimpl.graph.tracing import attribute_of

_READS_FORM = {
    "_assert_tensor_metadata": "a",
    "empty_like": "self",
    "expand_as": "other",
    "full_like": "self",
    "new_empty": "self",
    "new_full": "self",
    "new_ones": "self",
    "new_zeros": "self",
    "ones_like": "self",
    "rand_like": "self",
    "randn_like": "self",
    "reshape_as": "other",
    "sym_numel": "self",
    "sym_size": "self",
    "sym_stride": "self",
    "type_as": "other",
    "view_as": "other",
    "zeros_like": "self",
}
"""Ops, each with the argument of which it reads shape, dtype and device, and no number."""


class Readers:
    """Says who reads which value of a program. What leads to no result does not count: torchao takes it away."""

    def __init__(self, program: GraphModule) -> None:
        self.program = program
        self.nodes: list[Node] = list(program.graph.nodes)
        self.live: set[Node] = set()
        for node in reversed(self.nodes):
            if node.op == "output" or node.is_impure() or not self.live.isdisjoint(node.users):
                self.live.add(node)
        self._holders: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.op == "get_attr":
                self._holders.setdefault(str(node.target), []).append(node)

    def list_users(self, value: Node) -> list[Node]:
        """List what takes a value."""
        return [user for user in value.users if user in self.live]

    def list_readers(self, *values: Node) -> list[Node]:
        """List what reads the numbers of values."""
        return [user for value in values for user in self.list_users(value) if _reads_numbers(user, value)]

    def list_tensor_readers(self, target: str) -> list[Node]:
        """List what reads the numbers of a tensor that the program holds."""
        return self.list_readers(*self._holders.get(target, ()))

    def find_tensor(self, target: str) -> Any:
        """Return a tensor that the program holds; None: it holds none of that name."""
        try:
            return attribute_of(self.program, target)
        except AttributeError:
            return None


def _reads_numbers(user: Node, value: Node) -> bool:
    names = {name for name, argument in arguments_of(user).items() if argument is value}
    return names != {_READS_FORM.get(name_op(user))}


def name_op(node: Node) -> str:
    """Return the name of an op without its overload; "" for what is no op."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name).rpartition("::")[2]


TRANSPOSED = {"aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"}
_CONVOLUTIONS = {f"aten.conv{rank}d.{kind}" for rank in (1, 2, 3) for kind in ("default", "padding")} | TRANSPOSED
_TRAINED = {
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
}
LINEAR = "aten.linear.default"
_NORM = "aten.batch_norm.default"
_NORMS = {_NORM, "aten._native_batch_norm_legit_no_training.default"}  # the second: of a functional program


class NormFold(NamedTuple):
    """A batch norm that torchao folds into a layer."""

    layer: Node
    norm: Node
    is_chained: bool = False
    """Whether it reads one that is folded into the same layer."""


def list_folds(readers: Readers) -> list[NormFold]:
    """List what prepare_pt2e folds, convolutions first. A norm's readers then read the layer: so is a second norm."""
    folds: list[NormFold] = []
    layers: dict[Any, Node] = {}  # folded norm → layer
    for is_layer in (_is_convolution, _is_folded_linear):
        for norm in (node for node in readers.nodes if str(node.target) in _NORMS):
            value = arguments_of(norm)["input"]
            if value.target is operator.getitem and value.args[1] == 0:
                value = value.args[0]
            layer = layers.get(value, value)
            is_removed = norm not in readers.live and (folds or is_layer is _is_folded_linear)  # with other dead code
            if is_layer(layer) and not is_removed:
                layers[norm] = layer
                folds.append(NormFold(layer, norm, value in layers))
    return folds


def _is_convolution(node: Node) -> bool:
    return str(node.target) in _CONVOLUTIONS


def _is_folded_linear(node: Node) -> bool:
    """Tell whether a node is a linear layer whose input has at most two axes: torchao leaves the others alone."""
    if str(node.target) != LINEAR:
        return False
    value = arguments_of(node)["input"].meta.get("val")
    return not isinstance(value, Tensor) or value.dim() <= 2


def list_trained_folds(readers: Readers) -> list[NormFold]:
    """List what prepare_qat_pt2e makes trainable, so that convert_pt2e folds it: a norm alone takes the layer."""
    norms = [node for node in readers.nodes if str(node.target) == _NORM and node in readers.live]
    folds = [NormFold(arguments_of(norm)["input"], norm) for norm in norms]
    return [
        fold for fold in folds if str(fold.layer.target) in _TRAINED and readers.list_users(fold.layer) == [fold.norm]
    ]


def group_folds(folds: Sequence[NormFold], is_qat: bool) -> dict[NormFold, list[NormFold]]:
    """Return, for each fold, those of its weight: prepare_pt2e folds the first of them, convert_pt2e each by itself."""
    groups: dict[Any, list[NormFold]] = {}
    keys = {fold: fold if is_qat else arguments_of(fold.layer).get("weight") for fold in folds}
    for fold in folds:
        groups.setdefault(keys[fold], []).append(fold)
    return {fold: groups[keys[fold]] for fold in folds}


def order_nodes(program: GraphModule, *, is_qat: bool) -> dict[Node, float]:
    """Return each node's place in the graph whose annotations torchao reads.

    In QAT a convolution and its batch norm are written again before, right in front of what reads the norm.
    """
    order: dict[Node, float] = {node: index for index, node in enumerate(program.graph.nodes)}
    for layer, norm, _ in list_trained_folds(Readers(program)) if is_qat else ():
        order[layer] = min(order[user] for user in norm.users) - 0.5
    return order
