"""Decomposing: an op without a rule of its own is written in primitives by torch, and these are evaluated (NUM-04).

It is traced once for each shape of its operands, in the model's own dtypes, so that casts are there; what works in
place is made functional. Then each primitive is evaluated on exact values and their bounds. What is no primitive, and
has no decomposition, has an exact result of which no bound is known: it is undecided, and so is what depends on it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.names import format_error
from fx_quant_conformance.conformance.bounds.error_bounds import (
    JUMP,
    MOVES,
    Errors,
    NoOracleError,
    OpCall,
    OpRule,
    U,
    Value,
    add_error,
    as_operand,
    bound_dequantizing,
    is_inexact,
    settle_errors,
    widen,
)
from fx_quant_conformance.conformance.oracle.complex_numbers import ARITHMETIC, COMPLEX
from fx_quant_conformance.conformance.oracle.jumps import JUMPS
from fx_quant_conformance.conformance.oracle.marks import UNITS, is_value, real_of
from fx_quant_conformance.conformance.oracle.openings import OPENINGS, WithoutWrites
from fx_quant_conformance.conformance.oracle.primitives import PRIMITIVES, PUT_BY_INDEX
from fx_quant_conformance.refimpl.graph.in_place import works_in_place

_CREATING = frozenset(
    name for what in ("empty", "zeros", "ones", "full") for name in (what, f"new_{what}", f"{what}_like")
)
"""Ops that make a tensor like another, whose numbers they do not read."""
_OF_INTEGERS = frozenset({torch.ops.aten.tril_indices.default, torch.ops.aten.triu_indices.default})
"""Ops on integers that torch would write in floats."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _find(table: Mapping[str, Any], op: Any) -> Any:
    """Return what a table has of an overload of aten's, else of its op; None: nothing."""
    name = str(op).removeprefix("aten.").removeprefix("prims.")
    return table.get(name) or table.get(name.partition(".")[0])


_TABLE: dict[Any, Callable[..., Any]] = {
    op: decompose
    for op, decompose in torch._decomp.decomposition_table.items()
    if _find(PRIMITIVES, op) is None and _find(JUMPS, op) is None and op not in _OF_INTEGERS
} | dict(OPENINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class InPrimitives:
    """An op in primitives, for operands of some shapes."""

    graph: GraphModule
    spec: Any
    """The structure of its result."""
    moves: bool
    """Whether it moves values, and computes none."""
    last_read: Mapping[Node, Sequence[Node]]
    """The values that no node reads after one, by that one."""


def open_op(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InPrimitives:
    """Trace what an op calls, down to primitives. Raises NoOracleError for what cannot be traced."""
    leaves, spec = tree_flatten((args, dict(kwargs)), is_leaf=is_value)
    places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, (Tensor, Value))]
    examples = [_example_of(leaves[number]) for number in places]
    found: dict[str, Any] = {}

    def run(*tensors: Tensor) -> list[Any]:
        given = list(leaves)
        for number, tensor in zip(places, tensors, strict=True):
            given[number] = tensor
        own_args, own_kwargs = tree_unflatten(given, spec)
        with WithoutWrites():
            outputs, found["spec"] = tree_flatten(function(*own_args, **own_kwargs))
        return outputs

    was_enabled = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)  # it has whole recurrent layers
        with torch.no_grad():
            graph = _trace(run, examples)
            if any(_writes(node) for node in graph.graph.nodes):  # a decomposition works in place
                graph = _trace(graph, examples)
    except Exception as error:  # a module's forward may raise anything
        name = getattr(function, "__name__", type(function).__name__)
        raise NoOracleError(f"{name} cannot be written in primitives: {format_error(error)}") from error
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
    moves = all(_moves(node) for node in graph.graph.nodes if node.op == "call_function")
    last_read = torch.fx.Interpreter(graph).user_to_last_uses
    return InPrimitives(graph=graph, spec=found["spec"], moves=moves, last_read=last_read)


def _trace(run: Callable[..., Any], examples: Sequence[Tensor]) -> GraphModule:
    options: Any = {"decomposition_table": _TABLE, "_error_on_data_dependent_ops": False}
    trace = make_fx(functionalize(run), **options)
    graph: GraphModule = trace(*examples)
    return graph


def _writes(node: Node) -> bool:
    """Tell whether an op works in place on what is no operand of the whole."""
    return works_in_place(node) and node.all_input_nodes[0].op != "placeholder"


def describe(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what a trace depends on: shapes, layouts and dtypes of tensors, and all else as it is."""
    leaves, spec = tree_flatten((args, dict(kwargs)), is_leaf=is_value)
    texts = [
        f"{tuple(real_of(leaf).shape)} {real_of(leaf).stride()} {leaf.dtype}"
        if isinstance(leaf, (Tensor, Value))
        else repr(leaf)
        for leaf in leaves
    ]
    return f"{spec} {texts}"


def evaluate_opened(
    opened: InPrimitives, args: tuple[Any, ...], kwargs: Mapping[str, Any], capabilities: Capabilities
) -> tuple[Any, Mapping[int, Any]]:
    """Return the result of an op, and what the tensors that it changes in place have become, by their numbers."""
    leaves = [each for each in tree_leaves((args, dict(kwargs)), is_leaf=is_value) if isinstance(each, (Tensor, Value))]
    nodes = opened.graph.graph.nodes
    feed = iter(leaves if opened.moves else map(_enter, leaves))
    tolerance = max((each.tolerance for each in leaves if isinstance(each, Value)), default=0.0)
    values: dict[Node, Any] = {}
    changed: dict[int, Any] = {}
    inputs = [node for node in nodes if node.op == "placeholder"]
    for node in nodes:
        if node.op == "placeholder":
            values[node] = next(feed)
        elif node.op == "get_attr":
            values[node] = getattr(opened.graph, str(node.target))
        elif node.op == "output":
            results = [values[each] if isinstance(each, Node) else each for each in node.args[0]]
        else:
            given, named = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if node.target is torch.ops.aten.copy_.default and node.args[0] in inputs:
                values[node] = changed[inputs.index(node.args[0])] = given[1]
            else:
                values[node] = evaluate_primitive(node, given, named, capabilities)
            for each in opened.last_read.get(node, ()):
                del values[each]
    tolerated = [replace(each, tolerance=tolerance) if is_value(each) else each for each in results]
    return tree_unflatten(tolerated, opened.spec), changed


def _example_of(leaf: Tensor | Value) -> Tensor:
    """A tensor as the model has it."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.real.to(leaf.dtype)


def _moves(node: Node) -> bool:
    rule = _find(PRIMITIVES, node.target)
    return node.target is operator.getitem or (rule is not None and rule.arithmetic == MOVES)


def _enter(leaf: Tensor | Value) -> Any:
    """An operand from a grid is dequantized in float32 first."""
    if not isinstance(leaf, Value) or leaf.step is None or not leaf.real.is_floating_point():
        return leaf
    errors = add_error(dict(leaf.errors), "function", bound_dequantizing(leaf).expand_as(leaf.real))
    return Value(real=leaf.real, errors=errors, dtype=leaf.dtype)


# -- one primitive ----------------------------------------------------------------------------------------------------


def evaluate_primitive(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], capabilities: Capabilities) -> Any:
    """Evaluate a primitive on exact values; what no error can reach, as the model does."""
    target: Any = node.target
    if target is operator.getitem:
        return args[0][args[1]]
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise NoOracleError(f"the result of {target} is random")
    if target.overloadpacket.__name__ in _CREATING:
        return target(*tree_map(_as_example, args, is_leaf=is_value), **kwargs)
    leaves = tree_leaves((args, dict(kwargs)), is_leaf=is_value)
    rule, jump = _find(PRIMITIVES, target), _find(JUMPS, target)
    has_values = any(map(is_value, leaves))
    has_floats = any(map(is_inexact, leaves))
    if rule is not None and rule.arithmetic != MOVES and target.overloadpacket.__name__ not in (*COMPLEX, *ARITHMETIC):
        rule = None if any(map(_is_complex, leaves)) else rule
    if not has_values and (not has_floats or (rule is not None and rule.arithmetic == MOVES) or not (rule or jump)):
        run = target if rule is None or rule.arithmetic != MOVES or rule.exact is None else rule.exact
        return run(*args, **kwargs)  # creation, sizes, integers: exact
    call = OpCall(function=target, args=args, kwargs=kwargs, capabilities=capabilities)
    if jump is not None:
        return _settle(jump(call), node)
    if target.overloadpacket.__name__ in PUT_BY_INDEX and isinstance(args[2], Value):  # an undecided place
        args, rule = tree_map(lambda each: each if each is not args[2] else each.real, args, is_leaf=is_value), None
        call = replace(call, args=args)
    enter = _as_number if rule is not None and rule.arithmetic == MOVES else _as_float
    args, kwargs = tree_map(enter, (args, _in_double(kwargs)), is_leaf=is_value)
    function = target if rule is None or rule.exact is None else rule.exact
    call = replace(call, function=function, args=args, kwargs=kwargs)
    try:
        result = call.evaluate(lambda value: value.real.clone())
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if not node.users:  # it checks its operands
            return None
        raise NoOracleError(f"{target} does not run in float64: {format_error(error)}") from error
    if rule is None:
        return _settle(tree_map(_leave_open, result), node)
    call = replace(call, result=result)
    own_call = call if isinstance(result, Tensor) else None
    return _settle(_join(result, _round_in(node, call, rule)), node, own_call)


def _is_complex(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, Value)) and real_of(leaf).is_complex()


def _as_example(leaf: Any) -> Any:
    return _example_of(leaf) if isinstance(leaf, Value) else leaf


def _join(result: Any, errors: Any) -> Any:
    if isinstance(result, Tensor):
        return Value(real=result, errors=errors)
    if not isinstance(errors, tuple):
        errors = [{cause: each[number] for cause, each in errors.items()} for number in range(len(result))]
    return tuple(Value(real=each, errors=own) for each, own in zip(result, errors, strict=True))


def _leave_open(result: Any) -> Any:
    """A result of which nothing is known but its exact value."""
    if not isinstance(result, Tensor):
        return result
    unknown = torch.full(result.shape, math.inf, dtype=torch.float64)
    return Value(real=result, errors={JUMP: unknown}, dtype=result.dtype)


def _as_float(leaf: Any) -> Any:
    """A float tensor of the model is exact."""
    if is_inexact(leaf):
        return Value(real=widen(leaf.detach()), dtype=leaf.dtype)
    return as_operand(leaf) if isinstance(leaf, Value) else leaf


def _as_number(leaf: Any) -> Any:
    """A tensor that is moved: as number, whatever it holds."""
    return Value(real=widen(leaf), dtype=leaf.dtype) if isinstance(leaf, Tensor) else _as_float(leaf)


def _in_double(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.float64 if value in _FLOATS else value for name, value in kwargs.items()}


def _dtypes_of(node: Node) -> Sequence[torch.dtype]:
    return [each.dtype for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]


def _round_in(node: Node, call: OpCall, rule: OpRule) -> Any:
    """Return the errors of a call, and what an op rounds more that the model computes with fewer bits than float32.

    It rounds as often as in float32, and what is below the smallest normal number by half of the smallest step there.
    """
    errors = rule.bound(call)
    dtype = next(iter(_dtypes_of(node)), None)
    if rule.arithmetic == MOVES or dtype not in (torch.float16, torch.bfloat16):
        return errors
    exact = rule.bound(replace(call, args=tree_map(_without_errors, call.args, is_leaf=is_value)))

    def grow(whole: Errors, own: Errors, result: Tensor) -> Errors:
        total = sum(own.values(), torch.zeros_like(result))
        least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        more = total * (UNITS[dtype] / U - 1) + UNITS[dtype] * result.abs() + least
        return add_error(dict(whole), "function", more)

    if isinstance(errors, tuple):
        return tuple(map(grow, errors, exact, call.result))
    return grow(errors, exact, call.result)


def _without_errors(leaf: Any) -> Any:
    return Value(real=leaf.real, dtype=leaf.dtype) if isinstance(leaf, Value) else leaf


def _settle(value: Any, node: Node, call: OpCall | None = None) -> Any:
    """Give values the dtypes of the model; of what is no number, or infinite for some machines, nothing is known."""
    dtypes = iter(_dtypes_of(node))

    def settle(each: Any) -> Any:
        dtype = next(dtypes, torch.float32)
        if not isinstance(each, Value):
            return each
        errors = settle_errors(each.real, each.errors, call)
        if not dtype.is_floating_point and each.real.is_floating_point():  # integers, computed as numbers: none rounds
            undecided = replace(each, errors=errors).error() >= 0.5
            errors = {cause: torch.where(undecided, error, 0.0) for cause, error in errors.items()}
            return replace(each, real=each.real.round().to(dtype), errors=errors, dtype=dtype)
        return replace(each, errors=errors, dtype=dtype)

    return tuple(map(settle, value)) if isinstance(value, (tuple, list)) else settle(value)


def run_module(module: nn.Module) -> Callable[..., Any]:
    """Return what calls a module, as a function: its parameters are then constants of the trace."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return run
