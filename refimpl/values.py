"""Which values of a graph are float tensors, and which arguments can never be (rule OBS-10).

The dtypes that a run of the example inputs gave decide; where there are none, tables do, forwards from what makes a
value and backwards from what takes it as a mask or as indices.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.ao.nn.quantizable as nnqa
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from refimpl.tracing import attribute_of, tensor_inputs


def _spelled(*names: str) -> frozenset[Any]:
    """The callees of these names: methods, also in place, and functions of torch."""
    functions = (getattr(torch, name, None) for name in names)
    return frozenset({*names, *(f"{name}_" for name in names), *filter(callable, functions)})


_COMPARISONS = ("eq", "ne", "lt", "gt", "le", "ge")

# Callees whose result is no float tensor, whatever goes in.
_NO_TENSOR = (
    _spelled("size", "dim", "numel", "stride", "item", "tolist", "shape", "ndimension", "type", "get_device")
    | _spelled("is_contiguous", "bool", "int", "long", "argmax", "argmin", "is_tensor", *_COMPARISONS)
    | {len, isinstance, *(getattr(operator, name) for name in _COMPARISONS)}
)

# Callees that return (values, indices), of which the second is never observed; some only when they are given a dim.
_PAIRS = _spelled("topk", "sort", "mode", "kthvalue", "cummax", "cummin")
_PAIRS_BY_DIM = _spelled("max", "min", "median")

# Callees that return a tuple of tensors.
_SEVERAL = _spelled("chunk", "split", "unbind", "tensor_split")

_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real"})

# Callees of which only the first argument is a float tensor: the others are sizes, dims, indices, masks or fill values.
_FIRST_ARGUMENT_ONLY = (
    _spelled("view", "reshape", "permute", "transpose", "repeat", "repeat_interleave", "squeeze", "unsqueeze", "expand")
    | _spelled("resize", "mean", "sum", "narrow", "masked_fill", "index_select", "gather", "clamp", "chunk", "split")
    | _spelled("flatten", "contiguous", "detach")
    | {operator.getitem, operator.floordiv, F.interpolate, F.dropout}
)


# Callees that take masks or indices: where these stand, or None for all arguments; and modules whose input is indices.
_BITS = _spelled("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_and", "logical_or", "logical_not")
_NO_FLOATS: Mapping[Any, tuple[int, ...] | None] = {
    **dict.fromkeys(_spelled("masked_fill", "masked_select"), (1,)),
    **dict.fromkeys(_spelled("index_select", "gather", "index_add", "scatter", "index_fill"), (2,)),
    **dict.fromkeys((torch.where, F.embedding), (0,)),
    **dict.fromkeys((operator.getitem, F.embedding_bag), (1,)),
    **dict.fromkeys(_BITS, None),
    **dict.fromkeys((operator.and_, operator.or_, operator.xor, operator.invert), None),
}
_TAKES_INDICES = (nn.Embedding, nn.EmbeddingBag)

# Modules that return tuples; of those of an LSTM the second element is one again.
_LSTMS = (nn.LSTM, nnqa.LSTM)
_GIVE_TUPLES = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention, nnqa.LSTM, nnqa.MultiheadAttention)

# Callees whose result has the dtype of the first argument: what is known of the one is known of the other.
_KEEPS_DTYPE = (
    _spelled("view", "reshape", "permute", "transpose", "repeat", "repeat_interleave", "squeeze", "unsqueeze", "expand")
    | _spelled("narrow", "index_select", "gather", "chunk", "split", "flatten", "contiguous", "detach", "clone", "t")
    | {operator.getitem}
)


class Floats(set[Node]):
    """The nodes whose value is (or may be) a float tensor, or a tuple of them; ``tuples`` has the latter. (OBS-10)"""

    def __init__(self) -> None:
        super().__init__()
        self.tuples: set[Node] = set()


def float_tensors(model: GraphModule, dtypes: Mapping[Node, torch.dtype] | None = None) -> Floats:
    """Return the nodes whose value is (or may be) a float tensor, or a tuple of them. (OBS-10)

    `dtypes`: of all tensors that a run of the example inputs gave; None or empty: there was no run.
    """
    known, others = dtypes or {}, set(_no_floats(model))
    found = Floats()
    for node in model.graph.nodes:
        if known[node].is_floating_point if node in known else node not in others and _is_float(node, model, found):
            found.add(node)
            if node not in known and _is_tuple(node, model, found, was_run=bool(known)):
                found.tuples.add(node)
    return found


def _is_tuple(node: Node, model: GraphModule, known: Floats, *, was_run: bool) -> bool:
    """Tell whether a module, or what takes a tuple apart, gives a tuple; a run that saw no tensor there says so."""
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, Node) or (source is not node and source not in known.tuples):
        return False
    if was_run:
        return node.op == "call_module" or source is not node
    kinds = _GIVE_TUPLES if source is node else _LSTMS if node.args[1] in (1, -1) else ()
    return source.op == "call_module" and isinstance(model.get_submodule(str(source.target)), kinds)


def _no_floats(model: GraphModule) -> Iterator[Node]:
    """Yield what is taken as a mask or as indices, and what that was made from by moving values. (OBS-10)"""
    found: set[Node] = set()
    for node in reversed(model.graph.nodes):
        callee = _callee(node)
        if node.op == "call_module" and isinstance(model.get_submodule(str(node.target)), _TAKES_INDICES):
            found.update(tensor_inputs(node.args))
        elif callee in _NO_FLOATS:
            at = _NO_FLOATS[callee]
            taken = node.args if at is None else [node.args[index] for index in at if index < len(node.args)]
            found.update(tensor_inputs((taken, node.kwargs.get("mask"), node.kwargs.get("index"))))
        if node in found:
            yield node
            if callee in _KEEPS_DTYPE:
                found.update(tensor_inputs(node.args[:1]))


def _is_float(node: Node, model: GraphModule, known: set[Node]) -> bool:
    if node.op in ("placeholder", "call_module"):
        return True
    if node.op == "get_attr":
        value = attribute_of(model, str(node.target))
        return isinstance(value, torch.Tensor) and value.is_floating_point()
    callee = _callee(node)
    if callee in _NO_TENSOR:
        return False
    if callee in (getattr, operator.getitem):
        source, key = node.args[:2]
        if _is_pair(source, known):
            return source in known and key in ("values", 0, -2)
        return source in known and (callee is operator.getitem or key in _TENSOR_ATTRIBUTES)
    return callee is not None and any(value in known for value in tensor_inputs((node.args, node.kwargs)))


def observable_inputs(node: Node, floats: Floats) -> list[Node]:
    """Return the inputs of a node that are float tensors, in order, without repeats. (OBS-10)

    A tuple that a call returned and that is passed on whole is none.
    """
    first = node.args[:1] or (node.kwargs.get("input"),)  # rule: PAT-08
    arguments = first if _callee(node) in _FIRST_ARGUMENT_ONLY else (node.args, node.kwargs)  # rule: OBS-10
    return [value for value in tensor_inputs(arguments) if value in floats and not gives_tuple(value, floats)]


def gives_tuple(node: Node, floats: Floats) -> bool:
    """Tell whether a node is a call that returns a tuple: it is no value to be observed, its elements are. (OBS-10)"""
    return node in floats.tuples or _callee(node) in _SEVERAL or _is_pair(node, floats)


def _is_pair(node: Any, floats: set[Node]) -> bool:
    """Tell whether a call returns (values, indices): max(x, dim) does, max(x) and max(x, y) are tensors."""
    callee = _callee(node)
    if callee in _PAIRS_BY_DIM:
        others = (*node.args[1:], *(value for name, value in node.kwargs.items() if name != "input"))
        return bool(others) and floats.isdisjoint(tensor_inputs(others))
    return callee in _PAIRS


def _callee(node: Any) -> Any:
    """The function, or the name of the method, that a node calls; None for any other node, modules included."""
    return node.target if isinstance(node, Node) and node.op in ("call_function", "call_method") else None
