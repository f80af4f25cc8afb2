"""Which values of a graph are float tensors, and which arguments can never be (rule OBS-10). Tables, not analysis."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from refimpl.tracing import attribute_of, tensor_inputs

# Methods and functions whose result is no float tensor, whatever goes in.
NOT_A_TENSOR: frozenset[Any] = frozenset(
    {"size", "dim", "numel", "stride", "item", "tolist", "shape", "ndimension", "type", "get_device", "is_contiguous",
     "eq", "ne", "lt", "gt", "le", "ge", "bool", "int", "long", "argmax", "argmin",
     len, isinstance, torch.is_tensor, operator.eq, operator.ne, operator.lt, operator.gt, operator.le, operator.ge,
     torch.eq, torch.ne, torch.lt, torch.gt, torch.le, torch.ge, torch.argmax, torch.argmin}
)  # fmt: skip

# Callees that return (values, indices): the second is never observed.
_VALUES_AND_INDICES: frozenset[Any] = frozenset(
    {"topk", "sort", "mode", "kthvalue", "cummax", "cummin",
     torch.topk, torch.sort, torch.mode, torch.kthvalue, torch.cummax, torch.cummin}
)  # fmt: skip
_VALUES_AND_INDICES_BY_DIM: frozenset[Any] = frozenset({"max", "min", "median", torch.max, torch.min, torch.median})

# Callees that return a tuple of tensors.
_SEVERAL: frozenset[Any] = frozenset(
    {"chunk", "split", "unbind", "tensor_split", torch.chunk, torch.split, torch.unbind, torch.tensor_split}
)

_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real"})

# Callees of which only the first argument is a float tensor: the others are sizes, dims, indices, masks or fill values.
FIRST_ARGUMENT_ONLY: frozenset[Any] = frozenset(
    {"view", "reshape", "permute", "transpose", "repeat", "repeat_interleave", "squeeze", "squeeze_", "unsqueeze",
     "unsqueeze_", "expand", "resize_", "mean", "sum", "narrow", "masked_fill", "masked_fill_", "index_select",
     "gather", "clamp", "chunk", "split", "flatten", "contiguous", "detach", "detach_",
     torch.reshape, torch.permute, torch.transpose, torch.repeat_interleave, torch.squeeze, torch.unsqueeze,
     torch.mean, torch.sum, torch.narrow, torch.masked_fill, torch.index_select, torch.gather, torch.clamp,
     torch.chunk, torch.split, torch.flatten, operator.getitem, F.interpolate, F.dropout, operator.floordiv}
)  # fmt: skip


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
    if callee in NOT_A_TENSOR:
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
    arguments = first if _callee(node) in FIRST_ARGUMENT_ONLY else (node.args, node.kwargs)  # rule: OBS-10
    return [value for value in tensor_inputs(arguments) if value in floats and not gives_tuple(value, floats)]


def gives_tuple(node: Node, floats: set[Node]) -> bool:
    """Tell whether a node is a call that returns a tuple: it is no value to be observed, its elements are. (OBS-10)"""
    return _callee(node) in _SEVERAL or _is_pair(node, floats)


def _is_pair(node: Any, floats: set[Node]) -> bool:
    """Tell whether a call returns (values, indices): max(x, dim) does, max(x) and max(x, y) are tensors."""
    callee = _callee(node)
    if callee in _VALUES_AND_INDICES_BY_DIM:
        others = (*node.args[1:], *(value for name, value in node.kwargs.items() if name != "input"))
        return bool(others) and floats.isdisjoint(tensor_inputs(others))
    return callee in _VALUES_AND_INDICES


def _callee(node: Any) -> Any:
    """The function, or the name of the method, that a node calls; None for any other node, modules included."""
    return node.target if isinstance(node, Node) and node.op in ("call_function", "call_method") else None
