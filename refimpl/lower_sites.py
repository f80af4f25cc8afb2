"""Deciding what can be lowered, and what takes its place, as data (rules LOW-01 to LOW-04). No graph is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from refimpl import lower_table as table
from refimpl.invariants import QUANTIZE, QUANTIZE_DYNAMIC, is_dequantize
from refimpl.lower_calls import REQUANTIZE, Blocked, Call, InputGrid, NotLowered, Tail
from refimpl.reference_build import packed
from refimpl.reference_convs import PLAIN
from refimpl.tracing import CALLS, attribute_of, constants, weighted


class Sites:
    """Decides for every float op on dequantized values what takes its place.

    ``calls``: what stands for a node of the reference graph; ``parts``: the modules and packed weights that these use,
    ``originals`` what the latter were made from; ``refused``: what stays. `quantized` names the nodes that are to be
    quantized at all; None: all. `unclaimed`: those of which nothing was decided, lowered where that is possible.
    `by_engine`: those whose range at run time is what torch's modules take. `keep_dropout`: as for ``lower``.
    """

    def __init__(
        self,
        model: GraphModule,
        quantized: frozenset[str] | None,
        *,
        unclaimed: frozenset[str] = frozenset(),
        by_engine: frozenset[str] = frozenset(),
        keep_dropout: bool = False,
    ) -> None:
        self.calls: dict[Node, Call] = {}
        self.parts: dict[str, Any] = {}
        self.originals: dict[str, list[Any]] = {}
        self.refused: list[NotLowered] = []
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self._quantized, self._unclaimed = quantized, unclaimed
        self._by_engine, self._keep_dropout = by_engine, keep_dropout
        self._places = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
        self._names: Counter[str] = Counter()
        self._grids = {node: grid for node in model.graph.nodes if (grid := self._grid(node)) is not None}
        self._grids |= {given: grid for node, grid in self._grids.items() if (given := _given(node)) is not None}
        for node in model.graph.nodes:
            if node.target is QUANTIZE and is_dequantize(node.args[0]):
                readers = ", ".join(str(user) for dequantize in node.users for user in dequantize.users)
                reason = f"OBS-02, OBS-14: {readers} asks for another range than the value has"
                self.refused.append(NotLowered(node=node.name, op=REQUANTIZE, reason=reason))  # rule: LOW-04
            elif node.op in CALLS and node.target is not QUANTIZE and not is_dequantize(node):
                self._visit(node, self._kind(node))

    def _visit(self, node: Node, kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, GraphModule):
            return  # it is lowered by itself
        if kind in table.WEIGHT_ONLY_MODULES or any(map(is_dequantize, node.all_input_nodes)):
            is_wanted = self._quantized is None or node.name in self._quantized
            if is_wanted or node.name in self._unclaimed or kind in table.WELCOME:  # rule: QCM-03
                try:
                    self._handler(node, kind)(self, node, kind)
                except Blocked as blocked:
                    if is_wanted:
                        target = self._plain(self._module(node)) if node.op == "call_module" else node.target
                        op = str(getattr(target, "__name__", target))
                        self.refused.append(NotLowered(node=node.name, op=op, reason=str(blocked)))  # rule: LOW-04

    def _handler(self, node: Node, kind: Any) -> Callable[[Sites, Node, Any], None]:
        is_dynamic = kind in table.DYNAMIC_MODULES and self._operand(node)[0].target is QUANTIZE_DYNAMIC
        handler = Sites._dynamic_module if is_dynamic else _HANDLERS.get(kind)
        if handler is None:  # rule: LOW-01
            raise Blocked("LOW-01: no row of the table")
        subject = weighted(self._module(node)) if node.op == "call_module" else node
        for test, reason in table.LIMITS.get(kind if subject is node else self._plain(subject), ()):
            if test(subject):
                raise Blocked(f"LOW-03: {reason.format(subject)}")  # rule: LOW-03
        if self._is_in_place(node) and len(self._operand(node)[0].users) != 1:  # rule: LOW-03
            raise Blocked(f"LOW-03: {node.name} works in place on a value that other ops read")
        return handler

    # -- reading -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _plain(module: Any) -> type:
        """A module's class, that of torch's for one that stands for it."""
        return PLAIN.get(type(module), type(module))

    def _module(self, node: Node) -> Any:
        return self._modules[str(node.target)]

    def _kind(self, node: Node) -> Any:
        """What the tables are asked for; an attribute is asked for by its name, like a method."""
        if node.op != "call_module":
            return node.args[1] if node.target is getattr else node.target
        module, inner = self._module(node), weighted(self._module(node))
        kinds = [self._plain(each) for each in (module, inner)]
        return kinds[0] if inner is module else tuple(kinds)

    def _attribute(self, argument: Any) -> Any:
        return attribute_of(self._modules[""], str(argument.target)) if isinstance(argument, Node) else argument

    def _source(self, value: Any) -> Node:
        """The quantized value behind a dequantize."""
        source = value.args[0] if is_dequantize(value) else None
        if not isinstance(source, Node):
            raise Blocked(f"LOW-03: argument {value} is not dequantized: the op would mix float and quantized")
        for user in value.users if len(value.users) > 1 else ():
            if self._is_in_place(user) and user.all_input_nodes[0] is value:  # rule: LOW-03
                raise Blocked(f"LOW-03: {user.name} works in place on {value.name}, which other ops read")
        return source

    def _operand(self, node: Node) -> tuple[Node, tuple[Any, ...], dict[str, Any]]:
        """Split a call into the quantized value behind its first argument, and the other arguments. (PAT-08)"""
        value, *args = node.args or (node.kwargs.get("input"),)
        return self._source(value), tuple(args), {key: given for key, given in node.kwargs.items() if key != "input"}

    def _only_user(self, node: Node) -> Node:
        if len(node.users) != 1:
            raise Blocked(f"LOW-03: {node.name} has {len(node.users)} users; one quantized op has one output")
        return next(iter(node.users))

    def _grid(self, value: Node) -> InputGrid | None:
        """The qparams of a quantized value; None for a float value, or if another graph decides them."""
        if value.target is QUANTIZE:
            dtype: Any = value.args[3]
            if (given := _given(value)) is not None:
                return InputGrid(given, given, dtype)
            scale, zero_point = map(self._attribute, value.args[1:3])
            return InputGrid(float(scale), int(zero_point), dtype)
        is_float16 = value.op == "call_method" and value.target == "to" and value.args[1:] == (torch.float16,)
        return InputGrid(1.0, 0, torch.float16) if is_float16 else None

    def _tail(self, node: Node, sources: Any, target: Any, with_relu: Any = None, keeps: bool = False) -> Tail:
        """Read what follows an op, each the only user of what it follows: a relu, the quantize node. (PAT-06)

        Refuse it if no quantized op makes that of these sources; one that `keeps` qparams makes none but its input's.
        """
        last, user = node, self._only_user(node)
        if with_relu is not None and self._kind(user) in table.RELUS:
            target, last, user = with_relu, user, self._only_user(user)
        grid = self._grids.get(user)
        if grid is None:
            raise Blocked(f"LOW-01: {last.name} is not quantized: its user is {user.name}")
        inputs = [(source, self._grids.get(source)) for source in sources if isinstance(source, Node)]
        for dtype in (grid.dtype, *(found.dtype for _, found in inputs if found is not None)):
            is_native = dtype is not torch.float16 or self._kind(node) in table.ON_QUANTIZED
            if dtype is not grid.dtype or not is_native:
                raise Blocked(f"LOW-03: no quantized op of {dtype} values whose result is {grid.dtype}")
        keeps |= self._keep_dropout and self._kind(node) in table.DROPOUTS
        for source, found in inputs:
            if keeps and found != grid:  # rule: LOW-03
                raise Blocked(f"LOW-03: {source.name} and the output differ in qparams; the op keeps its input's")
        return Tail(user, grid, target)

    def _is_in_place(self, node: Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._module(node), "inplace", False))
        name = str(getattr(node.target, "__name__", node.target))
        return node.op in CALLS and (name.endswith("_") or bool(node.kwargs.get("inplace")))

    # -- rewriting -----------------------------------------------------------------------------------------------------

    def _write(self, node: Node, tail: Tail, *args: Any, **kwargs: Any) -> None:
        """Let a call stand for everything up to the quantize node."""
        op = "call_function" if callable(tail.target) else node.op
        self.calls[tail.quantize] = Call(op=op, target=tail.target, args=args, kwargs=kwargs, origin=node)

    def _swap(self, node: Node, name: Any, native: Any, *qparams: Any) -> None:
        """Make the quantized module, under a name. (LOW-01)"""
        made = _packing(packed, native, self._module(node), *qparams)
        self.parts[str(name)] = made.train(self._modules[""].training)

    def _weight_only_module(self, node: Node, kind: Any) -> None:
        """Embeddings: the weight alone is quantized. (LOW-02, CVT-11)"""
        self._swap(node, node.target, table.WEIGHT_ONLY_MODULES[kind])

    def _dynamic_module(self, node: Node, kind: Any) -> None:
        """A module that quantizes its input at run time. (LOW-02, CVT-03, CVT-04)"""
        source, args, kwargs = self._operand(node)
        dtype, is_reduced = _asked(source)
        inner, is_seven = weighted(self._module(node)), is_reduced or node.name in self._by_engine  # rule: LOW-03
        is_whole = not (is_seven or dtype is torch.float16 or _is_qnnpack())  # and torch's modules take 7 bits
        if is_whole and not isinstance(inner, nn.RNNBase) and kind not in table.WHOLE_RANGE_LINEARS:
            raise Blocked("LOW-03: the quantized cell takes 7 bits of its inputs; all 8 are asked for")
        if str(node.target) not in self.parts:
            native = table.WHOLE_RANGE_LINEARS.get(kind) if is_whole else None
            self._swap(node, node.target, native or table.DYNAMIC_MODULES[kind])
            if is_whole and native is None:
                made = self.parts[str(node.target)]
                made.version = 1  # before torch reduced the range
                made.set_weight_bias(inner.get_quantized_weight_bias_dict())
        self.calls[node] = Call(
            op=node.op, target=node.target, args=(source.args[0], *args), kwargs=kwargs, origin=node
        )

    def _shape(self, node: Node, kind: Any) -> None:
        """A quantized tensor has the shape of the float one. (LOW-02)"""
        source, args, kwargs = self._operand(node)
        self.calls[node] = Call(op=node.op, target=node.target, args=(source, *args), kwargs=kwargs, origin=node)

    def _static_module(self, node: Node, kind: Any) -> None:
        """A module with the output's qparams, and with packed weights if it has any. (LOW-01)"""
        sources = tuple(self._source(value) for value in (*node.args, *node.kwargs.values()) if value is not None)
        tail = self._tail(node, sources, self._own_name(node))
        if _given(tail.quantize) is not None:
            raise Blocked("LOW-03: the output has the qparams of a given value; the quantized module holds its own")
        weight_dtype = getattr(weighted(self._module(node)), "weight_dtype", torch.qint8)
        if weight_dtype is not torch.qint8:
            raise Blocked(f"LOW-03: the quantized module packs qint8 weights, not {weight_dtype}")
        self._swap(node, tail.target, table.MODULES[kind], *map(self._attribute, tail.quantize.args[1:3]))
        self._write(node, tail, *sources)

    def _own_name(self, node: Node) -> str:
        """Name the module that is made for this call: each call has output qparams of its own. (LOW-03)"""
        target = str(node.target)
        names = (f"{target}_{number}" for number in count())
        free = (name for name in names if name not in self._modules and name not in self.parts)  # rule: LOW-03
        return target if self._places[target] == 1 else next(free)

    def _packed_function(self, node: Node, kind: Any) -> None:
        """A function whose quantized form takes a packed weight. (LOW-02)"""
        arguments = dict(zip(("input", "weight"), node.args, strict=False)) | node.kwargs  # rule: PAT-08
        source, weight = self._source(arguments.pop("input")), self._source(arguments.pop("weight"))
        if source.target is QUANTIZE_DYNAMIC:
            self._dynamic_function(node, source, weight, arguments)
            return
        row = table.STATIC_FUNCTIONS[kind]
        tail = self._tail(node, (source,), row.plain, row.with_relu)
        if weight.args[-1] is not torch.qint8:
            raise Blocked(f"LOW-03: the quantized function packs qint8 weights, not {weight.args[-1]}")
        self._write(node, tail, source, self._packed(node, row, weight, arguments), *tail.quantize.args[1:3])

    def _dynamic_function(self, node: Node, source: Node, weight: Node, arguments: dict[str, Any]) -> None:
        """A function that quantizes its input at run time, with relu if that is its only user. (CVT-03, CVT-04)"""
        dtype, is_reduced = _asked(source)
        row = table.DYNAMIC_FUNCTIONS.get((node.target, dtype, weight.args[-1]))
        if row is None:
            raise Blocked(f"LOW-01: no row of the table for {dtype} inputs and {weight.args[-1]} weights")
        packed = self._packed(node, row, weight, arguments)
        relus = [user for user in node.users if self._kind(user) in table.DYNAMIC_RELUS]
        last, function = (relus[0], row.with_relu) if relus and len(node.users) == 1 else (node, row.plain)
        args = (source.args[0], packed, *(() if dtype is torch.float16 else (is_reduced,)))
        self.calls[last] = Call(op="call_function", target=function, args=args, origin=node)

    def _packed(self, node: Node, row: table.PackedFunction, weight: Node, arguments: dict[str, Any]) -> Call:
        """Pack a weight now if the model holds all that it depends on, else when the model runs. (LOW-02)"""
        others = row.pack_arguments(node.args[2:], arguments)
        if any(isinstance(value, str) for value in others):
            raise Blocked(f"LOW-03: arguments {others}: the quantized op takes numbers")
        read = constants(self._modules[""], (weight, *others))
        if read is None:
            return Call(op="call_function", target=row.prepack, args=(weight, *others))
        tensors = [value for constant, value in read.items() if constant.op == "get_attr"]
        return self._held(node, row, map_arg([weight, *others], read.__getitem__), tensors)

    def _held(self, node: Node, row: table.PackedFunction, arguments: Any, tensors: list[torch.Tensor]) -> Call:
        """Pack a weight and hold it under a name of its own; `tensors` are what it was made from."""
        stack = node.meta.get("nn_module_stack")
        scope = str(next(reversed(stack.values()))[0]) if stack else ""
        prefix = f"{scope}_packed_weight_".replace(".", "_")
        name = f"{prefix}{self._names[prefix]}"
        self.parts[name] = _packing(row.prepack, *arguments)
        self._names[prefix] += 1
        self.originals[name.lower()] = sorted(tensors, key=torch.Tensor.numel, reverse=True)
        return Call(op="get_attr", target=name)

    def _binary(self, node: Node, kind: Any) -> None:
        """add, mul and matmul of two quantized tensors, or of one and a number, with or without relu. (LOW-02)"""
        arguments = dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs  # rule: PAT-08
        operands = (arguments.pop("input"), arguments.pop("other"))
        if arguments.pop("alpha", 1) != 1 or arguments:  # rule: LOW-03
            raise Blocked(f"LOW-03: arguments {dict(node.kwargs)} cannot be expressed by the quantized op")
        sources = tuple(value if isinstance(value, (int, float)) else self._source(value) for value in operands)
        tail = self._tail(node, sources, *table.BINARY[kind])
        qparams = tail.quantize.args[1:3] if all(isinstance(source, Node) for source in sources) else ()
        self._write(node, tail, *sources, *qparams)

    def _with_output_qparams(self, node: Node, kind: Any) -> None:
        """Functions whose quantized form takes the output's scale and zero point. (LOW-02)"""
        function, unknown = table.WITH_OUTPUT_QPARAMS[kind]
        source, args, kwargs = self._operand(node)
        tail = self._tail(node, (source,), function)
        known = {name: value for name, value in kwargs.items() if name not in unknown}
        scale, zero_point = tail.quantize.args[1:3]
        self._write(node, tail, source, *args, **known, output_scale=scale, output_zero_point=zero_point)

    def _fixed_qparams(self, node: Node, kind: Any) -> None:
        """Ops whose quantized kernel has output qparams of its own, where the reference has the same. (LOW-02)"""
        source, args, kwargs = self._operand(node)
        target = str(node.target).removesuffix("_") if node.op == "call_method" else node.target  # no kernels in place
        tail = self._tail(node, (source,), target)
        own = table.FIXED_QPARAMS[kind][tail.grid.dtype]
        if own != tail.grid[:2]:  # rule: LOW-03
            raise Blocked(f"LOW-03: the result has (scale, zero point) {tail.grid[:2]}, the quantized op's are {own}")
        self._write(node, tail, source, *args, **kwargs)

    def _on_quantized(self, node: Node, kind: Any) -> None:
        """Run an op that keeps qparams on the quantized tensors themselves. (LOW-02)"""
        sources: dict[Any, Any] = {v: self._source(v) for v in node.all_input_nodes if is_dequantize(v)}
        tail = self._tail(node, tuple(sources.values()), node.target, keeps=True)
        if kind in table.REQUANTIZING:  # rule: OBS-02
            sources = {value: self._before(node, source) for value, source in sources.items()}
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda value: sources.get(value, value))
        self._write(node, tail, *args, **kwargs)

    def _before(self, node: Node, source: Node) -> Node:
        """The value on another grid that was requantized for this op alone: its kernel does that itself."""
        if source.target is not QUANTIZE or not is_dequantize(source.args[0]):
            return source
        inner = self._source(source.args[0])
        readers = [user for dequantize in source.users for user in dequantize.users]
        if readers != [node] or inner not in self._grids or self._grids[inner].dtype is not self._grids[source].dtype:
            return source
        self.refused = [refused for refused in self.refused if refused.node != source.name]
        return inner


_HANDLERS: Mapping[Any, Callable[[Sites, Node, Any], None]] = {
    **dict.fromkeys(table.ON_QUANTIZED, Sites._on_quantized),
    **dict.fromkeys(table.SHAPE_OF, Sites._shape),
    **dict.fromkeys(table.MODULES, Sites._static_module),
    **dict.fromkeys(table.STATIC_FUNCTIONS, Sites._packed_function),
    **dict.fromkeys(table.BINARY, Sites._binary),
    **dict.fromkeys(table.WITH_OUTPUT_QPARAMS, Sites._with_output_qparams),
    **dict.fromkeys(table.FIXED_QPARAMS, Sites._fixed_qparams),
    **dict.fromkeys(table.WEIGHT_ONLY_MODULES, Sites._weight_only_module),
}


def _given(quantize: Node) -> Node | None:
    """The value whose qparams a quantize takes while running, if it does. (OBS-11)"""
    scale = quantize.args[1] if quantize.target is QUANTIZE else None
    is_read = isinstance(scale, Node) and scale.op == "call_method" and scale.target == "q_scale"
    return scale.all_input_nodes[0] if is_read else None  # type: ignore[union-attr]


def _asked(source: Node) -> tuple[Any, bool]:
    """The dtype that a value gets at run time, and whether its range is reduced to 7 bits: qnnpack always takes 8."""
    _, dtype, is_reduced = source.args
    if is_reduced and dtype is not torch.float16 and _is_qnnpack():  # rule: LOW-03
        raise Blocked("LOW-03: the range is reduced to 7 bits; qnnpack quantizes to 8 at run time")
    return dtype, bool(is_reduced)


def _is_qnnpack() -> bool:
    return torch.backends.quantized.engine == "qnnpack"


def _packing(function: Callable[..., Any], *args: Any) -> Any:
    """Call what packs a weight; an engine that cannot pack it says so by a RuntimeError."""
    try:
        with torch.no_grad():
            return function(*args)
    except RuntimeError as error:
        raise Blocked(f"LOW-01: {torch.backends.quantized.engine}: {str(error).splitlines()[0]}") from error
