"""A float model as PT2E captures it: exported by torch.export, its calls read back, so that prepare decides about them.

torch.export runs the model's code, and so takes many a model that torch.fx cannot trace. It writes aten ops; from which
calls they come is read as `refimpl.exported.pt2e.BackendConfigQuantizer` reads it. A call that does not do what its ops
do is left as these ops, which no pattern names.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._pytree import SequenceKey, tree_flatten_with_path, tree_leaves, tree_unflatten

from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.own_models.given import GivenModel, ModelSpecError
from fx_quant_conformance.conformance.own_models.multiplications import without_fast_path
from fx_quant_conformance.refimpl import BackendConfig, QConfigMapping
from fx_quant_conformance.refimpl.config.qconfig import QConfigResolver, as_qconfig_mapping
from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.exported.calls import Calls, read_calls
from fx_quant_conformance.refimpl.exported.exported import export_open, open_module
from fx_quant_conformance.refimpl.graph.in_place import works_in_place
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.graph.tracing import Places, attribute_of, parameter_names_of
from fx_quant_conformance.reports.text import cut

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Path: TypeAlias = tuple[int, ...]
"""The indices that lead to a value in what a call returns; () is all of it."""
_Found: TypeAlias = dict[int, dict[Node, set[_Path]]]
"""By the number of the arguments that do: where the value of each op is in what the call returns."""
_ROOT = "model"
"""The model's name in its program."""
_STACK = "nn_module_stack"
MOST_SAID = 300
"""Characters of what torch.export says."""
_WHOLE = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Modules of torch that torch.fx does not go into, with linear layers in them."""


def capture(given: GivenModel, config: BackendConfig) -> GraphModule:
    """Return a copy of the float model, captured by torch.export, in which calls are called that patterns name.

    Axis 0 is dynamic, unless prepare could then not trace what is captured. Raises ModelSpecError if torch.export does
    not take the model, or if what is captured gives other bits than the model.
    """
    captured = _capture(given, config, dynamic_batch=True)
    if not _is_traceable(captured):
        captured = _capture(given, config, dynamic_batch=False)
    for batch in (given.example_inputs, *given.calibration):
        model, own = copy.deepcopy(given.model).eval(), copy.deepcopy(captured)
        with torch.no_grad(), without_fast_path():
            expected = model(*_clone(batch))
            try:
                found = own(*_clone(batch))
            except Exception as error:
                text = f"what torch.export writes does not run on all batches: {format_error(error)}"
                raise ModelSpecError(text) from error
        if not _are_equal(found, expected):
            raise ModelSpecError("as torch.export captures it, the model gives other bits than it does itself")
    return captured


def find_obstacle(model: nn.Module, config: BackendConfig) -> str:
    """Return why torch.fx does not trace a model to calls that can be quantized; "" if it does.

    It may not trace the model, or take as one call what has linear layers in it and no entry names.
    """
    try:
        traced = trace(copy.deepcopy(model).eval())
    except ModelError as error:
        return str(error)
    called = {type(traced.get_submodule(str(n.target))) for n in traced.graph.nodes if n.op == "call_module"}
    claimed = {leaf for entry in config.configs for leaf in tree_leaves(entry.pattern)}
    whole = [kind.__name__ for kind in called - claimed if issubclass(kind, _WHOLE)]
    return f"torch.fx does not go into {', '.join(whole)}" if whole else ""


def translate_mapping(captured: GraphModule, mapping: QConfigMapping) -> QConfigMapping:
    """Return a mapping with which prepare gives each function of a captured model the QConfig of its place. (QCM-02)

    Functions are called by the captured model itself; which module called them in the float model, `capture` noted.
    """
    spelled = copy.deepcopy(as_qconfig_mapping(mapping))
    places, resolver = Places(captured), QConfigResolver(as_qconfig_mapping(mapping))
    counts: dict[Any, int] = {}
    for node in captured.graph.nodes:
        if node.op in ("call_function", "call_method"):
            found = resolver.resolve(places.object_types_of(node), places.name_of(node), places.order_of(node))
            number = counts[node.target] = counts.get(node.target, -1) + 1
            spelled.set_module_name_object_type_order("", node.target, number, found.qconfig)
    return spelled


def _capture(given: GivenModel, config: BackendConfig, *, dynamic_batch: bool) -> GraphModule:
    """Return what torch.export writes, with calls in place of the ops that they became."""
    try:
        model = copy.deepcopy(given.model).eval()
        exported = export_open(model, _clone(given.example_inputs), dynamic_batch=dynamic_batch)
        if any(_writes_view(node) or _is_of_vmap(node) for node in exported.graph.nodes):
            exported = exported.run_decompositions({})
        program = open_module(exported)
    except Exception as error:
        text = cut(format_error(error), MOST_SAID)
        raise ModelSpecError(f"torch.export does not take the model: {text}") from error
    try:
        calls = read_calls(program, config.configs, _WHOLE)
        found = _find_calls(program, given, calls)
        return _write(exported, program, copy.deepcopy(given.model).eval(), found)
    except Exception as error:
        text = f"what torch.export writes of the model cannot be read back: {format_error(error)}"
        raise ModelSpecError(text) from error


def _writes_view(node: Node) -> bool:
    """Tell whether an op changes in place what is a part of another value, or has parts that others read.

    What prepare puts between a view and its base parts them.
    """
    written = node.all_input_nodes[:1] if node.op == "call_function" and works_in_place(node) else []
    parts = (each for value in written for each in (value, *(user for user in value.users if user < node)))
    return any(getattr(each.target, "is_view", False) for each in parts)


def _is_of_vmap(node: Node) -> bool:
    """Tell whether a node begins or ends a batch of torch.vmap's, of which no tensor can be copied."""
    return "functorch" in str(getattr(node.target, "__module__", ""))


def _is_traceable(captured: GraphModule) -> bool:
    """Tell whether torch.fx can trace it: it cannot give an op that makes a tensor a size that is not a number yet."""
    try:
        trace(captured)
    except ModelError:  # without a dynamic axis it is met again, and reported, where prepare traces
        return False
    return True


def _clone(batch: Batch) -> Batch:
    return tuple(value.clone() for value in batch)


def _are_equal(found: object, expected: object) -> bool:
    """Tell whether the tensors and numbers of two values are equal, bit for bit."""
    pairs = tree_leaves(found), tree_leaves(expected)
    if len(pairs[0]) != len(pairs[1]):
        return False
    return all(
        each.dtype is other.dtype and torch.equal(each, other)
        if isinstance(each, Tensor) and isinstance(other, Tensor)
        else type(each) is type(other) and bool(each == other)
        for each, other in zip(*pairs, strict=True)
    )


# -- which calls are called -------------------------------------------------------------------------------------------


class _CapturedCall(NamedTuple):
    """A call that does what its ops do, of which some may work in place."""

    op: str
    target: Any
    arguments: _Arguments
    """They are made of the program's nodes."""
    parts: tuple[Node, ...]
    results: dict[Node, _Path]
    """Where the value of each op that others read is in what the call returns."""
    stack: dict[str, tuple[str, Any]]
    """The modules that call it."""


def _find_calls(program: GraphModule, given: GivenModel, calls: Calls) -> list[_CapturedCall]:
    """Return the calls of a program that do what their ops do: on the example inputs, and on these with noise."""
    drafts = [node for node in calls.draft.graph.nodes if node.op.startswith("call_") and calls.parts[node.name]]
    listed = {draft: _list_arguments(calls, draft) for draft in drafts}
    trials = [_Trial(program, given.model, calls, listed) for _ in range(2)]
    with torch.no_grad(), without_fast_path():
        trials[0].run(*_make_contiguous(given.example_inputs))
        with suppress(Exception):  # a model need not run on noise: then less is known of the calls that it misses
            trials[1].run(*_make_contiguous(_add_noise(given.example_inputs)))
    found = []
    for draft, numbers in trials[0].found.items():
        others = trials[1].found.get(draft, numbers)
        both = {
            number: {part: paths & others[number][part] for part, paths in places.items()}
            for number, places in numbers.items()
            if number in others
        }
        number = next((number for number, places in both.items() if all(places.values())), None)
        if number is not None:
            results = {part: min(paths) for part, paths in both[number].items()}
            arguments, parts = listed[draft][number], calls.parts[draft.name]
            stack = _strip_root(draft.meta.get(_STACK, {}))
            found.append(_CapturedCall(draft.op, _target_of(draft), arguments, parts, results, stack))
    return found


def _make_contiguous(batch: Batch) -> Batch:
    return tuple(value.clone(memory_format=torch.contiguous_format) for value in batch)


def _add_noise(batch: Batch) -> Batch:
    """Return inputs whose floats have noise as large as their largest value, so that none is what others are."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        value + torch.randn(value.shape, generator=generator) * (float(value.abs().max()) or 1.0)
        if value.is_floating_point() and value.numel()
        else value
        for value in batch
    )


def _own_name(target: object) -> str:
    """Return the model's own name for a part of it that its program names; of the model itself, the program's."""
    return str(target).removeprefix(f"{_ROOT}.")


def _target_of(draft: Node) -> Any:
    return _own_name(draft.target) if draft.op == "call_module" else draft.target


def _strip_root(stack: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    return {key: (_own_name(name), kind) for key, (name, kind) in stack.items() if name != _ROOT}


def _find_module(model: nn.Module, name: str) -> nn.Module:
    return model if name == _ROOT and not hasattr(model, _ROOT) else model.get_submodule(name)


def _list_arguments(calls: Calls, draft: Node) -> list[_Arguments]:
    """Return what a call may have been given: what its ops are given, then less, or more.

    Of a module: the tensors, without sizes, which it reads itself; with those that are no part of it. Of a
    function: what it has names for; to work in place; the other way round. A function of several ops may have been
    given numbers that no op shows.
    """
    parts = calls.parts[draft.name]
    if draft.op != "call_module" and len(parts) > 1:
        return []
    args, kwargs = map_arg((draft.args, draft.kwargs), lambda node: calls.values[node.name])
    listed: list[_Arguments] = [(tuple(args), dict(kwargs))]
    if draft.op == "call_module":
        outer = [value for part in parts for value in part.all_input_nodes if value not in parts]
        tensors = [each for each in dict.fromkeys(outer) if isinstance(each.meta.get("val"), Tensor) or _is_held(each)]
        own = f"{draft.target}."
        listed += [
            (tuple(each for each in tensors if not _is_held(each)), {}),
            (tuple(each for each in tensors if not (_is_held(each) and str(each.target).startswith(own))), {}),
        ]
    elif draft.op == "call_function":
        names = parameter_names_of(draft.target)
        named = args[: len(names)], {name: value for name, value in kwargs.items() if name in names}
        listed.append(named)
        if "inplace" in names and works_in_place(parts[0]):
            listed.append((named[0], {**named[1], "inplace": True}))
        listed.append((tuple(reversed(args)), {}))  # 1 - x
    return listed


class _Trial(Interpreter):
    """Runs a program, and beside the ops of each call the call itself, on copies of the same values.

    ``listed``: what each call may have been given, by the draft's node. ``found``: what is known of those of these
    arguments with which the call does what its ops do.
    """

    def __init__(
        self, program: GraphModule, model: nn.Module, calls: Calls, listed: Mapping[Node, list[_Arguments]]
    ) -> None:
        super().__init__(copy.deepcopy(program), garbage_collect_values=False, graph=program.graph)
        self.found: dict[Node, _Found] = {}
        self._model = copy.deepcopy(model).eval()
        self._calls = calls
        self._listed = listed
        self._of_first = {calls.parts[node.name][0]: node for node in listed}
        self._of_last = {calls.parts[node.name][-1]: node for node in listed}
        self._read: dict[Node, dict[Node, Any]] = {}  # by the draft's node: values before its first op
        self._versions: dict[Node, dict[Node, list[int]]] = {}
        self._made: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module":  # what checks the inputs
            return None
        if n in self._of_first:
            draft = self._of_first[n]
            read = {node for arguments in self._listed[draft] for node in _nodes_of(arguments)}
            self._read[draft] = {node: copy.deepcopy(self.env[node]) for node in read if node in self.env}
            self._versions[draft] = {node: _versions_of(self.env[node]) for node in self._read[draft]}
        value = super().run_node(n)
        if n.op == "call_function":
            self._made[n] = copy.deepcopy(value)
        if n in self._of_last:
            self.found[self._of_last[n]] = self._try(self._of_last[n])
        return value

    def _try(self, draft: Node) -> _Found:
        """Call what a node of the draft calls, and compare with what its ops gave, and changed of their arguments."""
        parts, read, found = self._calls.parts[draft.name], self._read.pop(draft), _Found()
        changed = {node for node, before in self._versions.pop(draft).items() if _versions_of(self.env[node]) != before}
        results = [part for part in parts if not set(parts).issuperset(part.users)] or [parts[-1]]
        for number, arguments in enumerate(self._listed[draft]):
            nodes = _nodes_of(arguments)
            if not read.keys() >= nodes:  # it reads what is not there before its first op
                continue
            given = {node: copy.deepcopy(read[node]) for node in nodes}
            versions = {node: _versions_of(value) for node, value in given.items()}
            try:
                returned = self._call(draft, *map_arg(arguments, given.__getitem__))
            except Exception:  # the call does not take these arguments
                continue
            places = {part: _find_places(self._made[part], returned) for part in results}
            is_equal = all(places.values()) and all(_are_equal(given[node], self.env[node]) for node in nodes)
            if is_equal and changed == {node for node in nodes if _versions_of(given[node]) != versions[node]}:
                found[number] = places
        return found

    def _call(self, draft: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if draft.op == "call_module":
            return _find_module(self._model, _target_of(draft))(*args, **kwargs)
        return getattr(self, draft.op)(draft.target, args, kwargs)


def _nodes_of(arguments: _Arguments) -> set[Node]:
    return {value for value in tree_leaves(arguments) if isinstance(value, Node)}


def _versions_of(value: Any) -> list[int]:
    """Return how often each tensor of a value was changed in place."""
    return [leaf._version for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_held(node: Node) -> bool:
    """Tell whether a node reads a tensor of the model."""
    return node.op == "get_attr"


def _find_places(value: Any, returned: Any) -> set[_Path]:
    """Return where a value is in what was returned."""
    found = set[_Path]()
    if isinstance(value, Tensor) is isinstance(returned, Tensor) and _are_equal(value, returned):
        found.add(())
    for path, leaf in tree_flatten_with_path(returned)[0]:
        indices = tuple(key.idx for key in path if isinstance(key, SequenceKey))
        if path and len(indices) == len(path) and _are_equal(value, leaf):
            found.add(indices)
    return found


# -- writing them -----------------------------------------------------------------------------------------------------


def _write(
    exported: ExportedProgram, program: GraphModule, model: nn.Module, calls: Sequence[_CapturedCall]
) -> GraphModule:
    """Write a program again, with calls in place of their ops, and the names that the model has for its parts."""
    graph, new, held = Graph(), dict[Node, Node](), dict[str, Any]()
    of_part = {part: call for call in calls for part in call.parts}
    called = {call.target for call in calls if call.op == "call_module"}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            new[node] = graph.placeholder(str(node.target))
        elif node.op == "output":
            leaves = [new[each] if isinstance(each, Node) else each for each in node.args[0]]
            graph.output(tree_unflatten(leaves, exported.call_spec.out_spec))
        elif node.op == "get_attr":
            target = _name_tensor(_own_name(node.target), called)
            held[target] = attribute_of(program, str(node.target))
            new[node] = graph.get_attr(target)
        elif node not in of_part:
            if node.op == "call_function":
                new[node] = graph.node_copy(node, new.__getitem__)
                if node.target is torch.ops.aten.view.default:  # of a layout that quantization may change
                    new[node].target = torch.ops.aten.reshape.default
                new[node].meta[_STACK] = _strip_root(node.meta.get(_STACK) or {})
        elif node is of_part[node].parts[0]:
            call = of_part[node]
            if call.op == "call_module":
                held[call.target] = _find_module(model, call.target)
            new |= _write_call(graph, call, new)
    acting = {new[node] for node in new if works_in_place(node)}
    for node in reversed(graph.nodes):
        if not node.users and node.op in ("get_attr", "call_function") and node not in acting:
            graph.erase_node(node)
    return GraphModule(held, graph, type(model).__name__).eval()


def _name_tensor(name: str, called: set[str]) -> str:
    """Return the name of a tensor that ops read; another than its own if it is in a module that is called as well.

    Such a module is replaced when it is quantized, and its tensors with it.
    """
    is_replaced = any(name.startswith(f"{module}.") for module in called)
    return f"read_by_ops.{name.replace('.', '_')}" if is_replaced else name


def _write_call(graph: Graph, call: _CapturedCall, new: dict[Node, Node]) -> dict[Node, Node]:
    """Write a call; return the nodes that have the values of its ops."""
    args, kwargs = map_arg(call.arguments, new.__getitem__)
    created = graph.create_node(call.op, call.target, args, kwargs)
    created.meta[_STACK] = call.stack
    made = {call.parts[-1]: created}
    for part, path in call.results.items():
        made[part] = created
        for index in path:
            made[part] = graph.call_function(operator.getitem, (made[part], index))
    return made
