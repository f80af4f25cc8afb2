"""The calls of modules, functions and methods in an exported program's graph, as a traced model has them.

torch.export writes aten ops, and beside each of them which modules were being called, and which function or method it
comes from. From these notes the graph of calls is made again, on which prepare decides: patterns name these callees.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fx_quant_conformance.refimpl.config.backend_config import BackendPatternConfig
from fx_quant_conformance.refimpl.config.patterns import leaves
from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.example_run import Examples, Fact, Seen
from fx_quant_conformance.refimpl.graph.graph_modules import Draft
from fx_quant_conformance.refimpl.graph.in_place import works_in_place
from fx_quant_conformance.refimpl.graph.matching import find_matches
from fx_quant_conformance.refimpl.graph.tracing import Places, attribute_of, is_whole, parameter_names_of

_STACK, _NOTE, _VALUE = "nn_module_stack", "torch_fn", "val"  # keys of an exported node's meta
ANNOTATION = "quantization_annotation"  # the key at which a Quantizer puts what it says of a node
_ATTENTION = "multi_head_attention_forward"  # what export notes of all that a module of attention calls
_OPERATORS = {"div": operator.truediv, "div_": operator.itruediv}
"""Operators whose name is not that of the method of tensors."""


class CallingModule(NamedTuple):
    """A module that was being called: the key of that call, the module's full name, and its class if known."""

    key: str
    name: str
    kind: type | None


@dataclass(slots=True, kw_only=True)
class ExportedCall:
    """One call, with the exported nodes that it became, in graph order."""

    module: CallingModule | None
    """The module that is called; None: a function."""
    scopes: tuple[CallingModule, ...]
    """The modules that were being called around it."""
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The graph of calls of an exported program."""

    draft: Draft
    """The graph; its modules have the class and the tensors of the called ones, and cannot be run."""
    examples: Examples
    values: dict[str, Node]
    """The exported node that has the value of each node of the draft, by name."""
    parts: dict[str, tuple[Node, ...]]
    """The exported nodes that each node of the draft stands for, by name, in graph order."""
    callees: dict[str, tuple[Any, ...]]
    """The functions and methods that each may come from, by name, where export does not tell them apart."""


def read_calls(program: GraphModule, entries: Sequence[BackendPatternConfig], opened: tuple[type, ...] = ()) -> Calls:
    """Return the calls of an exported program's module (``ExportedProgram.module()``), which is not changed.

    ``entries``: those of the config; a module whose class is in a pattern is called as a whole, as torch's own are, but
    for classes that are ``opened``. Export does not tell ``F.relu`` from ``torch.relu``, nor an operator from a
    method: that one is taken which is in the larger pattern there.

    Raises ModelError for a graph module that calls modules or methods: it was not exported, or is prepared already.
    """
    refuse_other_programs(program)
    named = {leaf for entry in entries for leaf in leaves(entry.normal_pattern) if isinstance(leaf, type)}
    calls = _Writer(program).write(_group_calls(program, named, opened))
    _choose_callees(calls, entries)
    return calls


def refuse_other_programs(program: object) -> None:
    """Raise ModelError for what is not the module of an exported program, or is prepared already."""
    if not isinstance(program, GraphModule):
        raise ModelError(
            f"{type(program).__name__} is no graph module: give torch.export.export(model, inputs).module()"
        )
    for node in program.graph.nodes:
        if node.op == "call_method" or (node.op == "call_module" and node.users):  # what checks the inputs has none
            raise ModelError(
                f"{type(program).__name__} is no exported program: {node.name} calls {node.target}, where aten ops are "
                "expected. Give torch.export.export(model, inputs).module()"
            )


def _choose_callees(calls: Calls, entries: Sequence[BackendPatternConfig]) -> None:
    """Let each call that may have several callees call the one with which most of its surroundings match a pattern."""
    graph, places = calls.draft.graph, Places(calls.draft)
    open_nodes = [node for node in graph.nodes if node.name in calls.callees]
    best: dict[Node, tuple[int, int]] = {}  # the most leaves of a pattern there, and which callee has them
    for turn in range(max((len(callees) for callees in calls.callees.values()), default=0)):
        for node in open_nodes:
            _set_callee(node, calls.callees[node.name], turn)
        for match in find_matches(graph, places, entries):
            for node in match.nodes:
                if len(match.nodes) > best.get(node, (0, 0))[0]:
                    best[node] = len(match.nodes), turn
    for node in open_nodes:
        _set_callee(node, calls.callees[node.name], best.get(node, (0, 0))[1])


def _set_callee(node: Node, callees: Sequence[Any], turn: int) -> None:
    """Let a node call one of several; with fewer of them than turns, the last."""
    node.target = callees[min(turn, len(callees) - 1)]
    node.op = _op_of(node.target)


def _op_of(callee: Any) -> str:
    return "call_method" if isinstance(callee, str) else "call_function"


def _group_calls(program: GraphModule, named: Collection[type], opened: tuple[type, ...]) -> list[ExportedCall]:
    """Divide the aten ops among the calls that they come from, in graph order of the first op.

    ``named``: the classes of modules that patterns name. ``opened``: those that are gone into.
    """
    calls: list[ExportedCall] = []
    of_module: dict[str, ExportedCall] = {}
    last: Any = None
    for node in (each for each in program.graph.nodes if each.op == "call_function"):
        scopes = callers_of(node)
        kinds = [each.kind for each in scopes]
        whole = [kind is not None and is_whole(kind) and not issubclass(kind, opened) for kind in kinds]
        depth = next((at for at, kind in enumerate(kinds) if kind in named or whole[at]), None)
        source = (scopes, node.meta.get(_NOTE))
        is_part = node.target is operator.getitem and calls and calls[-1].nodes == [node.args[0]]
        if depth is not None:
            key = scopes[depth].key
            if key not in of_module:
                of_module[key] = ExportedCall(module=scopes[depth], scopes=scopes[:depth])
                calls.append(of_module[key])
            of_module[key].nodes.append(node)
            last = None
        elif source == last and source[1] is not None and not is_part and not (opened and _ATTENTION in str(source[1])):
            calls[-1].nodes.append(node)
        else:
            calls.append(ExportedCall(module=None, scopes=scopes, nodes=[node]))
            last = None if is_part else source
    return calls


def callers_of(node: Node) -> tuple[CallingModule, ...]:
    """Return the modules that were being called at an exported node, without the program itself."""
    stack = node.meta.get(_STACK) or {}
    callers = (CallingModule(key, name.partition("@")[0], _find_class(kind)) for key, (name, kind) in stack.items())
    return tuple(caller for caller in callers if caller.name)


def _find_class(kind: str | type) -> type | None:
    """Return a class by its full name; None: no module has it, as one that a function defines."""
    if isinstance(kind, type):
        return kind
    module, _, name = kind.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _find_callees(node: Node, *, is_alone: bool) -> Iterator[Any]:
    """Yield the functions, operators and methods that an exported node may come from, by its note.

    ``is_alone``: it is all that the call became.
    """
    kind, _, name = (node.meta.get(_NOTE) or ("", ""))[1].rpartition(".")
    if name.endswith("_") and not name.endswith("__") and not works_in_place(node):  # decomposed to what is not
        name = name[:-1]
    if node.target is operator.getitem:
        yield operator.getitem
    elif name == _ATTENTION and is_alone:  # its layers are calls of their own
        yield from (F.linear,) if node.target is torch.ops.aten.linear.default else ()
    elif kind.endswith("_descriptor"):  # of a method of tensors
        in_place = f"i{name.removesuffix('_')}" if name.endswith("_") and not name.endswith("__") else name
        yield from filter(None, (_OPERATORS.get(name), getattr(operator, in_place, None)))
        yield name
    elif name.startswith("__"):
        plain = f"__{name[3:]}" if name.startswith("__r") else name  # reflected: a number stands first
        yield from filter(None, (getattr(operator, name, None), getattr(operator, plain, None)))
    elif kind:
        modules = (F, torch) if kind == "function" else (torch, F)  # of Python, and of C++
        yield from filter(callable, (getattr(module, name, None) for module in modules))
    yield node.target


class _Writer:
    """Writes the draft."""

    def __init__(self, program: GraphModule) -> None:
        self._program = program
        self._callees: dict[str, tuple[Any, ...]] = {}
        self._root = nn.Module()
        self._graph = Graph()
        self._new: dict[Node, Node] = {}  # exported node → the node of the draft that has its value
        self._values: dict[str, Node] = {}
        self._parts: dict[str, tuple[Node, ...]] = {}
        self._facts: dict[Node, Fact] = {}

    def write(self, calls: list[ExportedCall]) -> Calls:
        ends = {call.nodes[-1]: call for call in calls}
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                self._note(self._graph.placeholder(str(node.target)), node, (node,))
            elif node.op == "output":
                self._graph.output(map_arg(node.args[0], self._value_of))
            elif node in ends:
                self._write_call(ends[node])
        draft = Draft(self._root, self._graph, type(self._program).__name__)
        draft.training = False
        examples = Examples.of_facts(draft, self._facts)
        return Calls(draft=draft, examples=examples, values=self._values, parts=self._parts, callees=self._callees)

    def _write_call(self, call: ExportedCall) -> None:
        """Write the node of a call, and one for each of its values if there are several."""
        own, first, parts = set(call.nodes), call.nodes[0], tuple(call.nodes)
        stack = {each.key: (each.name, each.kind) for each in call.scopes}
        outer = [value for node in call.nodes for value in node.all_input_nodes if value not in own]
        args: tuple[Any, ...] = tuple(dict.fromkeys(outer))
        kwargs: dict[str, Any] = {}
        callees: tuple[Any, ...] = ()
        if call.module is not None:
            held = [value for value in args if value.op == "get_attr"]
            self._put_module(call, held)
            args = tuple(value for value in args if value not in held)
        else:
            callees = tuple(dict.fromkeys(_find_callees(first, is_alone=len(parts) == 1)))
            if len(parts) == 1:
                args, kwargs = _lay_out(first, callees[0])
        args, kwargs = map_arg(args, self._value_of), map_arg(kwargs, self._value_of)
        target = callees[0] if call.module is None else call.module.name
        op = "call_module" if call.module is not None else _op_of(target)
        created = self._graph.create_node(op, target, args, kwargs, name=parts[-1].name)
        created.meta[_STACK] = stack
        if len(callees) > 1:
            self._callees[created.name] = callees
        results = [node for node in parts if not own.issuperset(node.users)] or [parts[-1]]
        if len(results) == 1:
            self._note(created, results[0], parts)
            return
        self._values[created.name], self._parts[created.name] = parts[-1], parts
        self._facts[created] = tuple(map(_fact_of, results))
        for index, node in enumerate(results):
            self._note(self._graph.call_function(operator.getitem, (created, index)), node, ())

    def _value_of(self, node: Node) -> Node:
        """Return the draft's node for an exported value; a tensor of the model gets one for each of its uses."""
        if node.op != "get_attr":
            return self._new[node]
        target = str(node.target)
        scope, _, name = target.rpartition(".")
        setattr(_find_holder(self._root, scope), name, attribute_of(self._program, target))
        created = self._graph.get_attr(target)
        self._note(created, node, (node,))
        return created

    def _put_module(self, call: ExportedCall, held: list[Node]) -> None:
        """Put a module of the called one's class in its place, with its parts and the tensors that the call reads."""
        assert call.module is not None
        own = call.module.name
        called = {each.name: each.kind for node in call.nodes for each in callers_of(node)}
        for name in sorted(name for name in called if f"{name}.".startswith(f"{own}.")):
            scope, _, last = name.rpartition(".")
            _find_holder(self._root, scope).add_module(last, _make_stand_in(called[name] or nn.Module))
        for node in held:
            value, (scope, _, last) = attribute_of(self._program, str(node.target)), str(node.target).rpartition(".")
            is_inside = f"{scope}.".startswith(f"{own}.")  # a tied tensor has the name of its other owner
            holder = _find_holder(self._root, scope if is_inside else own)
            (holder.register_parameter if isinstance(value, nn.Parameter) else holder.register_buffer)(last, value)
        _describe(self._root.get_submodule(own), call.nodes)

    def _note(self, created: Node, value: Node, parts: tuple[Node, ...]) -> None:
        if value.op != "get_attr":
            self._new[value] = created
        self._facts[created] = _fact_of(value)
        self._values[created.name], self._parts[created.name] = value, parts


def _lay_out(node: Node, callee: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an exported op as a callee takes them: by name from where it has another order.

    The numbers at the end have names too, if the callee is a Python function: by position they count for a pattern,
    and export does not tell which way they were given. (PAT-04)
    """
    names = argument_names_of(node)[: len(node.args)]
    if not names or isinstance(callee, str):
        return node.args, dict(node.kwargs)
    own = parameter_names_of(callee)
    at = next((at for at, name in enumerate(names) if name in own and own.index(name) != at), len(names))
    numbers = len(node.args) - sum(1 for _ in takewhile(lambda x: isinstance(x, int | float), reversed(node.args)))
    if isinstance(callee, FunctionType) and set(own).issuperset(names[numbers:]):
        at = min(at, numbers)
    return node.args[:at], {**dict(zip(names[at:], node.args[at:], strict=True)), **node.kwargs}


def argument_names_of(node: Node) -> list[str]:
    """Return the names of all arguments that an exported op takes; none for what is no op, as getitem."""
    schema = getattr(node.target, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments that an exported op is given, by name."""
    return {**dict(zip(argument_names_of(node), node.args, strict=False)), **node.kwargs}


def _make_stand_in(kind: type[nn.Module]) -> nn.Module:
    """Return a module of a class that has no tensors, and cannot be run."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module.eval()


def _describe(module: nn.Module, nodes: Sequence[Node]) -> None:
    """Give a stand-in what fuser methods read of a layer or batch norm, as far as its ops and tensors tell it.

    These are the arguments of its constructor, and None for the tensors that it does not have.
    """
    known: dict[str, Any] = {}
    for node in nodes:
        known |= arguments_of(node)
    if isinstance(module, (nn.Linear, _ConvNd, _BatchNorm)):
        absent = {"weight", "bias", "running_mean", "running_var"} - {*module._parameters, *module._buffers}
        vars(module).update(dict.fromkeys(absent))
        known |= _measure_sizes(module, known.get("groups", 1))
    own = {*parameter_names_of(type(module))} & {*known}
    vars(module).update({name: known[name] for name in own if not isinstance(known[name], Node)})


def _measure_sizes(module: nn.Linear | _ConvNd | _BatchNorm, groups: int) -> dict[str, Any]:
    """Return the arguments of a constructor that tensors tell."""
    if isinstance(module, _BatchNorm):
        held = [value for value in (module.weight, module.running_mean) if value is not None]
        sizes = {"num_features": len(held[0])} if held else {}
        return {**sizes, "affine": module.weight is not None, "track_running_stats": module.running_mean is not None}
    if module.weight is None:  # an expression's value, such as that of a parametrization
        return {}
    first, second = module.weight.shape[:2]
    if isinstance(module, nn.Linear):
        return {"out_features": first, "in_features": second}
    if isinstance(module, _ConvTransposeNd):
        return {"in_channels": first, "out_channels": second * groups}
    return {"out_channels": first, "in_channels": second * groups}


def _find_holder(root: nn.Module, scope: str) -> nn.Module:
    """Return the module of a full name under a root; it and those around it are made if they are absent."""
    for name in filter(None, scope.split(".")):
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


def _fact_of(node: Node) -> Fact:
    value = node.meta.get(_VALUE)
    if isinstance(value, (tuple, list)):
        return tuple(Seen(part.dim(), part.dtype) if isinstance(part, Tensor) else None for part in value)
    return Seen(value.dim(), value.dtype) if isinstance(value, Tensor) else None
