"""Canonical forms: a graph as lines of text without names; two graphs compare in linear time and differ readably.

A node is numbered by its place in a walk from the output over the arguments, so the order in which a pass happened to
insert nodes does not count; modules and observers are numbered by first use, so which calls share one instance counts;
constants, parameters and buffers count by value. A line has two halves: the structure and the numbers.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

SHOWN = 4  # tensors of so many elements are written out; larger ones are shown by a digest of their bytes
ATTRIBUTES = (
    "dtype",
    "qscheme",
    "quant_min",
    "quant_max",
    "eps",
    "ch_axis",
    "is_dynamic",
    "averaging_constant",
    "bins",
    "weight_dtype",
    "weight_qscheme",
    "weight_axis",
    "is_decomposed",
)
QPARAMS = re.compile(r"(, )?\b(scale|zero_point)=[^,]+")  # in a module's repr: numbers, and part of its state


TRAINED = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RNNBase)


class Line(NamedTuple):
    """One node: what it calls with which arguments, the values it holds, and the kind that summaries count."""

    structure: str
    numbers: str
    kind: str


def canonical(model: GraphModule) -> list[Line]:
    """Return a graph's canonical form, one line per node."""
    return list(_Writer(model).lines())


def text_of(value: Any) -> str:
    """Write a value out: two values with the same text are equal bit for bit."""
    if isinstance(value, Tensor):
        return f"{_shape_of(value)} {_contents(value.detach())}"
    if isinstance(value, torch.ScriptObject):
        return f"{_type_name(value)}({text_of(value.__getstate__())})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {text_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(map(text_of, value))})"
    return repr(value)


def difference(torchs: list[Line], ours: list[Line]) -> str:
    """Return "" for equal forms, else a summary line and a unified diff: structure first, numbers if that agrees."""
    for half, summary in (("structure", _summary(torchs, ours)), ("numbers", "same structure, other numbers")):
        left, right = ([str(getattr(line, half)) for line in form] for form in (torchs, ours))
        if left != right:
            diff = difflib.unified_diff(left, right, "torch", "refimpl", lineterm="", n=2)
            return "\n".join([summary, *diff])
    return ""


def _summary(torchs: list[Line], ours: list[Line]) -> str:
    left, right = (Counter(line.kind for line in form) for form in (torchs, ours))
    if left == right:
        return "same nodes, other wiring"
    parts = {"torch": left - right, "refimpl": right - left}
    return "; ".join(f"only {side}: {_counts(extra)}" for side, extra in parts.items() if extra)


def _counts(extra: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(extra.items()))


def _shape_of(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _contents(value: Tensor) -> str:
    if not value.is_quantized:
        plain = value.cpu().contiguous().reshape(-1)
        return str(plain.tolist()) if plain.numel() <= SHOWN else _digest(plain)
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"scale {value.q_scale()!r} zero point {value.q_zero_point()} {_integers(value)}"
    scales, zero_points = text_of(value.q_per_channel_scales()), text_of(value.q_per_channel_zero_points())
    return f"scales {scales} zero points {zero_points} axis {value.q_per_channel_axis()} {_integers(value)}"


def _integers(value: Tensor) -> str:
    integers = value.dequantize() if value.dtype == torch.quint4x2 else value.int_repr()
    return _contents(integers)


def _digest(plain: Tensor) -> str:
    return hashlib.sha256(bytes(plain.view(torch.uint8).tolist())).hexdigest()[:12]


def _type_name(value: object) -> str:
    kind = type(value)
    if isinstance(value, torch.ScriptObject):
        return str(value._type().qualified_name()).rpartition(".")[2]
    if isinstance(value, GraphModule):
        return "GraphModule"
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("torch.")


def _walk(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the graph's nodes: inputs as given, then what the output reads, arguments first, then dead ends."""
    nodes = list(graph.nodes)
    seen: set[Node] = set()
    starts = [node for node in nodes if node.op == "placeholder"]
    starts += [node for node in nodes if node.op == "output"]
    starts += [node for node in nodes if not node.users]
    for start in starts:
        stack = [(start, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((value, False) for value in reversed(node.all_input_nodes))


class _Writer:
    """Numbers the nodes and modules of one graph while it writes them."""

    def __init__(self, model: GraphModule) -> None:
        self.model = model
        self.labels: dict[Node, str] = {}
        self.modules: dict[int, str] = {}
        self.used: Counter[str] = Counter()

    def lines(self) -> Iterator[Line]:
        for node in _walk(self.model.graph):
            what, numbers, kind = self.callee(node)
            label = self.number(kind.removesuffix(" again").rpartition(".")[2])
            arguments = [self.argument(value) for value in node.args]
            arguments += [f"{key}={self.argument(value)}" for key, value in sorted(node.kwargs.items())]
            self.labels[node] = label
            yield Line(f"{label} = {what}({', '.join(arguments)})", f"{label}: {numbers}", kind)

    def number(self, name: str) -> str:
        self.used[name] += 1
        return f"{name}#{self.used[name]}"

    def callee(self, node: Node) -> tuple[str, str, str]:
        """Return what a node calls: its structure, its numbers and its kind."""
        if node.op in ("placeholder", "output"):
            return node.op, "", node.op
        if node.op == "call_module":
            return self.module(self.model.get_submodule(str(node.target)))
        if node.op == "get_attr":
            value = _attribute(self.model, str(node.target))
            shape = _shape_of(value) if isinstance(value, Tensor) else _type_name(value)
            return f"get_attr {shape}", text_of(value), "get_attr"
        if node.op == "call_method":
            return f".{node.target}", "", f".{node.target}"
        target: Any = node.target
        name = (
            str(target)
            if hasattr(target, "overloads") or hasattr(target, "_schema")
            else (f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__name__', target)}")
        )
        return name, "", name

    def module(self, module: nn.Module) -> tuple[str, str, str]:
        kind = _type_name(module)
        if id(module) in self.modules:
            return f"{self.modules[id(module)]} again", "", f"{kind} again"
        self.modules[id(module)] = label = self.number(f"[{kind}]")
        return f"{label}{_structure(module)}", _state(module), kind

    def argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.labels.get(value, "a later node")
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{key!r}: {self.argument(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, (tuple, list)):
            name = type(value).__name__ if hasattr(value, "_fields") else ""
            return f"{name}({', '.join(map(self.argument, value))})"
        return text_of(value)


def _structure(module: nn.Module) -> str:
    """What a module is, its parts included: attributes that change what it computes, not its values."""
    if isinstance(module, GraphModule):
        return "{\n    " + "\n    ".join(line.structure for line in canonical(module)) + "}"
    parts = list(_settings(module))
    parts += [f"{name}={_type_name(child)}{_structure(child)}" for name, child in module.named_children()]
    return "{" + ", ".join(parts) + "}"


def _settings(module: nn.Module) -> Iterator[str]:
    if isinstance(module, TRAINED) and ".quantized." not in type(module).__module__:  # others do not read the flag
        yield f"training={module.training}"
    if "Observer" not in type(module).__name__ and "FakeQuantize" not in type(module).__name__:
        yield QPARAMS.sub("", module.extra_repr())
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if value is not None and not isinstance(value, Tensor):
            yield f"{name}={text_of(value)}"


def _state(module: nn.Module) -> str:
    if isinstance(module, GraphModule):
        return "{\n    " + "\n    ".join(line.numbers for line in canonical(module)) + "}"
    return ", ".join(f"{name}: {text_of(value)}" for name, value in _sorted(module.state_dict().items()))


def _sorted(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return sorted(items, key=lambda item: item[0])


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)
