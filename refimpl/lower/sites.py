"""Deciding which ops can be lowered, and their replacements, as data (rules LOW-01 to LOW-04). No graph is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fx_quant_conformance.refimpl.convert.reference_convs import PLAIN
from fx_quant_conformance.refimpl.graph.graph_modules import free_names
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize
from fx_quant_conformance.refimpl.graph.tracing import CALLS, attribute_of, compute_constants, layer_of
from fx_quant_conformance.refimpl.legacy.quantized_tensors import QUANTIZE, QUANTIZE_DYNAMIC
from fx_quant_conformance.refimpl.lower import table as table
from fx_quant_conformance.refimpl.lower.calls import REQUANTIZE, Blocked, Call, InputGrid, NotLowered, Tail
from fx_quant_conformance.refimpl.lower.packing import pack_native

Names: TypeAlias = frozenset[str]


class Sites:
    """Chooses the replacement of every float op on dequantized values.

    ``calls``: the replacements of nodes of the reference graph; ``parts``: the modules and packed weights that these
    use; ``originals``: the tensors of packed weights; ``refused``: the ops that stay. `quantized` names the nodes to be
    quantized at all; None: all. `unclaimed`: nodes without a decision, lowered where that is possible. `by_engine`:
    nodes whose range at run time is the one that torch's modules take. `keep_dropout`: as for ``lower``.
    """

    def __init__(
        self, model: GraphModule, quantized: Names | None, unclaimed: Names, by_engine: Names, keep_dropout: bool
    ) -> None:
        self.calls: dict[Node, Call] = {}
        self.parts: dict[str, Any] = {}
        self.originals: dict[str, list[Any]] = {}
        self.refused: list[NotLowered] = []
        self._modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self._quantized, self._unclaimed = quantized, unclaimed
        self._by_engine, self._keep_dropout = by_engine, keep_dropout
        self._calls_of = Counter(str(node.target) for node in model.graph.nodes if node.op == "call_module")
        self._names: dict[str, Iterator[str]] = {}
        self._grids = {node: grid for node in model.graph.nodes if (grid := self._read_grid(node)) is not None}
        self._grids |= {owner: grid for node, grid in self._grids.items() if (owner := _find_owner(node)) is not None}
        for node in model.graph.nodes:
            if node.target is QUANTIZE and is_dequantize(node.args[0]):
                readers = ", ".join(str(user) for dequantize in node.users for user in dequantize.users)
                reason = f"OBS-02, OBS-14: {readers} asks for another range than the value has"
                self.refused.append(NotLowered(node=node.name, op=REQUANTIZE, reason=reason))  # rule: LOW-04
            elif node.op in CALLS and node.target is not QUANTIZE and not is_dequantize(node):
                self._visit(node, self._kind_of(node))

    def _visit(self, node: Node, kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, GraphModule):
            return  # it is lowered separately
        if kind in table.WEIGHT_ONLY_MODULES or any(map(is_dequantize, node.all_input_nodes)):
            is_wanted = self._quantized is None or node.name in self._quantized
            if is_wanted or node.name in self._unclaimed or kind in table.WELCOME:  # rule: QCM-03
                try:
                    self._find_handler(node, kind)(self, node, kind)
                except Blocked as blocked:
                    if is_wanted:
                        target = _plain_class_of(self._module_of(node)) if node.op == "call_module" else node.target
                        op = str(getattr(target, "__name__", target))
                        self.refused.append(NotLowered(node=node.name, op=op, reason=str(blocked)))  # rule: LOW-04

    def _find_handler(self, node: Node, kind: Any) -> Callable[[Sites, Node, Any], None]:
        is_dynamic = kind in table.DYNAMIC_MODULES and self._split_operand(node)[0].target is QUANTIZE_DYNAMIC
        handler = Sites._lower_dynamic_module if is_dynamic else _HANDLERS.get(kind)
        if handler is None:  # rule: LOW-01
            raise Blocked("LOW-01: torch has no quantized op for it")
        subject = layer_of(self._module_of(node)) if node.op == "call_module" else node
        for test, reason in table.LIMITS.get(kind if subject is node else _plain_class_of(subject), ()):
            if test(subject):
                raise Blocked(f"LOW-03: {reason.format(subject)}")  # rule: LOW-03
        if self._is_in_place(node) and len(self._split_operand(node)[0].users) != 1:  # rule: LOW-03
            raise Blocked(f"LOW-03: {node.name} works in place on a value that other ops read")
        return handler

    def _module_of(self, node: Node) -> Any:
        return self._modules[str(node.target)]

    def _kind_of(self, node: Node) -> Any:
        """Return a node's key in the tables; an attribute's is its name, like a method's."""
        if node.op != "call_module":
            return node.args[1] if node.target is getattr else node.target
        module, inner = self._module_of(node), layer_of(self._module_of(node))
        return _plain_class_of(module) if inner is module else (_plain_class_of(module), _plain_class_of(inner))

    def _read_attribute(self, argument: Any) -> Any:
        return attribute_of(self._modules[""], str(argument.target)) if isinstance(argument, Node) else argument

    def _source_of(self, value: Any) -> Node:
        """Return the quantized value of a dequantize."""
        source = value.args[0] if is_dequantize(value) else None
        if not isinstance(source, Node):
            raise Blocked(f"LOW-03: argument {value} is not dequantized: the op would mix float and quantized")
        for user in value.users if len(value.users) > 1 else ():
            if self._is_in_place(user) and user.all_input_nodes[0] is value:  # rule: LOW-03
                raise Blocked(f"LOW-03: {user.name} works in place on {value.name}, which other ops read")
        return source

    def _split_operand(self, node: Node) -> tuple[Node, tuple[Any, ...], dict[str, Any]]:
        """Split a call into its first argument's quantized value, and the other arguments. (PAT-08)"""
        value, *args = node.args or (node.kwargs.get("input"),)
        return self._source_of(value), tuple(args), {key: v for key, v in node.kwargs.items() if key != "input"}

    def _only_user_of(self, node: Node) -> Node:
        if len(node.users) != 1:
            raise Blocked(f"LOW-03: {node.name} has {len(node.users)} users; one quantized op has one output")
        return next(iter(node.users))

    def _read_grid(self, value: Node) -> InputGrid | None:
        """Return the qparams of a quantized value; None for a float value, or if another graph decides them."""
        if value.target is QUANTIZE:
            dtype: Any = value.args[3]
            if (owner := _find_owner(value)) is not None:
                return InputGrid(owner, owner, dtype)
            scale, zero_point = map(self._read_attribute, value.args[1:3])
            return InputGrid(float(scale), int(zero_point), dtype)
        is_float16 = value.op == "call_method" and value.target == "to" and value.args[1:] == (torch.float16,)
        return InputGrid(1.0, 0, torch.float16) if is_float16 else None

    def _read_tail(self, node: Node, sources: Any, target: Any, with_relu: Any = None, keeps: bool = False) -> Tail:
        """Read the nodes after an op, each the only user of the one before: a relu, the quantize node. (PAT-06)

        Refuse them if no quantized op has this result for these sources; one that `keeps` qparams has its input's.
        """
        last, user = node, self._only_user_of(node)
        if with_relu is not None and self._kind_of(user) in table.RELUS:
            target, last, user = with_relu, user, self._only_user_of(user)
        grid = self._grids.get(user)
        if grid is None:
            raise Blocked(f"LOW-01: {last.name} is not quantized: its user is {user.name}")
        inputs = [(source, self._grids.get(source)) for source in sources if isinstance(source, Node)]
        for dtype in (grid.dtype, *(source_grid.dtype for _, source_grid in inputs if source_grid is not None)):
            is_native = dtype is not torch.float16 or self._kind_of(node) in table.ON_QUANTIZED
            if dtype is not grid.dtype or not is_native:
                raise Blocked(f"LOW-03: no quantized op of {dtype} values whose result is {grid.dtype}")
        keeps |= self._keep_dropout and self._kind_of(node) in table.DROPOUTS
        for source, source_grid in inputs:
            if keeps and source_grid != grid:  # rule: LOW-03
                raise Blocked(f"LOW-03: {source.name} and the output differ in qparams; the op keeps its input's")
        return Tail(user, grid, target)

    def _is_in_place(self, node: Node) -> bool:
        if node.op == "call_module":
            return bool(getattr(self._module_of(node), "inplace", False))
        name = str(getattr(node.target, "__name__", node.target))
        return node.op in CALLS and (name.endswith("_") or bool(node.kwargs.get("inplace")))

    def _write(self, node: Node, tail: Tail, *args: Any, **kwargs: Any) -> None:
        """Replace everything up to the quantize node by a call."""
        op = "call_function" if callable(tail.target) else node.op
        self.calls[tail.quantize] = Call(op=op, target=tail.target, args=args, kwargs=kwargs, origin=node)

    def _swap(self, node: Node, name: Any, native: Any, *qparams: Any) -> None:
        """Make the quantized module, under a name. (LOW-01)"""
        module = _pack_or_block(pack_native, native, self._module_of(node), *qparams)
        self.parts[str(name)] = module.train(self._modules[""].training)

    def _lower_weight_only_module(self, node: Node, kind: Any) -> None:
        """Lower an embedding: only the weight is quantized. (LOW-02, CVT-11)"""
        self._swap(node, node.target, table.WEIGHT_ONLY_MODULES[kind])

    def _lower_dynamic_module(self, node: Node, kind: Any) -> None:
        """Lower a module that quantizes its input at run time. (LOW-02, CVT-03, CVT-04)"""
        source, args, kwargs = self._split_operand(node)
        dtype, is_reduced = _read_dynamic_dtype(source)
        inner, is_seven = layer_of(self._module_of(node)), is_reduced or node.name in self._by_engine  # rule: LOW-03
        is_whole = not (is_seven or dtype is torch.float16 or _is_qnnpack())  # torch's modules take 7 bits
        if is_whole and not isinstance(inner, nn.RNNBase) and kind not in table.WHOLE_RANGE_LINEARS:
            raise Blocked("LOW-03: the quantized cell takes 7 bits of its inputs; all 8 are asked for")
        if str(node.target) not in self.parts:
            native = table.WHOLE_RANGE_LINEARS.get(kind) if is_whole else None
            self._swap(node, node.target, native or table.DYNAMIC_MODULES[kind])
            if is_whole and native is None:
                module = self.parts[str(node.target)]
                module.version = 1  # before torch reduced the range
                module.set_weight_bias(inner.get_quantized_weight_bias_dict())
        self.calls[node] = Call(
            op=node.op, target=node.target, args=(source.args[0], *args), kwargs=kwargs, origin=node
        )

    def _lower_shape(self, node: Node, kind: Any) -> None:
        """Read the shape of the quantized tensor, which is the float one's. (LOW-02)"""
        source, args, kwargs = self._split_operand(node)
        self.calls[node] = Call(op=node.op, target=node.target, args=(source, *args), kwargs=kwargs, origin=node)

    def _lower_static_module(self, node: Node, kind: Any) -> None:
        """Lower to a module with the output's qparams, and with packed weights if it has any. (LOW-01)"""
        sources = tuple(self._source_of(value) for value in (*node.args, *node.kwargs.values()) if value is not None)
        tail = self._read_tail(node, sources, self._name_module(node))
        if _find_owner(tail.quantize) is not None:
            raise Blocked("LOW-03: the output has the qparams of a given value; the quantized module holds its own")
        weight_dtype = getattr(layer_of(self._module_of(node)), "weight_dtype", torch.qint8)
        if weight_dtype is not torch.qint8:
            raise Blocked(f"LOW-03: the quantized module packs qint8 weights, not {weight_dtype}")
        self._swap(node, tail.target, table.MODULES[kind], *map(self._read_attribute, tail.quantize.args[1:3]))
        self._write(node, tail, *sources)

    def _name_module(self, node: Node) -> str:
        """Name the module that is made for this call: each call has its own output qparams. (LOW-03)"""
        target = str(node.target)
        return target if self._calls_of[target] == 1 else self._take_name(f"{target}_")  # rule: LOW-03

    def _take_name(self, prefix: str) -> str:
        """Return the next numbered name that is free, for a part."""
        if prefix not in self._names:
            self._names[prefix] = free_names(self._modules[""], prefix, self.parts)
        return next(self._names[prefix])

    def _lower_packed_function(self, node: Node, kind: Any) -> None:
        """Lower a function whose quantized form takes a packed weight. (LOW-02)"""
        arguments = dict(zip(("input", "weight"), node.args, strict=False)) | node.kwargs  # rule: PAT-08
        source, weight = self._source_of(arguments.pop("input")), self._source_of(arguments.pop("weight"))
        if source.target is QUANTIZE_DYNAMIC:
            self._lower_dynamic_function(node, source, weight, arguments)
            return
        row = table.STATIC_FUNCTIONS[kind]
        tail = self._read_tail(node, (source,), row.plain, row.with_relu)
        if weight.args[-1] is not torch.qint8:
            raise Blocked(f"LOW-03: the quantized function packs qint8 weights, not {weight.args[-1]}")
        self._write(node, tail, source, self._pack(node, row, weight, arguments), *tail.quantize.args[1:3])

    def _lower_dynamic_function(self, node: Node, source: Node, weight: Node, arguments: dict[str, Any]) -> None:
        """Lower a function that quantizes its input at run time, with relu if it is its only user. (CVT-03, CVT-04)"""
        dtype, is_reduced = _read_dynamic_dtype(source)
        row = table.DYNAMIC_FUNCTIONS.get((node.target, dtype, weight.args[-1]))
        if row is None:
            raise Blocked(f"LOW-01: torch has no quantized op for it of {dtype} inputs and {weight.args[-1]} weights")
        packed = self._pack(node, row, weight, arguments)
        relus = [user for user in node.users if self._kind_of(user) in table.DYNAMIC_RELUS]
        last, function = (relus[0], row.with_relu) if relus and len(node.users) == 1 else (node, row.plain)
        args = (source.args[0], packed, *(() if dtype is torch.float16 else (is_reduced,)))
        self.calls[last] = Call(op="call_function", target=function, args=args, origin=node)

    def _pack(self, node: Node, row: table.PackedFunction, weight: Node, arguments: dict[str, Any]) -> Call:
        """Pack a weight now if the model holds all that it depends on, else when the model runs. (LOW-02)"""
        settings = row.pack_arguments(node.args[2:], arguments)
        if any(isinstance(value, str) for value in settings):
            raise Blocked(f"LOW-03: arguments {settings}: the quantized op takes numbers")
        values = compute_constants(self._modules[""], (weight, *settings))
        if values is None:
            return Call(op="call_function", target=row.prepack, args=(weight, *settings))
        tensors = [value for constant, value in values.items() if constant.op == "get_attr"]
        return self._pack_now(node, row, map_arg([weight, *settings], values.__getitem__), tensors)

    def _pack_now(self, node: Node, row: table.PackedFunction, arguments: Any, tensors: list[torch.Tensor]) -> Call:
        """Pack a weight and hold it under its own name; `tensors` are those that it was made from."""
        stack = node.meta.get("nn_module_stack")
        scope = str(next(reversed(stack.values()))[0]) if stack else ""
        prefix = f"{scope}_packed_weight_".replace(".", "_")
        packed = _pack_or_block(row.prepack, *arguments)
        name = self._take_name(prefix)
        self.parts[name] = packed
        self.originals[name.lower()] = sorted(tensors, key=torch.Tensor.numel, reverse=True)
        return Call(op="get_attr", target=name)

    def _lower_binary(self, node: Node, kind: Any) -> None:
        """Lower add, mul or matmul of two quantized tensors, or of one and a number, with or without relu. (LOW-02)"""
        arguments = dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs  # rule: PAT-08
        operands = (arguments.pop("input"), arguments.pop("other"))
        if arguments.pop("alpha", 1) != 1 or arguments:  # rule: LOW-03
            raise Blocked(f"LOW-03: arguments {dict(node.kwargs)} cannot be expressed by the quantized op")
        sources = tuple(value if isinstance(value, (int, float)) else self._source_of(value) for value in operands)
        tail = self._read_tail(node, sources, *table.BINARY[kind])
        qparams = tail.quantize.args[1:3] if all(isinstance(source, Node) for source in sources) else ()
        self._write(node, tail, *sources, *qparams)

    def _lower_with_output_qparams(self, node: Node, kind: Any) -> None:
        """Lower a function whose quantized form takes the output's scale and zero point. (LOW-02)"""
        function, unknown = table.WITH_OUTPUT_QPARAMS[kind]
        source, args, kwargs = self._split_operand(node)
        tail = self._read_tail(node, (source,), function)
        supported = {name: value for name, value in kwargs.items() if name not in unknown}
        scale, zero_point = tail.quantize.args[1:3]
        self._write(node, tail, source, *args, **supported, output_scale=scale, output_zero_point=zero_point)

    def _lower_fixed_qparams(self, node: Node, kind: Any) -> None:
        """Lower an op whose quantized kernel fixes the output qparams, where the reference has the same. (LOW-02)"""
        source, args, kwargs = self._split_operand(node)
        target = str(node.target).removesuffix("_") if node.op == "call_method" else node.target  # no kernels in place
        tail = self._read_tail(node, (source,), target)
        own = table.FIXED_QPARAMS[kind][tail.grid.dtype]
        if own != tail.grid[:2]:  # rule: LOW-03
            raise Blocked(f"LOW-03: the result has (scale, zero point) {tail.grid[:2]}, the quantized op's are {own}")
        self._write(node, tail, source, *args, **kwargs)

    def _lower_on_quantized(self, node: Node, kind: Any) -> None:
        """Run an op that keeps qparams on the quantized tensors themselves. (LOW-02)"""
        sources: dict[Any, Any] = {v: self._source_of(v) for v in node.all_input_nodes if is_dequantize(v)}
        tail = self._read_tail(node, tuple(sources.values()), node.target, keeps=True)
        if kind in table.REQUANTIZING:  # rule: OBS-02 (the first operand's grid is the result's)
            first, *others = sources
            sources = {first: sources[first]} | {v: self._skip_requantize(node, sources[v]) for v in others}
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda value: sources.get(value, value))
        self._write(node, tail, *args, **kwargs)

    def _skip_requantize(self, node: Node, source: Node) -> Node:
        """Return the value, on another grid, that was requantized only for this op, whose kernel does that itself."""
        if source.target is not QUANTIZE or not is_dequantize(source.args[0]):
            return source
        inner = self._source_of(source.args[0])
        readers = [user for dequantize in source.users for user in dequantize.users]
        if readers != [node] or inner not in self._grids or self._grids[inner].dtype is not self._grids[source].dtype:
            return source
        self.refused = [refused for refused in self.refused if refused.node != source.name]
        return inner


_HANDLERS: Mapping[Any, Callable[[Sites, Node, Any], None]] = {
    **dict.fromkeys(table.ON_QUANTIZED, Sites._lower_on_quantized),
    **dict.fromkeys(table.SHAPE_OF, Sites._lower_shape),
    **dict.fromkeys(table.MODULES, Sites._lower_static_module),
    **dict.fromkeys(table.STATIC_FUNCTIONS, Sites._lower_packed_function),
    **dict.fromkeys(table.BINARY, Sites._lower_binary),
    **dict.fromkeys(table.WITH_OUTPUT_QPARAMS, Sites._lower_with_output_qparams),
    **dict.fromkeys(table.FIXED_QPARAMS, Sites._lower_fixed_qparams),
    **dict.fromkeys(table.WEIGHT_ONLY_MODULES, Sites._lower_weight_only_module),
}


def _find_owner(quantize: Node) -> Node | None:
    """Return the value whose qparams a quantize takes while running, if it does. (OBS-11)"""
    scale = quantize.args[1] if quantize.target is QUANTIZE else None
    is_read = isinstance(scale, Node) and scale.op == "call_method" and scale.target == "q_scale"
    return scale.all_input_nodes[0] if is_read else None  # type: ignore[union-attr]


def _read_dynamic_dtype(source: Node) -> tuple[Any, bool]:
    """Return a value's dtype at run time, and whether its range is reduced to 7 bits: qnnpack always takes 8."""
    _, dtype, is_reduced = source.args
    if is_reduced and dtype is not torch.float16 and _is_qnnpack():  # rule: LOW-03
        raise Blocked("LOW-03: the range is reduced to 7 bits; qnnpack quantizes to 8 at run time")
    return dtype, bool(is_reduced)


def _plain_class_of(module: Any) -> type:  # torch's class for one of PLAIN
    return PLAIN.get(type(module), type(module))


def _is_qnnpack() -> bool:
    return torch.backends.quantized.engine == "qnnpack"


def _pack_or_block(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that packs a weight; an engine that cannot pack it raises RuntimeError."""
    try:
        with torch.no_grad():
            return function(*args)
    except RuntimeError as error:
        raise Blocked(f"LOW-01: {torch.backends.quantized.engine}: {str(error).splitlines()[0]}") from error
