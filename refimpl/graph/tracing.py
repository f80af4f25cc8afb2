"""The graphs of traced models: how a pass starts and ends one, and the facts of their nodes that all passes need."""

from __future__ import annotations

import copy
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as _PRESERVED
from torch.fx.node import map_arg
from torch.fx.operator_schemas import get_signature_for_torch_op
from torch.nn.utils.parametrize import type_before_parametrizations

from fx_quant_conformance.refimpl.graph.graph_modules import Draft, FlowModule, ModeConstant, free_name
from fx_quant_conformance.refimpl.legacy import is_torchs, nni

CALLS = ("call_module", "call_function", "call_method")  # the kinds of node that compute


def is_whole(kind: type) -> bool:
    """Tell whether modules of a class are never traced into: torch's own are not, but for Sequential. (CUS-02)"""
    return (is_torchs(kind) and not issubclass(kind, nn.Sequential)) or issubclass(kind, nni._FusedModule)


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
NOT_LOWERED = "not_lowered"  # the key of a note on what a lowered model has in float
TORCH_NOTES = "_observed_graph_module_attrs"  # where torch's tools look for prepare's data


def finish(
    root: nn.Module | dict[str, Any], graph: Graph, like: GraphModule, preserved: Mapping[str, Any] | None = None
) -> GraphModule:
    """Return a FlowModule of a graph with the attributes in `root`; name, mode and notes are those of `like`.

    `preserved`: attributes that it, and its copies, must have (CUS-03). Attributes that fx preserves survive deepcopy;
    the notes are one, and so survive saving, which loses the meta.
    """
    model = FlowModule(root, graph, class_name=type(like).__name__)
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


def add_notes(model: Any, notes: Mapping[str, Any]) -> None:
    """Add to the notes of a finished model, also to those that survive saving. (CVT-12)"""
    for own in (model.meta, getattr(model, _NOTES)):
        own.update(notes)


OBSERVER_PREFIX = "activation_post_process_"  # of observers' names

_OBSERVERS_HAVE = ("calculate_qparams", "get_input_minmax", "get_weight_col_minmax")


def is_observer(name: str, module: object) -> bool:
    """Tell whether a module is an observer that prepare put in; the user's may have such names. (TRC-02)"""
    return name.startswith(OBSERVER_PREFIX) and any(hasattr(module, method) for method in _OBSERVERS_HAVE)


def draft_of(model: GraphModule) -> Draft:
    """Return a draft with a copy of a graph module's graph; the graph module itself is not changed."""
    draft = Draft(model, copy.deepcopy(model.graph), type(model).__name__)
    draft.training, draft.meta = model.training, dict(notes_of(model))
    return draft


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
    return node.args if len(node.args) >= at_least else lay_out_arguments(node, at_least)[0]


def lay_out_arguments(node: Node, most: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, as many as may be (at most `most`) by position, and the others by keyword. (PAT-08)"""
    if not node.kwargs or node.op == "call_module":  # modules' are laid out by `trace`
        return node.args, node.kwargs
    return move_to_positions(node, _operand_names_of(node)[:most])  # rule: PAT-08


def move_to_positions(node: Node, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a node's arguments, those of the parameters `names` by position, up to the first that is not given."""
    moved = list(takewhile(node.kwargs.__contains__, names[len(node.args) :]))
    kwargs = {name: value for name, value in node.kwargs.items() if name not in moved}
    return (*node.args, *(node.kwargs[name] for name in moved)), kwargs


def _operand_names_of(node: Node) -> tuple[str, ...]:
    """Return the names of the parameters of a called function, or of the torch function with a called method's name."""
    target: Any = getattr(torch, node.target, None) if isinstance(node.target, str) else node.target
    return _names_of(target, frozenset(node.kwargs))


def parameter_names_of(function: Any, given: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the names of parameters that a callable takes by position and keyword; without signature, one input.

    Of several signatures counts the first that has all parameters `given`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        schemas: Any = get_signature_for_torch_op(function)
        if not schemas:
            return ("input",)
        signature = next((each for each in schemas if given <= each.parameters.keys()), schemas[0])
    parameters = signature.parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


_names_of = cache(parameter_names_of)  # functions, which are there for good; modules come and go


def attribute_of(model: nn.Module, target: str) -> Any:
    """Return the value that a get_attr node of that target reads."""
    owner, _, name = target.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def memory_of(value: Any) -> Hashable:
    """Return what is equal for two values that a model holds if a write to one may be a write to the other."""
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
    return value.untyped_storage().data_ptr() if is_plain else id(value)


def list_reads(model: GraphModule) -> list[tuple[Node, Any]]:
    """List the nodes that read a tensor of a model, or a parametrization of it, with what they read. (TRC-03)"""
    reads: list[tuple[Node, Any]] = [
        (node, attribute_of(model, str(node.target))) for node in model.graph.find_nodes(op="get_attr")
    ]
    called = (node for node in model.graph.find_nodes(op="call_module") if ".parametrizations." in f".{node.target}")
    return [*reads, *((node, model.get_submodule(str(node.target))) for node in called)]


def keep_reads(model: GraphModule, reads: Iterable[tuple[Node, Any]]) -> None:
    """Let reads have what they had before modules were replaced, under a name of the model's if need be. (TRC-03)"""
    for node, value in reads:
        try:
            is_kept = attribute_of(model, str(node.target)) is value
        except AttributeError:
            is_kept = False
        if not is_kept:
            name = free_name(model, str(node.target).replace(".", "_"))  # rule: TRC-03
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            (model.register_buffer if is_buffer else model.__setattr__)(name, value)
            node.target = name


def find_constants(model: GraphModule) -> set[Node]:
    """Return the nodes whose value is computed of parameters and buffers only, and is the same each time. (OBS-16)"""
    written = {str(value.target) for node in model.graph.nodes if is_effect(node) for value in _sources_of(node)}
    constants: set[Node] = set()
    for node in model.graph.nodes:
        if node.op == "get_attr":
            is_constant = str(node.target) not in written
        else:
            is_constant = constants.issuperset(node.all_input_nodes) and _is_repeatable(model, node)
        if is_constant:
            constants.add(node)
    return constants


def is_effect(node: Node) -> bool:
    """Tell whether a node is kept for what it writes to an input or a buffer, though nothing reads it. (TRC-01)"""
    return node.op == "call_method" and node.target == "copy_" and not node.users


def _sources_of(effect: Node) -> Iterator[Node]:
    """Yield the node that reads the buffer which an effect writes to."""
    for value in effect.all_input_nodes[:1]:
        yield from value.all_input_nodes[:1] if value.target is getattr else [value]


def _is_repeatable(model: GraphModule, node: Node) -> bool:
    """Tell whether a call gives the same result each time, and has no parameters of its own."""
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        if isinstance(module, ModeConstant):
            return True
        is_bare = is_whole(type(module)) and not any(True for _ in chain(module.parameters(), module.buffers()))
        name = type(module).__name__.lower()
    else:
        is_bare = node.op in CALLS and bool(node.all_input_nodes)
        name = str(getattr(node.target, "__name__", node.target))
    is_random = name == "normal" or any(part in name for part in _RANDOM)
    return is_bare and not name.endswith("_") and not is_random


_RANDOM = ("rand", "dropout", "rrelu", "bernoulli", "multinomial", "poisson", "empty", "fractional", "gumbel")
"""Parts of the names of ops that draw numbers, or give numbers that nobody wrote."""


def layer_of(module: nn.Module) -> Any:
    """Return the layer itself, which is the first part of a fused module."""
    return module[0] if isinstance(module, nn.Sequential) else module


def compute_constants(model: nn.Module, arguments: Any) -> dict[Node, Any] | None:
    """Compute the nodes inside an argument structure and their inputs; None if one is an input of the model.

    Constants of the mode are those of deployment.
    """
    needed = list_nodes(arguments)
    for node in needed:  # grows in the loop
        if node.op == "placeholder":
            return None
        needed.extend(value for value in node.all_input_nodes if value not in needed)
    values: dict[Node, Any] = {}
    for node in sorted(needed):
        constant = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(constant, ModeConstant):
            values[node] = constant.in_deployment
            continue
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


def line_of(node: Node) -> str:
    """Return the line of the user's code that made a node, as text for an error; "" if it is not known."""
    frame, _, code = (node.stack_trace or "").rpartition("\n")
    if not code:
        return ""
    place = frame.rpartition("\n")[2].strip().removeprefix('File "')
    path, _, rest = place.partition('", line ')
    return f" (at {path.rpartition('/')[2]}:{rest.partition(',')[0]}: {code.strip()})"


def list_nodes(arguments: Any) -> list[Node]:
    """List the nodes inside an argument structure, in order, without repeats."""
    nodes: dict[Node, None] = {}
    map_arg(arguments, lambda node: nodes.setdefault(node))
    return list(nodes)
