"""Tracing a model to an fx graph whose leaves a BackendConfig can name (CUS-02), and facts that later stages need."""

from __future__ import annotations

import copy
import gc
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, takewhile
from traceback import StackSummary, extract_tb, walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple, get_args

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized as nnq
from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer
from torch.fx._symbolic_trace import _create_wrapped_func
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as _PRESERVED
from torch.fx.node import map_arg
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn.utils.parametrize import type_before_parametrizations

from refimpl.errors import ModelError
from refimpl.graph_modules import Draft, FlowModule, can_be_saved

CALLS = ("call_module", "call_function", "call_method")  # the kinds of node that compute


class QuantizationTracer(Tracer):
    """Keeps as leaves: torch's own modules, fused modules, and those that the user names. (CUS-02)"""

    def __init__(self, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> None:
        super().__init__()
        self.leaf_names, self.leaf_classes = leaf_names, leaf_classes
        self._autowrap_search: list[Any] = []  # of the functions in ``math``; see _recorded_math
        self._functional: set[int] = set()
        self._lines: dict[tuple[CodeType, int], str] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """Trace as fx does; a FloatFunctional counts as the functions that it calls. (CUS-02)"""
        self._functional = {id(m.activation_post_process) for m in root.modules() if isinstance(m, nnq.FloatFunctional)}
        with _recorded_math():
            return super().trace(root, concrete_args)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Record a node and the lines of forward methods that made it; fx's own record takes as long as tracing."""
        node = super().create_node(*args, **kwargs)
        lines = [self._format_line(*item) for item in walk_stack(None) if item[0].f_code.co_name == "forward"]
        node.stack_trace = "".join(reversed(lines)).strip()
        return node

    def _format_line(self, frame: FrameType, number: int) -> str:
        """Return a line of a forward method as a traceback shows it; a line is looked up once."""
        key = (frame.f_code, number)
        if key not in self._lines:
            self._lines[key] = "".join(StackSummary.extract([(frame, number)]).format())
        return self._lines[key]

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call; the identity inside a FloatFunctional is no op, but an eager observer's place."""
        return args[0] if id(m) in self._functional else super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module stays one node. (CUS-02)"""
        is_named = module_qualified_name in self.leaf_names or type(m) in self.leaf_classes  # rule: CUS-02
        return is_named or is_whole(type(m))


def is_whole(kind: type) -> bool:
    """Tell whether modules of a class are never traced into: torch's own are not, but for Sequential. (CUS-02)"""
    is_torchs = kind.__module__.startswith(("torch.nn", "torch.ao.nn")) and not issubclass(kind, nn.Sequential)
    return is_torchs or issubclass(kind, nni._FusedModule)  # type: ignore[attr-defined]


@cache
def _record_calls_of_math() -> dict[str, Callable[..., Any]]:
    """Return the functions of ``math`` as fx records them; to make them anew takes a third of the time of a trace."""
    functions = {name: each for name, each in vars(math).items() if not name.startswith("_") and callable(each)}
    return {name: _create_wrapped_func(each) for name, each in functions.items()}


@contextmanager
def _recorded_math() -> Iterator[None]:
    """Let ``math`` record calls on traced values, as fx does itself where it searches the module for each trace."""
    before = dict(vars(math))
    vars(math).update(_record_calls_of_math())
    try:
        yield
    finally:
        vars(math).update(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while a pass runs; restore it after.

    A pass allocates objects that live on in its result, and the collector walks the whole heap again and again without
    finding any to free: a cost that grows faster than the model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_NOTES = "refimpl_notes"
CONVERTED = "refimpl_converted"  # the key of a note that convert has made the model
TORCH_NOTES = "_observed_graph_module_attrs"  # where torch's tools (torch.ao.ns) look for prepare's data


def finish(
    root: nn.Module | dict[str, Any], graph: Graph, like: GraphModule, preserved: Mapping[str, Any] | None = None
) -> GraphModule:
    """Return a FlowModule of a graph with the attributes in `root`; name, mode and notes are those of `like`.

    `preserved`: attributes that it, and its copies, must have (CUS-03). Attributes that fx preserves survive deepcopy;
    the notes are one, and so survive saving, which loses the meta.
    """
    model = FlowModule(root, graph, class_name=getattr(like, "origin", type(like).__name__))
    model.training = like.training
    for part in model.modules():
        if type(part) is nn.Module:  # the containers; the modules in them are the model's own
            part.training = like.training
    notes = {key: value for key, value in notes_of(like).items() if key not in (_PRESERVED, TORCH_NOTES)}
    attributes = {**(preserved or like.meta.get(_PRESERVED, {})), _NOTES: notes}
    model.meta = {**notes, _PRESERVED: attributes}  # rule: CUS-03, CVT-12
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def notes_of(model: nn.Module) -> dict[str, Any]:
    """Return the notes of the passes in a model's ``meta``, also after torch.save and load. (CVT-12)"""
    notes = getattr(model, "meta", None) or getattr(model, _NOTES, {})  # rule: CVT-12
    return notes if isinstance(notes, dict) else {}  # a model's own attribute may have that name


def add_note(model: GraphModule, key: str, value: Any) -> None:
    """Add a note to a finished model, where `notes_of` finds it. (CVT-12)"""
    for notes in (model.meta, getattr(model, _NOTES)):
        notes[key] = value


def draft_of(model: GraphModule) -> Draft:
    """Return a draft with a copy of a graph module's graph; the graph module itself is not changed."""
    draft = Draft(model, copy.deepcopy(model.graph))
    draft.training, draft.origin, draft.meta = model.training, type(model).__name__, dict(notes_of(model))
    return draft


def trace(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> Draft:
    """Trace a model. The modules are the original's. Raises ModelError naming its class if it cannot be traced."""
    tracer = QuantizationTracer(leaf_names, leaf_classes)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        own = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith((*torch.__path__, __file__))]
        place = f" (at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {own[-1].line})" if own else ""
        raise ModelError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}{place}. Make the untraceable part a leaf "
            "(non-traceable module names or classes), or rewrite its data-dependent control flow"
        ) from error
    for node in graph.nodes:
        if not _is_of_classes(node.type):
            node.type = None  # rule: CVT-12  a GraphModule with such an annotation cannot be saved
        if node.op == "call_module" and node.kwargs:  # a replacement may have other names
            names = parameter_names_of(tracer.root.get_submodule(str(node.target)).forward)
            node.args, node.kwargs = _move_to_positions(node, names)  # rule: PAT-08
    traced = Draft(tracer.root, graph)
    traced.training, traced.origin = model.training, type(model).__name__
    vars(tracer).clear()  # a cycle with fx's closures, which must not keep the model alive
    return traced


def _is_of_classes(annotation: Any) -> bool:
    """Tell whether an annotation is a class that can be saved, or generic and made of such: fx can write no other."""
    if parts := get_args(annotation):
        return all(map(_is_of_classes, parts))
    return annotation in (None, ..., Any) or (isinstance(annotation, type) and can_be_saved(annotation))


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, looking through parametrizations. (PAT-03)"""
    return type_before_parametrizations(module)


class FusedPart(NamedTuple):
    """A part of a fused module, as QConfigMapping keys see it."""

    object_type: Any
    name: str


FUSED_PARTS = "refimpl_fused_parts"  # the key of a node's meta that holds its FusedParts, the root's first


class Places:
    """The place of each node of a graph: its module, object type, enclosing module's name, index among its type.

    `qat_classes`: the replacements of module classes before they are quantized. (QAT-01)
    """

    def __init__(self, model: GraphModule, qat_classes: Mapping[type, type] | None = None) -> None:
        self._qat_classes = qat_classes or {}
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        called = model.graph.find_nodes(op="call_module", sort=False)
        self.calls = Counter(id(self.modules[str(node.target)]) for node in called)
        self._order: dict[Node, tuple[str, Any, int]] = {}
        counts: Counter[tuple[str, Any]] = Counter()
        for node in model.graph.nodes:
            if node.op in CALLS:
                parts = self.fused_parts_of(node)
                key = (self.scope_of(node), parts[0].object_type if parts else self.object_type_of(node))
                self._order[node] = (*key, counts[key])
                counts[key] += 1

    def module_of(self, node: Node) -> nn.Module | None:
        """Return the module that a call_module node calls, else None."""
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def object_type_of(self, node: Node) -> Any:
        """Return the class, function or method name that leaves and object_type keys are compared with. (PAT-03)"""
        module = self.module_of(node)
        if module is None:
            return node.target
        kind = class_of(module)
        return self._qat_classes.get(kind, kind)  # rule: QAT-01

    def fused_parts_of(self, node: Node) -> tuple[FusedPart, ...]:
        """Return the parts that a node was fused from, the root first; () if it was not fused. (QCM-05, QCM-07)"""
        return tuple(node.meta.get(FUSED_PARTS, ()))

    def object_types_of(self, node: Node) -> tuple[Any, ...]:
        """Return the types that object_type keys are compared with, the strongest first. (QCM-02, QCM-05)

        A fused module has its own class, then its root's; one to be swapped for training has its QAT class first; a
        function or method has the class of the module that calls it, then itself.
        """
        own, module = self.object_type_of(node), self.module_of(node)
        if module is not None:
            kinds = (own, class_of(module), *(part.object_type for part in self.fused_parts_of(node)[:1]))
            return tuple(dict.fromkeys(kinds))  # rule: QCM-05
        caller = self._caller_of(node)[1]
        return (own,) if caller is None else (caller, own)

    def _caller_of(self, node: Node) -> tuple[str, Any]:
        """Return full name and class of the innermost module that calls a function; "" and None for the model."""
        stack = node.meta.get("nn_module_stack")
        return next(reversed(stack.values())) if stack else ("", None)

    def scope_of(self, node: Node) -> str:
        """Return the full name of the innermost module that makes this call; "" for the model itself."""
        return str(node.target).rpartition(".")[0] if node.op == "call_module" else self._caller_of(node)[0]

    def name_of(self, node: Node) -> str:
        """Return the full name that module_name keys are compared with: the called or calling module's. (QCM-02)"""
        return str(node.target) if node.op == "call_module" else self.scope_of(node)

    def order_of(self, node: Node) -> tuple[str, Any, int]:
        """Return (enclosing module's name, type, index among its type's calls); a fused node's root's. (QCM-02)"""
        return self._order[node]

    def find_orders(self) -> set[tuple[str, Any, int]]:
        """Return the module_name_object_type_order keys of this graph."""
        return set(self._order.values())

    def is_shared_state(self, node: Node) -> bool:
        """Tell whether a node's module has parameters or buffers and is called at more than one place. (FUS-07)"""
        module = self.module_of(node)
        if module is None or self.calls[id(module)] < 2:
            return False
        return any(True for _ in chain(module.parameters(), module.buffers()))


def positional_arguments_of(node: Node, at_least: int = 0) -> tuple[Any, ...]:
    """Return a node's positional arguments, the first `at_least` of them also if passed by keyword. (PAT-08)"""
    if len(node.args) >= at_least or not node.kwargs or node.op == "call_module":  # modules' are laid out by `trace`
        return node.args
    return _move_to_positions(node, _operand_names_of(node.target)[:at_least])[0]  # rule: PAT-08


def _move_to_positions(node: Node, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, those of the parameters `names` by position, up to the first that is not given."""
    moved = list(takewhile(node.kwargs.__contains__, names[len(node.args) :]))
    kwargs = {name: value for name, value in node.kwargs.items() if name not in moved}
    return (*node.args, *(node.kwargs[name] for name in moved)), kwargs


@cache
def _operand_names_of(target: Callable[..., Any] | str) -> tuple[str, ...]:
    """Return the names of the parameters of a function, or of the torch function with a method's name."""
    return parameter_names_of(getattr(torch, target, None) if isinstance(target, str) else target)


def parameter_names_of(function: Any) -> tuple[str, ...]:
    """Return the names of parameters that a callable takes by position and keyword; without signature, one input."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        schemas: Any = get_signature_for_torch_op(function)
        if not schemas:
            return ("input",)
        signature = schemas[0]
    parameters = signature.parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def attribute_of(model: nn.Module, target: str) -> Any:
    """Return the value that a get_attr node of that target reads."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def layer_of(module: nn.Module) -> Any:
    """Return the layer itself, which is the first part of a fused module."""
    return module[0] if isinstance(module, nn.Sequential) else module


def compute_constants(model: nn.Module, arguments: Any) -> dict[Node, Any] | None:
    """Compute the nodes inside an argument structure and their inputs; None if one is an input of the model."""
    needed = list_nodes(arguments)
    for node in needed:  # grows in the loop
        if node.op == "placeholder":
            return None
        needed.extend(value for value in node.all_input_nodes if value not in needed)
    values: dict[Node, Any] = {}
    for node in sorted(needed):
        with torch.no_grad():
            values[node] = call_node(model, node, values.__getitem__)
    return values


def call_node(model: nn.Module, node: Node, value_of: Callable[[Node], Any], module: nn.Module | None = None) -> Any:
    """Compute a node that is no input or output; `value_of` its inputs, `module` in the place of the one it calls."""
    if node.op == "get_attr":
        return attribute_of(model, str(node.target))
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    called: Any = node.target
    if node.op == "call_method":
        called, args = getattr(args[0], str(node.target)), args[1:]
    elif node.op == "call_module":
        called = model.get_submodule(str(node.target)) if module is None else module
    return called(*args, **kwargs)


def list_nodes(arguments: Any) -> list[Node]:
    """List the nodes inside an argument structure, in order, without repeats."""
    nodes: dict[Node, None] = {}
    map_arg(arguments, lambda node: nodes.setdefault(node))
    return list(nodes)
