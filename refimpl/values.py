"""Which values of a graph are float tensors, and which arguments can never be (rule OBS-10). Tables, not analysis."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
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


def float_tensors(model: GraphModule) -> set[Node]:
    """Return the nodes whose value is (or may be) a float tensor, or a tuple of them. (OBS-10)"""
    found: set[Node] = set()
    for node in model.graph.nodes:
        if _is_float_tensor(node, model, found):
            found.add(node)
    return found


def _is_float_tensor(node: Node, model: GraphModule, known: set[Node]) -> bool:
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


def observable_inputs(node: Node, floats: set[Node]) -> list[Node]:
    """Return the inputs of a node that are float tensors, in order, without repeats. (OBS-10)

    A tuple that a call returned and that is passed on whole is none.
    """
    first = node.args[:1] or (node.kwargs.get("input"),)  # rule: PAT-08
    arguments = first if _callee(node) in _FIRST_ARGUMENT_ONLY else (node.args, node.kwargs)  # rule: OBS-10
    return [value for value in tensor_inputs(arguments) if value in floats and not gives_tuple(value, floats)]


def gives_tuple(node: Node, floats: set[Node]) -> bool:
    """Tell whether a node is a call that returns a tuple: it is no value to be observed, its elements are. (OBS-10)"""
    return _callee(node) in _SEVERAL or _is_pair(node, floats)


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
