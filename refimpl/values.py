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
    {"topk", "sort", "max", "min", "median", "mode", "kthvalue", "cummax", "cummin",
     torch.topk, torch.sort, torch.max, torch.min, torch.median, torch.mode, torch.kthvalue, torch.cummax, torch.cummin}
)  # fmt: skip

# Callees that return a tuple of tensors: it is no value to be observed; its elements are.
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
    if node.op not in ("call_function", "call_method") or node.target in NOT_A_TENSOR:
        return False
    if node.target is getattr:
        return node.args[0] in known and node.args[1] in _TENSOR_ATTRIBUTES
    if node.target is operator.getitem:
        source: Any = node.args[0]
        is_pair = len(source.args) > 1 or source.kwargs  # max(x) is a tensor, max(x, dim) a pair
        return source in known and not (node.args[1] == 1 and source.target in _VALUES_AND_INDICES and is_pair)
    return any(value in known for value in tensor_inputs((node.args, node.kwargs)))


def observable_inputs(node: Node, floats: set[Node]) -> list[Node]:
    """Return the inputs of a node that are float tensors, in order, without repeats. (OBS-10)

    A tuple that a call returned and that is passed on whole is none.
    """
    first = node.args[:1] or (node.kwargs.get("input"),)  # rule: PAT-08
    arguments = first if node.target in FIRST_ARGUMENT_ONLY else (node.args, node.kwargs)  # rule: OBS-10
    return [value for value in tensor_inputs(arguments) if value in floats and not _is_tuple(value)]


def _is_tuple(value: Node) -> bool:
    return value.op in ("call_function", "call_method") and value.target in _SEVERAL
