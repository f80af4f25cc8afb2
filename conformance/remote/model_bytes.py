"""Reference models as bytes: from the judge to the backend's process, which trusts the judge.

Python's pickle does it, but for what it would be slow at or cannot do: graph modules are taken apart into lists of
nodes, and tensors into their memory.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.machine.frames import NoAnswer
from fx_quant_conformance.refimpl.graph.graph_modules import FlowModule, can_be_saved

_STACK = "nn_module_stack"
"""What a node's meta says of where the node comes from; backends name ops by it."""
_KNOWN = ("torch.", "fx_quant_conformance.refimpl.")
"""Where classes are from whose names go along. Of a user's containers only the paths do: their package stays here."""
_HOMES: tuple[Any, ...] = (torch, F, torch.Tensor, torch._C._nn)
"""Where functions without a module of their own are found by name."""
_NAMED = (torch.dtype, torch.qscheme, torch.memory_format, torch.layout)
"""Constants of torch, which pickle would look for in every module there is."""


def dump_model(model: GraphModule, example_inputs: tuple[Any, ...]) -> bytes:
    """Return a graph module and example inputs as bytes."""
    return dump_object((model, example_inputs))


def load_model(data: bytes) -> tuple[GraphModule, tuple[Any, ...]]:
    """Return the graph module and the example inputs of the judge's bytes."""
    model, example_inputs = load_object(data)
    return model, example_inputs


def dump_object(value: object) -> bytes:
    """Return models, and tensors, of any nesting as bytes. Raises NoAnswer for what has no name elsewhere."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever a user's objects raise
        text = "the model cannot be sent to the backend's process, which finds classes and functions by name"
        raise NoAnswer(f"{text}: {format_error(error)}") from error
    return buffer.getvalue()


def load_object(data: bytes) -> Any:
    """Return what the judge's bytes hold. Raises NoAnswer if this process does not find a part of it."""
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a user's module raises as it is imported
        raise NoAnswer(f"the backend's process cannot read the model: {format_error(error)}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, GraphModule):
            return _load_graph_module, _take_apart(value)
        if isinstance(value, nn.Module) and not can_be_saved(type(value)):
            raise pickle.PicklingError(f"{type(value)} is made while running")
        if isinstance(value, Tensor):
            return _reduce_tensor(value)
        if isinstance(value, torch._ops.OpOverload):
            return _load_overload, (value._schema.name, value._overloadname)
        if isinstance(value, torch._ops.OpOverloadPacket):
            return _load_packet, (value._qualified_op_name,)
        if isinstance(value, _NAMED):
            return _load_named, (0, str(value).removeprefix("torch."))
        place = _find_place(value) if callable(value) and not isinstance(value, type) else None
        return NotImplemented if place is None else (_load_named, place)


def _find_place(function: Any) -> tuple[int, str] | None:
    """Return where a function is found that pickle would not find by its name; None: pickle finds it."""
    own_name = str(getattr(function, "__name__", ""))
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in (None, "torch._C") and "<locals>" not in name:
        return None
    for number, home in enumerate(_HOMES):
        if getattr(home, own_name, None) is function:
            return number, own_name
    inside = (key for key, found in vars(F).items() if found is function)  # made by torch's boolean_dispatch
    return next(((_HOMES.index(F), key) for key in inside), None)


def _load_named(home: int, name: str) -> Any:
    return getattr(_HOMES[home], name)


def _load_overload(name: str, overload: str) -> Any:
    return getattr(_load_packet(name), overload or "default")


def _load_packet(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _reduce_tensor(value: Tensor) -> Any:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized
    if not plain or not value.is_cpu or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return NotImplemented
    size = value.numel() * value.element_size()
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return _load_tensor, (data, value.dtype, tuple(value.shape), type(value) is nn.Parameter, value.requires_grad)


def _load_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], is_parameter: bool, grad: bool) -> Tensor:
    value = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    return nn.Parameter(value, requires_grad=grad) if is_parameter else value.requires_grad_(grad)


# -- graph modules ----------------------------------------------------------------------------------------------------


class _Place:
    """Stands for a node: its place in the graph."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _Place, (self.number,)


def _take_apart(model: GraphModule) -> tuple[Any, ...]:
    """Return the arguments of `_load_graph_module`."""
    places: dict[Any, Any] = {node: _Place(number) for number, node in enumerate(model.graph.nodes)}
    nodes = [
        (
            node.op,
            node.target,
            map_arg(node.args, places.__getitem__),
            map_arg(node.kwargs, places.__getitem__),
            node.name,
            node.type,
            _strip_stack(node.meta[_STACK]) if _STACK in node.meta else None,
        )
        for node in places
    ]
    attributes = {key: value for key, value in vars(model).items() if key not in _MADE_ANEW}
    graph: Any = model.graph
    return isinstance(model, FlowModule), type(model).__name__, nodes, graph._codegen, attributes


def _strip_stack(stack: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """Return a node's stack of modules, with nn.Module for classes that are neither torch's nor refimpl's."""
    return {key: (path, kind if _is_known(kind) else nn.Module) for key, (path, kind) in stack.items()}


def _is_known(kind: Any) -> bool:
    """Tell whether a class is torch's or refimpl's, and none that torch makes of a layer with a parametrization."""
    return getattr(kind, "__module__", "").startswith(_KNOWN) and can_be_saved(kind)


_MADE_ANEW = frozenset({"_graph", "_code", "_tracer_cls", "_lineno_map", "_prologue_start"})


def _load_graph_module(
    is_flow: bool, name: str, nodes: list[tuple[Any, ...]], codegen: Any, attributes: dict[str, Any]
) -> GraphModule:
    made: list[Node] = []
    graph = Graph()
    graph.set_codegen(codegen)

    def node_at(value: Any) -> Any:
        if isinstance(value, _Place):
            return made[value.number]
        if isinstance(value, (tuple, list)):
            items = map(node_at, value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: node_at(item) for key, item in value.items()}
        return slice(*map(node_at, (value.start, value.stop, value.step))) if isinstance(value, slice) else value

    for op, target, args, kwargs, node_name, kind, stack in nodes:
        node = graph.create_node(op, target, node_at(args), node_at(kwargs), node_name, kind)
        if stack is not None:
            node.meta[_STACK] = stack
        made.append(node)
    kind_of_module: Callable[..., GraphModule] = FlowModule if is_flow else GraphModule
    root = nn.Module()
    vars(root).update(attributes)
    model = kind_of_module(root, graph, class_name=name)
    vars(model).update(attributes)
    return model
