"""Tracing a model to an fx graph whose leaves a BackendConfig can name (CUS-02), with what it writes to (TRC-01)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import currentframe
from traceback import StackSummary, extract_tb
from types import CodeType, FrameType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx._symbolic_trace import _create_wrapped_func

from fx_quant_conformance.refimpl.errors import ModelError
from fx_quant_conformance.refimpl.graph.graph_modules import Draft, FlowModule, can_be_saved
from fx_quant_conformance.refimpl.graph.tracing import is_whole, move_to_positions, parameter_names_of
from fx_quant_conformance.refimpl.legacy import FloatFunctional

IN_PLACE = "refimpl_in_place"  # the key of the meta of a call that an operator such as += made


class _TracedValue(Proxy):
    """Records what torch.fx does not: that ``y += 1`` writes into the memory of y, and ``y[0] = 1``. (TRC-01)"""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _make_augmented(name: str) -> Callable[[Any, Any], Any]:
    def augment(self: Any, other: Any) -> Any:
        result = getattr(operator, name)(self, other)
        if isinstance(result, Proxy):
            result.node.meta[IN_PLACE] = True
        return result

    return augment


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(_TracedValue, f"__i{_operator.strip('_')}__", _make_augmented(_operator))


class QuantizationTracer(Tracer):
    """Keeps as leaves: torch's own modules, fused modules, and those that the user names. (CUS-02)"""

    def __init__(
        self, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = (), written: Collection[str] = ()
    ) -> None:
        """`written`: the full names of buffers to be traced, because forward writes to them."""
        super().__init__()
        self.leaf_names, self.leaf_classes, self.written = leaf_names, leaf_classes, written
        self.read: dict[str, tuple[Tensor, Tensor, int]] = {}  # buffers, their numbers and versions when first read
        self._buffers: dict[int, str] = {}
        self._autowrap_search: list[Any] = []  # of the functions in ``math``; see _recorded_math
        self._functional: set[int] = set()
        self._lines: dict[tuple[CodeType, int], str] = {}

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """Trace as fx does; a FloatFunctional counts as the functions that it calls. (CUS-02)"""
        self._buffers = {id(buffer): name for name, buffer in root.named_buffers()}
        self._functional = {id(m.activation_post_process) for m in root.modules() if isinstance(m, FloatFunctional)}
        with _recorded_math():
            return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module, as a traced value if it is a parameter, or a buffer that is written to."""
        name = self._buffers.get(id(attr_val))
        if name is not None and name in self.written:
            return self.create_proxy("get_attr", name, (), {})
        if name is not None and name not in self.read:
            self.read[name] = attr_val, attr_val.clone(), attr_val._version
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def restore_buffers(self) -> list[str]:
        """Give the buffers that forward wrote to while it was traced their numbers again; return their names."""
        written = [name for name, (buffer, _, version) in self.read.items() if buffer._version != version]
        with torch.no_grad():
            for buffer, numbers, _ in map(self.read.__getitem__, written):
                buffer.copy_(numbers)
        return written

    def proxy(self, node: Node) -> Proxy:
        """Return the traced value of a node."""
        return _TracedValue(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Record a node and the lines of forward methods that made it; fx's own record takes as long as tracing."""
        node = super().create_node(*args, **kwargs)
        lines, frame = list[str](), currentframe()
        while frame is not None:  # faster than walk_stack, which finds the line of each frame
            if frame.f_code.co_name == "forward":
                lines.append(self._format_line(frame, frame.f_lineno))
            frame = frame.f_back
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


def trace(model: nn.Module, leaf_names: tuple[str, ...] = (), leaf_classes: tuple[type, ...] = ()) -> Draft:
    """Trace a model. The modules are the original's. Raises ModelError naming its class if it cannot be traced.

    Tracing runs forward, and so would write to buffers: those that it writes to are traced as values, in a second run.
    """
    tracer = QuantizationTracer(leaf_names, leaf_classes)
    graph, written = _trace(model, tracer)
    if written:  # rule: TRC-01
        tracer = QuantizationTracer(leaf_names, leaf_classes, written)
        graph, written = _trace(model, tracer)
        if written:
            advice = "compute it in the module's constructor, or make the module a leaf"
            raise ModelError(f"{type(model).__name__}: forward gives buffer {written[0]!r} a new constant: {advice}")
    for node in graph.nodes:
        if not _is_of_classes(node.type):
            node.type = None  # rule: CVT-12  a GraphModule with such an annotation cannot be saved
        if node.op == "call_module" and node.kwargs:  # a replacement may have other names
            names = parameter_names_of(tracer.root.get_submodule(str(node.target)).forward)
            node.args, node.kwargs = move_to_positions(node, names)  # rule: PAT-08
    _check_names(model, graph)
    traced = Draft(tracer.root, graph, type(model).__name__)
    traced.training = model.training
    vars(tracer).clear()  # a cycle with fx's closures, which must not keep the model alive
    return traced


def _trace(model: nn.Module, tracer: QuantizationTracer) -> tuple[Graph, list[str]]:
    """Trace a model; return the names of the buffers that it wrote to without a trace. The model stays as it was."""
    before = [(prefix, module, dict(module._buffers)) for prefix, module in model.named_modules() if module._buffers]
    try:
        graph = tracer.trace(model)
        assigned = _find_assigned(before)
        for name, value in assigned.items():
            if isinstance(value, Proxy) and IN_PLACE not in value.node.meta:
                with graph.inserting_before(graph.output_node()):  # rule: TRC-01
                    graph.call_method("copy_", (graph.get_attr(name), value.node))
    except Exception as error:
        own = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith((*torch.__path__, __file__))]
        place = f" (at {own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}: {own[-1].line})" if own else ""
        raise ModelError(
            f"{type(model).__name__} cannot be traced by torch.fx: {error}{place}. Make the untraceable part a leaf "
            "(non-traceable module names or classes), or rewrite its data-dependent control flow"
        ) from error
    finally:
        for _, module, buffers in before:
            module._buffers.update(buffers)
    concrete = [name for name, value in assigned.items() if not isinstance(value, Proxy)]
    return graph, [*concrete, *tracer.restore_buffers()]


@cache
def _list_own_names() -> frozenset[str]:
    """Return the names of the attributes that each graph module has of its own."""
    return frozenset(dir(FlowModule(nn.Module(), Graph()))) - frozenset(dir(nn.Module()))


def _check_names(model: nn.Module, graph: Graph) -> None:
    """Raise ModelError where the graph names an attribute that each graph module has of its own. (TRC-02)"""
    named = (str(node.target).partition(".")[0] for node in graph.nodes if node.op in ("get_attr", "call_module"))
    if (name := next(filter(_list_own_names().__contains__, named), None)) is not None:  # rule: TRC-02
        of_fx = "a graph module of torch.fx, which the result is, has an attribute of that name"
        raise ModelError(f"{type(model).__name__}: {of_fx}: rename the model's {name!r}")


def _find_assigned(before: list[tuple[str, nn.Module, dict[str, Any]]]) -> dict[str, Any]:
    """Return the values that forward put in the place of buffers, by the buffers' full names."""
    return {
        f"{prefix}.{name}".lstrip("."): module._buffers.get(name)
        for prefix, module, buffers in before
        for name, buffer in buffers.items()
        if module._buffers.get(name) is not buffer
    }


def _is_of_classes(annotation: Any) -> bool:
    """Tell whether an annotation is a class that can be saved, or generic and made of such: fx can write no other."""
    if parts := get_args(annotation):
        return all(map(_is_of_classes, parts))
    return annotation in (None, ..., Any) or (isinstance(annotation, type) and can_be_saved(annotation))
