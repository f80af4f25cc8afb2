"""A reference model as a plain graph: nodes as data, tensors as arrays. docs/vectors.md is the format's description.

A reader needs no framework: weights are integers with their qparams, and a fused module is the chain of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fx_quant_conformance.conformance.oracle.grids import Grid, ends_of, grid_of, is_static, list_unclaimed, qparams_of
from fx_quant_conformance.conformance.oracle.vendor_modules import ends_of_weight
from fx_quant_conformance.conformance.vectors.files import Array, format_json
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from fx_quant_conformance.refimpl.graph.tracing import attribute_of
from fx_quant_conformance.refimpl.legacy.dtypes import PLAIN_DTYPE, is_dtype
from fx_quant_conformance.refimpl.legacy.weights import read_integers
from fx_quant_conformance.refimpl.observers.observers import is_quantized_dtype

Data: TypeAlias = dict[str, Any]
VERSION = 1
_OF_A_WEIGHT = "weight_"
_PLAIN = (bool, int, float, str)
_NO_ARGUMENTS = frozenset({"training", "is_decomposed"})


@dataclass(frozen=True, kw_only=True)
class GraphData:
    """A model as data. Equal models have equal data."""

    graph: Data
    """JSON, which names ``arrays``."""
    arrays: Mapping[str, Array]

    @cached_property
    def text(self) -> str:
        """The graph as JSON, the same text for the same graph."""
        return format_json(self.graph)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A graph that is being spelled."""

    model: GraphModule
    nodes: list[Data] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    names: dict[Node, Data] = field(default_factory=dict)
    """What stands for a node's value."""

    def add(self, name: str, op: str, **what: Any) -> Data:
        """Add a node; return what stands for its value."""
        self.nodes.append({"name": name, "op": op, **what})
        return {"node": name}

    def hold(self, key: str, tensor: Tensor) -> Data:
        """Hold a tensor as an array; return what stands for it."""
        self.arrays[key] = as_array(tensor)
        return {"tensor": key}

    def spell(self, value: Any) -> Any:
        """Return an argument as JSON."""
        if isinstance(value, Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return [self.spell(item) for item in value]
        if isinstance(value, dict):
            return {str(key): self.spell(item) for key, item in value.items()}
        if isinstance(value, slice):
            return {"slice": [self.spell(item) for item in (value.start, value.stop, value.step)]}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is None or isinstance(value, _PLAIN):
            return value
        if value is Ellipsis:
            return {"ellipsis": True}
        if is_dtype(value):
            return {"dtype": name_of(value)}
        if isinstance(value, Tensor):
            return self.hold(f"constant.{len(self.arrays)}", value)
        return {"other": str(value)}


def describe_model(model: GraphModule) -> GraphData:
    """Return a reference model as data."""
    draft, unclaimed = _Draft(model=model), set(list_unclaimed(model))
    inputs, outputs = list[str](), Any
    for node in model.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
            draft.names[node] = {"node": node.name}
        elif node.op == "output":
            outputs = draft.spell(node.args[0])
        else:
            before = len(draft.nodes)
            draft.names[node] = _describe_node(draft, node)
            for each in draft.nodes[before:] if node.name in unclaimed else ():
                each["unclaimed"] = True
    graph = {"format": "fx-quant-graph", "version": VERSION, "inputs": inputs, "nodes": draft.nodes, "outputs": outputs}
    return GraphData(graph=graph, arrays=draft.arrays)


def _describe_node(draft: _Draft, node: Node) -> Data:
    """Add a node to the draft, or several for a fused module; return what stands for its value."""
    if node.op == "get_attr":
        return draft.hold(str(node.target), attribute_of(draft.model, str(node.target)))
    if is_static(node):
        is_constant = all(operand.op == "get_attr" for operand in node.all_input_nodes)
        return _hold_integers(draft, node) if is_constant else _describe_static(draft, node)
    args, kwargs = draft.spell(node.args), draft.spell(node.kwargs)
    if node.op == "call_module":
        module = draft.model.get_submodule(str(node.target))
        return _describe_module(draft, node.name, str(node.target), module, args, kwargs)
    op = f".{node.target}" if node.op == "call_method" else _name_function(node.target)
    return draft.add(node.name, op, args=args, **({"kwargs": kwargs} if kwargs else {}))


def _name_function(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else leaf_name(target)


# -- quantize and dequantize ------------------------------------------------------------------------------------------


def _hold_integers(draft: _Draft, node: Node) -> Data:
    """Hold a constant that is quantized as the integers that it becomes."""
    target: Any = node.target
    operands = [attribute_of(draft.model, str(arg.target)) if isinstance(arg, Node) else arg for arg in node.args]
    return draft.hold(f"{node.name}.integers", target(*operands))


def _describe_static(draft: _Draft, node: Node) -> Data:
    """Add a quantize or dequantize node with its qparams."""
    op = "quantize" if is_quantize(node) else "dequantize"
    return draft.add(node.name, op, args=draft.spell(node.args[:1]), **_describe_qparams(draft, node))


def _describe_qparams(draft: _Draft, node: Node) -> Data:
    """Return the qparams of a quantize or dequantize node: numbers, or arrays along an axis."""
    scale, zero_point, axis = qparams_of(draft.model, node)
    if axis is None:
        return describe_grid(grid_of(draft.model, node))
    low, high = ends_of(node)
    dtype: Any = node.args[-1]
    held = {
        "scale": draft.hold(f"{node.name}.scale", scale.float()),
        "zero_point": draft.hold(f"{node.name}.zero_point", zero_point.int()),
    }
    return held | {"axis": axis, "low": low, "high": high, "dtype": name_of(dtype)}


def describe_grid(grid: Grid) -> Data:
    """Return a grid as data, with the plain name of its dtype."""
    dtype = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}.get(grid.dtype, grid.dtype)
    return {"scale": grid.scale, "zero_point": grid.zero_point, "low": grid.low, "high": grid.high, "dtype": dtype}


def integer_dtype_of(grid: Grid) -> torch.dtype:
    """Return the plain dtype that holds a grid's integers."""
    dtype = getattr(torch, describe_grid(grid)["dtype"])
    assert isinstance(dtype, torch.dtype)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's."""
    return str(dtype).removeprefix("torch.")


# -- modules ----------------------------------------------------------------------------------------------------------


def _describe_module(draft: _Draft, name: str, path: str, module: nn.Module, args: Any, kwargs: Any) -> Data:
    """Add a module's node, or those of the parts that a fused module runs one after the other."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        value: Data | None = None
        for key, part in module.named_children():
            operands = args if value is None else [value]
            value = _describe_module(draft, f"{name}.{key}", f"{path}.{key}", part, operands, {})
        return value if value is not None else args[0]
    what: Data = {
        "args": args,
        **({"kwargs": kwargs} if kwargs else {}),
        "arguments": _describe_arguments(draft, module),
    }
    tensors = dict(_describe_tensors(draft, path, module))
    return draft.add(name, _name_class(type(module)), **what, **({"tensors": tensors} if tensors else {}))


def _name_class(kind: type) -> str:
    """Return the name of the float class whose place a class takes, as patterns have it."""
    if kind.__module__.startswith("torch.") and hasattr(nn, kind.__name__):
        return f"nn.{kind.__name__}"
    for each in kind.__mro__:
        name = leaf_name(each)
        if name.startswith("nn.") and each is not nn.Module:
            return name
        if not each.__module__.startswith(("torch.", "fx_quant_conformance.refimpl.")):
            return name
    return leaf_name(kind)


def _describe_arguments(draft: _Draft, module: nn.Module) -> Data:
    """Return the plain attributes of a module: the arguments that it was made with."""
    holds = hasattr(module, "get_quantized_weight")
    return {
        name: draft.spell(value)
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and name not in _NO_ARGUMENTS
        and _is_plain(value)
        and not (holds and name.startswith(_OF_A_WEIGHT))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or is_dtype(value) or isinstance(value, _PLAIN)


def _describe_tensors(draft: _Draft, path: str, module: nn.Module) -> Iterator[tuple[str, Data]]:
    """Yield a module's tensors by name, quantized ones as integers with their qparams."""
    for prefix, part in module.named_modules():
        inside = f"{prefix}." if prefix else ""
        holds = hasattr(part, "get_quantized_weight")
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        for name, tensor in own:
            key = f"{path}.{inside}{name}"
            if holds and name == "weight":
                yield f"{inside}{name}", _describe_weight(draft, key, part)
            elif is_quantized_dtype(getattr(part, f"{name}_dtype", None)) and hasattr(part, f"{name}_scale"):
                yield f"{inside}{name}", _describe_named_weight(draft, key, part, name)
            elif not _is_qparam(part, name, holds):
                yield f"{inside}{name}", draft.hold(key, tensor.detach())


def _is_qparam(part: nn.Module, name: str, holds: bool) -> bool:
    root = name.rpartition("_")[0].removesuffix("_zero").removesuffix("_axis")
    return (holds and name.startswith(_OF_A_WEIGHT)) or hasattr(part, f"{root}_qscheme")


def _describe_weight(draft: _Draft, key: str, part: Any) -> Data:
    if not is_quantized_dtype(part.weight_dtype):
        return draft.hold(key, part.get_weight().detach())
    low, high = ends_of_weight(part)
    integers = read_integers(part).to(PLAIN_DTYPE.get(part.weight_dtype, torch.uint8))
    axis = int(part.weight_axis) if part.weight_scale.numel() > 1 else None
    ends = (int(low), int(high))
    return _describe_held(draft, key, integers, (part.weight_scale, part.weight_zero_point), axis, ends)


def _describe_named_weight(draft: _Draft, key: str, part: Any, name: str) -> Data:
    """Spell one of the weights of a recurrent module, which have qparams of their own."""
    scale, zero_point = (getattr(part, f"{name}_{which}") for which in ("scale", "zero_point"))
    dtype = getattr(part, f"{name}_dtype")
    axis = int(getattr(part, f"{name}_axis", 0)) if scale.numel() > 1 else None
    ends = torch.iinfo(PLAIN_DTYPE[dtype])
    integers = read_integers(part, name).to(PLAIN_DTYPE[dtype])
    return _describe_held(draft, key, integers, (scale, zero_point), axis, (ends.min, ends.max))


def _describe_held(
    draft: _Draft, key: str, integers: Tensor, qparams: tuple[Tensor, Tensor], axis: int | None, ends: tuple[int, int]
) -> Data:
    """Return integers with the qparams that give their reals."""
    data = draft.hold(key, integers) | {"low": ends[0], "high": ends[1], "dtype": name_of(integers.dtype)}
    scale, zero_point = qparams
    if axis is None:
        return data | {"scale": float(scale), "zero_point": int(zero_point)}
    held = {
        "scale": draft.hold(f"{key}.scale", scale),
        "zero_point": draft.hold(f"{key}.zero_point", zero_point),
    }
    return data | held | {"axis": axis}


def as_array(tensor: Tensor) -> Array:
    """Return a tensor on the CPU as an array in C order."""
    return np.asarray(tensor.detach().cpu().contiguous().numpy())
