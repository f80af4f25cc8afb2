"""Reading: which tensors of a probed pattern a Quantizer has observed, in what way, and which share an observer.

What is read is the graph that torchao's prepare has made, with its observers or fake quantizes: the behaviour, with
conv-bn folded, and sharing resolved. The annotations only tell whether the Quantizer meant an op, or observed a tensor
because of a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fx_quant_conformance.refimpl.exported.calls import ANNOTATION, argument_names_of
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts

PATTERN = "pattern"
"""The name of a probe's submodule that is the pattern, apart from what stands before and after it."""

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
"""What an op gives that reads a size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """How one tensor is observed."""

    facts: ObserverFacts
    qscheme: torch.qscheme | None
    axis: int | None
    """The axis of per-channel qparams."""
    is_fake: bool
    """Whether it is observed by a fake quantize."""
    group: int = field(compare=False)
    """The number of the observer in its model: tensors of one group share it."""
    sources: tuple[int, ...] = field(default=(), compare=False)
    """The groups from whose qparams its own are computed, if any."""

    @property
    def is_derived(self) -> bool:
        """Whether the qparams are computed from those of other tensors."""
        return bool(self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternReading:
    """What a Quantizer does with one pattern in one graph."""

    inputs: tuple[Observed | None, ...]
    """The float tensors that come from outside, in the order in which the ops take them."""
    parameters: Mapping[str, Observed]
    """The parameters that are observed, by the name of the aten op's argument."""
    floats: tuple[str, ...]
    """The names of the parameters that are not observed."""
    outputs: tuple[Observed | None, ...]
    """What leaves the pattern."""
    inside: tuple[str, ...]
    """The places between the pattern's ops that are observed, in words."""
    ops: tuple[str, ...]
    """The names of the aten ops."""
    asking: tuple[str, ...]
    """The names of the aten ops with a qspec."""
    silent_takers: tuple[str, ...]
    """The names of the aten ops that take an input and have no qspec."""
    silent_givers: tuple[str, ...]
    """The names of the aten ops that give an output and are not annotated."""
    owns_output: bool
    """Whether the annotation of an op that gives an output has an output qspec."""
    is_annotated: bool
    """Whether some op that takes an input has a qspec, or some parameter is observed."""


def read_probes(prepared: GraphModule, names: Sequence[str]) -> dict[str, PatternReading]:
    """Read the patterns of a prepared model, whose submodules of these names are the probes."""
    graph = _Graph(prepared)
    return {name: graph.read(name) for name in names}


class _Graph:
    """A prepared graph. ``live``: the nodes that depend on an input; ``owner``: for each live op the part it is in."""

    def __init__(self, prepared: GraphModule) -> None:
        self.observers = dict[Node, nn.Module]()
        self.live = set[Node]()
        self.owner = dict[Node, str]()
        self._groups = dict[int, int]()  # an observer's id → its number
        kinds = _list_observer_classes()
        for node in prepared.graph.nodes:
            if node.op == "placeholder" or any(source in self.live for source in node.all_input_nodes):
                self.live.add(node)
            if node.op == "call_module":
                module = prepared.get_submodule(str(node.target))
                if isinstance(module, kinds):
                    self.observers[node] = module
            elif node.op == "call_function" and node in self.live:
                self.owner[node] = self._find_owner(node)

    def _find_owner(self, node: Node) -> str:
        """Return ``p3.pattern`` for a node of that part; prepare's own nodes are in the part of their first source."""
        for path, _ in reversed(node.meta.get("nn_module_stack", {}).values()):
            if "." in path:
                return ".".join(path.split(".")[:2])
        sources = (self.strip(source)[0] for source in node.all_input_nodes)
        return next((self.owner[source] for source in sources if source in self.owner), "")

    def strip(self, node: Node) -> tuple[Node, nn.Module | None]:
        """Return the node whose value an argument is, and the last observer on the way, if any."""
        last = None
        while node in self.observers:
            last = last or self.observers[node]
            node = node.all_input_nodes[0]
        return node, last

    def read(self, name: str) -> PatternReading:
        own = (node for node, owner in self.owner.items() if owner == f"{name}.{PATTERN}")
        ops = [node for node in own if not isinstance(node.meta.get("val"), _NUMBERS)]
        inputs, parameters = dict[Node, Observed | None](), dict[str, Observed]()
        floats, inside = list[str](), list[str]()
        takers = dict[Node, bool]()
        for node in ops:
            for argument, source, module in self._list_arguments(node):
                observed = self._observe(module)
                if source in ops:
                    inside += [f"{_op_name(source)} → {_op_name(node)}"] if observed else []
                elif source in self.live:
                    if _is_float(source):
                        takers[node] = _has_qspec(node)
                        inputs[source] = inputs.get(source) or observed
                elif observed is not None:
                    parameters[argument] = observed
                else:
                    floats.append(argument)
        givers = [node for node in ops if _is_float(node) and any(user not in ops for user in self._readers(node))]
        return PatternReading(
            inputs=tuple(inputs.values()),
            parameters=parameters,
            floats=tuple(floats),
            outputs=tuple(self._output_of(node) for node in givers),
            inside=tuple(inside),
            ops=tuple(map(_op_name, ops)),
            asking=tuple(_op_name(node) for node in ops if _has_qspec(node)),
            silent_takers=tuple(_op_name(node) for node, asks in takers.items() if not asks),
            silent_givers=tuple(_op_name(node) for node in givers if not _has_qspec(node) and not _is_marked(node)),
            owns_output=any(_output_qspec(node) is not None for node in givers),
            is_annotated=any(takers.values()) or bool(parameters),
        )

    def _observe(self, module: nn.Module | None) -> Observed | None:
        """Read an observer or a fake quantize of torchao's; None for none, or for one that leaves float32."""
        if module is None:
            return None
        inner: Any = getattr(module, "activation_post_process", module)
        facts = ObserverFacts.of(module)
        if facts.dtype is torch.float32:
            return None
        return Observed(
            facts=facts,
            qscheme=getattr(inner, "qscheme", None),
            axis=getattr(inner, "ch_axis", None),
            is_fake=hasattr(module, "fake_quant_enabled"),
            group=self._number(module),
            sources=tuple(map(self._number, getattr(module, "obs_or_fqs", ()))),
        )

    def _number(self, module: nn.Module) -> int:
        return self._groups.setdefault(id(module), len(self._groups))

    def _list_arguments(self, node: Node) -> Iterator[tuple[str, Node, nn.Module | None]]:
        """Yield the name, the source and the observer of each tensor that an op takes."""
        names = argument_names_of(node) or map(str, range(len(node.args)))
        for name, argument in (*zip(names, node.args, strict=False), *node.kwargs.items()):
            for each in tree_leaves(argument):
                if isinstance(each, Node):
                    yield name, *self.strip(each)

    def _readers(self, node: Node) -> Iterator[Node]:
        """Yield the nodes that take a node's value, observed or not, without what checks the inputs."""
        for user in node.users:
            if user in self.observers:
                yield from self._readers(user)
            elif user.op != "call_module":
                yield user

    def _output_of(self, node: Node) -> Observed | None:
        """Return how a node's value is observed first: by its own annotation, if that says so, else by a reader's."""
        return self._observe(next((self.observers[user] for user in node.users if user in self.observers), None))


def _list_observer_classes() -> tuple[type[nn.Module], ...]:
    from torchao.quantization.pt2e import AffineQuantizedObserverBase, FakeQuantizeBase, ObserverBase

    return ObserverBase, FakeQuantizeBase, AffineQuantizedObserverBase


def _op_name(node: Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _has_qspec(node: Node) -> bool:
    annotation: Any = node.meta.get(ANNOTATION)
    if annotation is None:
        return False
    return any(qspec is not None for qspec in (*annotation.input_qspec_map.values(), annotation.output_qspec))


def _is_marked(node: Node) -> bool:
    annotation: Any = node.meta.get(ANNOTATION)
    return annotation is not None and bool(annotation._annotated)


def _output_qspec(node: Node) -> object:
    annotation: Any = node.meta.get(ANNOTATION)
    return None if annotation is None else annotation.output_qspec
