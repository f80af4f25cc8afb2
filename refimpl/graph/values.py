"""Which values of a graph are float tensors, and which arguments can never be (rule OBS-10).

Tables of ops say it, forwards and backwards; the facts of a run of the example inputs have priority.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.refimpl.graph.example_run import Examples, Fact, Seen
from fx_quant_conformance.refimpl.graph.graph_modules import ModeConstant
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, list_nodes, positional_arguments_of
from fx_quant_conformance.refimpl.legacy import QuantizableLSTM, QuantizableLSTMCell, is_dtype

# A value's kind: a float tensor, none, or a tuple of kinds; one that ends in ... has any number of the first.
Kind: TypeAlias = "bool | tuple[Any, ...]"
_ANY_NUMBER = (True, ...)
_PAIR = (True, False)  # values and indices


def _spell(*names: str) -> frozenset[Any]:
    """Return the callees of these names: methods, also in place, and functions of torch."""
    functions = (getattr(torch, name, None) for name in names)
    return frozenset({*names, *(f"{name}_" for name in names), *filter(callable, functions)})


def _operators_of(*names: str) -> frozenset[Any]:
    return frozenset(getattr(operator, name) for name in names)


_COMPARISONS = ("eq", "ne", "lt", "gt", "le", "ge")

# Callees whose result is no tensor, for any arguments.
_NUMBERS = _spell("size", "dim", "numel", "stride", "item", "tolist", "shape", "ndimension", "get_device")
_NUMBERS |= _spell("is_contiguous", "is_tensor", "is_floating_point", "ndim", "dtype", "device") | {len, isinstance}

# Callees whose arguments and result are tensors of booleans or integers.
_BITWISE = _spell("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")
_BITWISE |= _operators_of("and_", "or_", "xor", "invert")

# Callees whose result is a tensor of booleans or integers, for any arguments.
_OTHER_RESULT = _BITWISE | _operators_of(*_COMPARISONS) | {F.one_hot}
_OTHER_RESULT |= _spell("bool", "int", "long", "short", "argmax", "argmin", "argsort", "nonzero", "isnan", "isinf")
_OTHER_RESULT |= _spell("isfinite", "logical_and", "logical_or", "logical_xor", "logical_not", "any", "all", "one_hot")
_OTHER_RESULT |= _spell(*_COMPARISONS)

# Callees whose result is a float tensor, for any arguments, unless a dtype among them says otherwise.
_FLOAT_RESULT = _spell("float", "double", "half", "bfloat16", "ones", "zeros", "empty", "rand", "randn")
_FLOAT_RESULT |= _spell("div", "true_divide") | _operators_of("truediv")

# Callees whose result has the dtype of a further argument, if that is a tensor or names a dtype.
_CASTS = _spell("to", "type", "type_as")

# Callees that return (values, indices), of which the second is never observed; some only with a dim.
_PAIRS = _spell("topk", "sort", "mode", "kthvalue", "cummax", "cummin", "frexp")
_PAIRS_BY_DIM = _spell("max", "min", "median")

# Callees that return a tuple of tensors.
_SEVERAL = _spell("chunk", "split", "unbind", "tensor_split", "aminmax", "var_mean", "std_mean", "slogdet")

# Modules that return a tuple, by class; the first that fits.
_TUPLES_OF_MODULES: Mapping[type[nn.Module], Kind] = {
    **dict.fromkeys((nn.LSTM, QuantizableLSTM), (True, (True, True))),
    **dict.fromkeys((nn.RNNBase, nn.LSTMCell, QuantizableLSTMCell, nn.MultiheadAttention), (True, True)),
}

_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real"})
_NAMES_OF_PAIRS = {"values": 0, "indices": 1}

_SHAPING = _spell("view", "reshape", "permute", "transpose", "repeat", "repeat_interleave", "squeeze", "unsqueeze")
_SHAPING |= _spell("expand", "resize", "narrow", "flatten", "contiguous", "detach")

# Callees with only one float tensor, the first argument: the others are sizes, dims, indices, masks or fill values.
_FIRST_ARGUMENT_ONLY = _SHAPING | {operator.getitem, operator.floordiv, F.interpolate, F.dropout}
_FIRST_ARGUMENT_ONLY |= _spell("mean", "sum", "masked_fill", "index_select", "gather", "clamp", "chunk", "split")

# Callees and classes of modules that take booleans or indices: the positions of these arguments.
_OTHER_ARGUMENTS: Mapping[Any, tuple[int, ...]] = {
    **dict.fromkeys(_spell("masked_fill", "masked_select", "masked_scatter", "take", "take_along_dim"), (1,)),
    **dict.fromkeys(_spell("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy"), (2,)),
    **dict.fromkeys((torch.where, F.embedding, F.embedding_bag, F.one_hot, nn.Embedding), (0,)),
    **dict.fromkeys(_BITWISE | {nn.EmbeddingBag}, (0, 1)),
    **dict.fromkeys(("where", operator.getitem), (1,)),
}

# Callees whose result has the dtype of these arguments: where it is no float tensor, they are none either.
_SAME_DTYPE: Mapping[Any, tuple[int, ...]] = {
    **dict.fromkeys(_SHAPING | _SEVERAL | _spell("sum", "clone", "flip", "roll", "tril", "triu", "expand_as"), (0,)),
    **dict.fromkeys(_spell("cat", "concat", "stack") | {operator.getitem}, (0,)),
    **dict.fromkeys(_spell("add", "sub", "mul", "neg", "abs", "remainder", "maximum", "minimum"), (0, 1)),
    **dict.fromkeys(_operators_of("add", "sub", "mul", "neg", "mod", "floordiv"), (0, 1)),
    torch.where: (1, 2),
    "where": (0, 2),
}


def find_float_tensors(model: GraphModule, examples: Examples) -> set[Node]:
    """Return the nodes whose value is (or may be) a float tensor. (OBS-10)

    The example inputs are run only if the tables and the kinds of the inputs leave a value open.
    """
    analysis = _Analysis(model, examples.known)
    if analysis.is_open and not examples.were_run:
        analysis = _Analysis(model, examples.seen)
    return {node for node, kind in analysis.kinds.items() if kind is True}


def find_kinds(model: GraphModule) -> dict[Node, Kind]:
    """Return the kinds of the nodes whose value is (or may be) a tensor, of any dtype, or a tuple of tensors."""
    return _Analysis(model, {}).kinds


def part_of(node: Node, kind: Kind) -> int | None:
    """Return which part of a tuple of a kind a node reads, counted from its start; None: no single one."""
    key: Any = node.args[1]
    key = _NAMES_OF_PAIRS.get(key) if node.target is getattr else key
    if not isinstance(kind, tuple) or not isinstance(key, int):
        return None
    return key if kind[-1] is ... else key % len(kind)


def gives_number(node: Node, numbers: Container[Node]) -> bool:
    """Tell whether a call gives what is no tensor: it reads a tensor's shape or dtype, or computes with `numbers`."""
    callee = _callee_of(node)
    if callee in _NUMBERS or callee is getattr:
        return True
    is_plain = getattr(callee, "__module__", "") in ("_operator", "builtins", "math")
    return is_plain and all(map(numbers.__contains__, node.all_input_nodes))


def observable_inputs_of(node: Node, floats: set[Node]) -> list[Node]:
    """Return the inputs of a node that are float tensors, in order, without repeats. (OBS-10)"""
    first = node.args[:1] or (node.kwargs.get("input"),)  # rule: PAT-08
    arguments = first if _callee_of(node) in _FIRST_ARGUMENT_ONLY else (node.args, node.kwargs)  # rule: OBS-10
    return [value for value in list_nodes(arguments) if value in floats]


class _Analysis:
    """Finds, in one sweep backwards and one forwards, the kinds of a graph's values.

    ``kinds``: of each node that is a tensor, or a tuple with tensors; numbers are left out. ``is_open``: the tables do
    not decide all.
    """

    def __init__(self, model: GraphModule, seen: Mapping[Node, Fact]) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._others: set[Node] = set()
        self.kinds: dict[Node, Kind] = {}
        self.is_open = False
        for node in reversed(model.graph.nodes):
            self._others.update(list_nodes(self._other_arguments_of(node)))
        for node in model.graph.nodes:
            if self._is_made_of_tensors(node):
                self.kinds[node] = _read_fact(seen[node]) if node in seen else self._kind_of_node(node)  # rule: OBS-10

    def _other_arguments_of(self, node: Node) -> list[Any]:
        """Return the arguments of a node that are indices or booleans: users come first in the sweep backwards."""
        callee = type(self._modules[str(node.target)]) if node.op == "call_module" else _callee_of(node)
        indexes = _OTHER_ARGUMENTS.get(callee, ())
        if node in self._others and not (callee is operator.getitem and self._has_parts(node.args[0])):
            indexes = (*indexes, *_SAME_DTYPE.get(callee, ()))
        arguments = positional_arguments_of(node, at_least=max(indexes) + 1) if indexes else ()
        return [arguments[index] for index in indexes if index < len(arguments)]

    def _is_made_of_tensors(self, node: Node) -> bool:
        """Tell whether a node is a tensor, or a tuple of them, made of others; numbers make none.

        A tuple, None or a number with a fraction among the arguments counts as a tensor, as in torch.
        """
        callee = _callee_of(node)
        if callee is None:
            return node.op != "output" and not self._is_constant(node)
        if callee in _NUMBERS:
            return False
        if callee in (getattr, operator.getitem):
            is_number = callee is getattr and node.args[1] in _NUMBERS
            return isinstance(node.args[0], Node) and node.args[0] in self.kinds and not is_number
        items = (part for argument in node.args for part in (argument if isinstance(argument, list) else (argument,)))
        if any(not isinstance(item, (Node, int)) for item in items):
            return True
        return any(value in self.kinds for value in node.all_input_nodes)

    def _is_constant(self, node: Node) -> bool:
        return node.op == "call_module" and isinstance(self._modules[str(node.target)], ModeConstant)

    def _kind_of_node(self, node: Node) -> Kind:
        """Return a node's kind by the tables."""
        if node in self._others:
            return self._kind_of_others(node)
        if node.op == "placeholder":
            return True
        if node.op == "get_attr":
            value = attribute_of(self._model, str(node.target))
            return isinstance(value, torch.Tensor) and value.is_floating_point()
        return self._kind_of_module(node) if node.op == "call_module" else self._kind_of_call(node, _callee_of(node))

    def _kind_of_call(self, node: Node, callee: Any) -> Kind:
        if callee in (getattr, operator.getitem):
            source: Any = node.args[0]
            return _take_part(self.kinds[source], node.args[1], is_attribute=callee is getattr)
        dtypes = [value for value in (*node.args, *node.kwargs.values()) if is_dtype(value)]
        if callee in _OTHER_RESULT or not all(dtype.is_floating_point for dtype in dtypes):
            return False
        kinds = [self.kinds[value] for value in node.all_input_nodes if value in self.kinds]
        is_promoted = callee in _SAME_DTYPE and any(isinstance(value, float) for value in node.args)
        if not (dtypes or is_promoted or callee in _FLOAT_RESULT):
            self.is_open |= callee in _CASTS and len(node.all_input_nodes) > 1
            if not any(kinds):
                self.is_open |= callee not in _SAME_DTYPE
                return self._kind_of_others(node)
        return _ANY_NUMBER if callee in _SEVERAL else _PAIR if self._returns_pair(node) else True

    def _kind_of_others(self, node: Node) -> Kind:
        """Return the kind of what has no float tensor."""
        return (False, False) if self._returns_pair(node) else False

    def _kind_of_module(self, node: Node) -> Kind:
        module = self._modules[str(node.target)]
        self.is_open |= not type(module).__module__.startswith("torch.")
        if getattr(module, "return_indices", False) is True:
            return _PAIR
        return next((kind for base, kind in _TUPLES_OF_MODULES.items() if isinstance(module, base)), True)

    def _has_parts(self, node: Any) -> bool:
        """Tell whether a node may be a tuple of floats and others."""
        return isinstance(node, Node) and (node.op == "call_module" or self._returns_pair(node))

    def _returns_pair(self, node: Any) -> bool:
        """Tell whether a call returns (values, indices): max(x, dim) does, max(x) and max(x, y) are tensors."""
        callee = _callee_of(node)
        if callee in _PAIRS_BY_DIM:
            operands = (*node.args[1:], *(value for name, value in node.kwargs.items() if name != "input"))
            return bool(operands) and self.kinds.keys().isdisjoint(list_nodes(operands))
        return callee in _PAIRS or node.kwargs.get("return_indices") is True


def _callee_of(node: Any) -> Any:
    """Return the function, or the name of the method, that a node calls; None for other nodes, also modules."""
    return node.target if isinstance(node, Node) and node.op in ("call_function", "call_method") else None


def _read_fact(fact: Fact) -> Kind:
    """Return the kind of a value when the example inputs were run."""
    if isinstance(fact, Seen):
        return fact.dtype.is_floating_point
    return False if fact is None else tuple(map(_read_fact, fact))


def _take_part(kind: Kind, key: Any, *, is_attribute: bool) -> Kind:
    """Return the kind of the part that an index or an attribute takes out of a value."""
    if isinstance(kind, bool):
        return kind and (not is_attribute or key in _TENSOR_ATTRIBUTES)
    key = _NAMES_OF_PAIRS.get(key, key) if is_attribute else key
    if not isinstance(key, (int, slice)):
        return False
    if kind[-1] is ...:
        return kind if isinstance(key, slice) else kind[0]
    parts: Kind = kind[key] if isinstance(key, slice) or -len(kind) <= key < len(kind) else False
    return parts
