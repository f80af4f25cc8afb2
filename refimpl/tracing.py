"""Tracing a model to an fx graph whose leaves are the modules that a BackendConfig can name (rule CUS-02).

Also the small facts about a traced graph that every later stage needs: the module behind a node, the full name of the
module that encloses it, and its arguments with keywords put in their place (PAT-08).
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.ao.nn.intrinsic as nni
from torch import nn
from torch.fx import GraphModule, Node, Tracer
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn.utils.parametrize import type_before_parametrizations

from refimpl.errors import ModelError

# Built-ins without a signature or schema that inspect can read: the names of their positional parameters.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv3d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("input", "weight", "bias"),
    "cat": ("tensors", "dim"),
    "add": ("input", "other"),
    "mul": ("input", "other"),
}


class QuantizationTracer(Tracer):
    """Keeps as leaves: torch's own modules, fused modules, and what the user names. (CUS-02)"""

    def __init__(self, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.leaf_names = leaf_names
        self.leaf_classes = leaf_classes
        self.record_stack_traces = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module stays one node. (CUS-02)"""
        if module_qualified_name in self.leaf_names or type(m) in self.leaf_classes:  # rule: CUS-02
            return True
        if isinstance(m, nni._FusedModule):  # type: ignore[attr-defined]
            return True
        return type(m).__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(m, nn.Sequential)


def _tidy(traced: GraphModule) -> None:
    """Turn ``layer(input=x)`` into ``layer(x)``: reference modules have another name for their input. (PAT-08)

    Also drop annotations that are strings: a GraphModule with one cannot be saved. (CVT-12)
    """
    for node in traced.graph.nodes:
        if isinstance(node.type, str):
            node.type = None  # rule: CVT-12
        if node.op != "call_module" or node.args or "input" not in node.kwargs:
            continue
        if type(traced.get_submodule(str(node.target))).__module__.startswith("torch.nn"):
            rest = dict(node.kwargs)
            node.args, node.kwargs = (rest.pop("input"),), rest  # rule: PAT-08


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while a pass runs.

    What a pass allocates lives on in its result, yet every so many allocations the collector walks the whole heap,
    model included, and finds nothing: cost that grows faster than the model. It is put back as it was.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Draft(GraphModule):
    """A GraphModule on its way through the passes. It makes no code, which is most of the cost of a graph module.

    Modules and tensors are shared with what it was made from; the containers that hold them are its own. ``origin``
    names the class of the model that it came from.
    """

    origin: str

    def recompile(self) -> Any:
        """Do nothing: a draft is not run."""

    def finish(self) -> GraphModule:
        """Return a GraphModule of this graph, with the modules and tensors that the graph still uses."""
        made = GraphModule(self, self.graph, class_name=self.origin)
        for part in made.modules():
            if part is made or type(part) is nn.Module:  # the containers; the modules in them are the model's own
                part.training = self.training
        made.meta = dict(self.meta)
        setattr(made, _NOTES, made.meta)
        return made


_NOTES = "refimpl_notes"


def notes_of(model: nn.Module) -> dict[str, Any]:
    """Return what the passes noted in a model's ``meta``, also after torch.save and load. (CVT-12)

    Saving a GraphModule loses its meta; a plain attribute, which ``finish`` sets to the same dict, is kept.
    """
    found: dict[str, Any] = getattr(model, "meta", None) or getattr(model, _NOTES, {})  # rule: CVT-12
    return found


def draft_of(model: GraphModule) -> Draft:
    """Return a draft with a copy of a graph module's graph, so that the graph module itself is not changed."""
    made = Draft(model, copy.deepcopy(model.graph))
    made.training = model.training
    made.meta = dict(notes_of(model))
    made.origin = type(model).__name__
    return made


def trace(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> Draft:
    """Trace a model. The parameters are shared with the original, the modules are the original's.

    Raises ModelError naming the model's class if it cannot be traced.
    """
    tracer = QuantizationTracer(leaf_names, leaf_classes)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}. Make the untraceable part a leaf "
            "(non-traceable module names or classes), or rewrite its data-dependent control flow"
        ) from error
    traced = Draft(tracer.root, graph)
    _tidy(traced)
    traced.training = model.training
    traced.origin = type(model).__name__
    return traced


def module_type(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, looking through parametrizations. (PAT-03)"""
    found: type[nn.Module] = type_before_parametrizations(module)
    return found


class FusedPart(NamedTuple):
    """What a fused module was made of: the object type and the name that QConfigMapping keys are compared with."""

    object_type: Any
    name: str


FUSED_PARTS = "refimpl_fused_parts"  # the key of a node's meta that holds its FusedParts, the root's first


class Places:
    """Where each node of a graph stands: its module, object type, enclosing module's name, and index among its type."""

    def __init__(self, model: GraphModule) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.calls: Counter[int] = Counter(
            id(self.modules[str(node.target)]) for node in model.graph.nodes if node.op == "call_module"
        )
        self._order: dict[Node, tuple[str, Any, int]] = {}
        counts: Counter[tuple[str, Any]] = Counter()
        for node in model.graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                parts = self.fused_parts(node)
                key = (self.scope(node), parts[0].object_type if parts else self.object_type(node))
                self._order[node] = (*key, counts[key])
                counts[key] += 1

    def module(self, node: Node) -> nn.Module | None:
        """The module that a call_module node calls, else None."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def object_type(self, node: Node) -> Any:
        """What a pattern's leaf or an object_type key is compared with: class, function or method name. (PAT-03)"""
        module = self.module(node)
        return node.target if module is None else module_type(module)

    def fused_parts(self, node: Node) -> tuple[FusedPart, ...]:
        """What a node was fused from, the root first; () for a node that is as it was traced. (QCM-05, QCM-07)"""
        found: tuple[FusedPart, ...] = node.meta.get(FUSED_PARTS, ())
        return found

    def object_types(self, node: Node) -> tuple[Any, ...]:
        """What object_type keys are compared with, the strongest first. (QCM-02, QCM-05)

        A fused module answers to its own class, then to its root's; a function or method to the class of the module
        that calls it, then to itself.
        """
        own = self.object_type(node)
        if node.op == "call_module":
            return (own, *(part.object_type for part in self.fused_parts(node)[:1]))  # rule: QCM-05
        _, caller = self._caller(node)
        return (own,) if caller is None else (caller, own)

    def _caller(self, node: Node) -> tuple[str, Any]:
        """Full name and class of the innermost module that calls a function or method; "" and None for the model."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return "", None
        path, kind = next(reversed(stack.values()))
        return str(path), kind

    def scope(self, node: Node) -> str:
        """Full name of the innermost module that makes this call; "" for the model itself."""
        return str(node.target).rpartition(".")[0] if node.op == "call_module" else self._caller(node)[0]

    def name(self, node: Node) -> str:
        """Full name that module_name keys are compared with: the called module's, or the calling one's. (QCM-02)"""
        return str(node.target) if node.op == "call_module" else self.scope(node)

    def order(self, node: Node) -> tuple[str, Any, int]:
        """(enclosing module's name, type, index among the calls of this type in it). A fused node counts as its root.

        For module_name_object_type_order. (QCM-02)
        """
        return self._order[node]

    def is_shared_state(self, node: Node) -> bool:
        """Tell whether a node's module has parameters or buffers and is called at more than one place. (FUS-07)"""
        module = self.module(node)
        if module is None or self.calls[id(module)] < 2:
            return False
        return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def positional_arguments(node: Node, at_least: int = 0) -> tuple[Any, ...]:
    """Return a node's positional arguments, the first `at_least` of them also when passed by keyword. (PAT-08)"""
    arguments = list(node.args)
    if len(arguments) < at_least and node.kwargs:
        names = _parameter_names(node.op, node.target)
        while len(arguments) < min(at_least, len(names)) and names[len(arguments)] in node.kwargs:  # rule: PAT-08
            arguments.append(node.kwargs[names[len(arguments)]])
    return tuple(arguments)


@cache
def _parameter_names(op: str, target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Names of a callee's positional parameters. Modules and methods here take one tensor, called input or self."""
    if op != "call_function" or not callable(target):
        return ("input",)
    known = _PARAMETERS.get(getattr(target, "__name__", ""))
    if known is not None:
        return known
    try:
        return tuple(inspect.signature(target).parameters)
    except ValueError:
        schemas: Any = get_signature_for_torch_op(target)
        return tuple(schemas[0].parameters) if schemas else ("input",)


def attribute_of(model: nn.Module, target: str) -> Any:
    """Return what a get_attr node of that target reads."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def tensor_inputs(arguments: Any) -> list[Node]:
    """List the nodes inside an argument structure, in order, without repeats."""
    found: dict[Node, None] = {}
    torch.fx.node.map_arg(arguments, lambda node: found.setdefault(node))
    return list(found)
