"""The oracle: the exact real result of a reference model, and how far a right backend may be from it (NUM-03, NUM-04).

It walks the decomposed reference graph. Weights enter as the integers that the reference model itself folds them
to; between dequantize and quantize everything is float64, in which products and sums of 8-bit integers of these sizes
are exact but for about 2⁻⁵⁰. Each value carries a bound on its error (error_bounds.py). Where a value is quantized and
the bound lets it fall on either side of a tie, one step of error goes on; elsewhere none (exact.py).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from fx_quant_conformance.backends.base import Capabilities, Requantize
from fx_quant_conformance.conformance.bounds.dynamic import dequantize, half_steps_of, read_half_weight
from fx_quant_conformance.conformance.bounds.error_bounds import (
    DOT_PRODUCT,
    MOVES,
    Accumulator,
    NoOracleError,
    OpCall,
    OpRule,
    Value,
    as_value,
    bound_evaluation,
    find_accumulator_step,
    flatten,
    is_inexact,
    map_values,
    settle_errors,
)
from fx_quant_conformance.conformance.oracle.decompose import (
    InPrimitives,
    describe,
    evaluate_opened,
    open_op,
    run_module,
)
from fx_quant_conformance.conformance.oracle.exact import (
    FLOAT32,
    Exact,
    Quantized,
    leave_numberless,
    round_by_channel,
    round_value,
)
from fx_quant_conformance.conformance.oracle.grids import (
    Grid,
    ends_of,
    find_constants,
    find_folded_nodes,
    find_nodes_left_in_float,
    grid_of,
    integers_of,
    lay_along,
    qparams_of,
)
from fx_quant_conformance.conformance.oracle.handlers import MODULES, NODES
from fx_quant_conformance.conformance.oracle.held import Held
from fx_quant_conformance.conformance.oracle.marks import is_value
from fx_quant_conformance.conformance.oracle.reference_modules import FLOAT_MODULES, REFERENCE_MODULES
from fx_quant_conformance.conformance.oracle.requantizing import find_accumulator
from fx_quant_conformance.conformance.oracle.table import rule_of
from fx_quant_conformance.conformance.oracle.vendor_modules import (
    add_errors,
    allow_for_clipping,
    copy_to_double,
    custom_grid_of,
    custom_qparams_of,
    ends_of_weight,
    find_reference_kind,
    is_custom,
    open_dot_product,
    references_in,
    require_weight,
    run_in_double,
)
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from fx_quant_conformance.refimpl.graph.tracing import attribute_of, lay_out_arguments

READS_SHAPE = frozenset({"size", "dim", "numel", getattr, torch.ops.aten.sym_size.int})
"""What is called to read a shape: it is the same of a value and of its integers."""


class Walk:
    """Evaluations of one reference graph in float64.

    ``counts_weights``: the error of quantizing the weights counts too (cause ``weights``): for comparing a model before
    and after. ``can_clip``: then also that of weights beyond their range, which a vendor's observer may leave there.
    ``keeps_values``: each value stays after the last node that reads it.
    """

    def __init__(
        self,
        model: GraphModule,
        capabilities: Capabilities | None = None,
        *,
        counts_weights: bool = False,
        can_clip: bool = False,
        keeps_values: bool = False,
    ) -> None:
        self.model = model
        self.capabilities = capabilities or Capabilities()
        self.counts_weights, self.can_clip = counts_weights, can_clip
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.values: dict[Node, Any] = {}
        """What nodes gave in the last evaluation: Value, Quantized, Tensor or plain data."""
        self._last_read = {} if keeps_values or can_clip else _find_last_read(model)
        self._references = references_in(model)
        self._doubles: dict[int, nn.Module] = {}
        self._forwards: dict[tuple[Any, ...], Walk] = {}
        self._folds: dict[Node, Any] = {}
        self._opened: dict[tuple[Node, str], InPrimitives] = {}
        self._held = Held(model, self.modules)
        self._left_in_float = frozenset(find_nodes_left_in_float(model))
        self._constants = find_constants(model)
        self._folded = frozenset(find_folded_nodes(model, self._constants))

    def exact(self, inputs: tuple[Any, ...]) -> tuple[Exact, ...]:
        """Evaluate on inputs; return the exact result of each output tensor, in order.

        Raises NoOracleError for an op without a rule, or an output that is no tensor.
        """
        outputs = self._evaluate_graph(tuple(map(_enter, inputs)), {})
        nodes = tree_leaves(outputs)
        return tuple(exact for output in nodes for exact in self._read_results(output))

    def _evaluate_graph(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Evaluate every node on the values of the placeholders, in order or by name; return the output's argument."""
        feed = iter(args)
        self.values = {}
        self._held.begin()
        with torch.no_grad():
            for node in self.model.graph.nodes:
                if node.op == "output":
                    return node.args[0]
                if node.op == "placeholder":
                    name = str(node.target)
                    self.values[node] = kwargs[name] if name in kwargs else next(feed, *node.args)
                else:
                    self.values[node] = self._evaluate(node)
                for each in self._last_read.get(node, ()):
                    del self.values[each]
        raise NoOracleError("the graph has no output node")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _read_results(self, output: Any) -> Iterator[Exact]:
        """The results of one output; a module that returns several has as many, and None has none."""
        if not isinstance(output, Node):
            return
        source: Any = output.args[0] if is_dequantize(output) else output
        node = source if isinstance(self.values[source], Quantized) else output
        for value in flatten(self.values.get(node)):
            if value is None:
                continue
            if isinstance(value, Quantized):
                yield self._place_on_grid(value)
            elif isinstance(value, (Value, Tensor)) and not (value.dtype.is_floating_point or value.dtype.is_complex):
                yield _read_discrete(value)
            elif isinstance(value, (Value, Tensor)):
                value = leave_numberless(_part_complex(as_value(value)))
                step = half_steps_of(value.real) if value.step is None else value.step
                yield Exact(real=value.real, errors=value.errors, step=step)
            else:
                raise NoOracleError(f"the model's output {output} is not a computed tensor")

    def _place_on_grid(self, quantized: Quantized) -> Exact:
        grid = self._grid_of(quantized.node)
        computed = quantized.computed
        if computed is None:  # a constant: what is rounded lies within half a step of the integer that the model has
            real = (quantized.integers - grid.zero_point) * grid.scale
            computed = Value(real=real, errors={"upstream": torch.full_like(real, grid.scale / 2)})
        return Exact(
            real=computed.real,
            errors=computed.errors,
            step=torch.tensor(grid.scale, dtype=torch.float64),
            grid=grid,
            accumulator=computed.accumulator,
            tolerance=computed.tolerance,
            requantize=self._choose_requantize(computed),
        )

    def _choose_requantize(self, value: Value) -> Requantize:
        """Return how a value is quantized: as declared if it is made of integers alone, else in float32."""
        return FLOAT32 if value.accumulator is None else value.accumulator.requantize or self.capabilities.requantize

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._held.read(node)
        source = self.values[node.args[0]] if node.args and isinstance(node.args[0], Node) else None
        if node.target in NODES and not (node.target is operator.getitem and isinstance(source, (Value, Tensor))):
            return NODES[node.target](self, node)
        if is_quantize(node) or is_dequantize(node):
            if node in self._folds:
                return self._folds[node]
            value = self._quantize(node, source) if is_quantize(node) else self._dequantize(source)
            if node in self._constants:
                self._folds[node] = value
            return value
        laid_out = lay_out_arguments(node)  # the rules read operands by position
        args, kwargs = torch.fx.node.map_arg(laid_out, lambda value: self.values[value])
        if node.op == "call_module" and is_custom(self.modules[str(node.target)]):
            return self._evaluate_custom(node, args)
        if node.op == "call_module":
            return self._evaluate_module(self.modules[str(node.target)], args, kwargs, node)
        target: Any = node.target
        function = (
            target if callable(target) else lambda value, *args, **kwargs: getattr(value, target)(*args, **kwargs)
        )
        if not any(isinstance(item, Value) for item in flatten((args, tuple(kwargs.values())))):
            rule = rule_of(target)
            moves = rule is not None and rule.arithmetic == MOVES
            if node in self._folded or moves or not any(map(is_inexact, tree_leaves((args, kwargs)))):
                return function(*args, **kwargs)  # as the model computes it
            return self._decompose(node, function, args, kwargs)  # in float32, as the machine does
        if target is getattr and not isinstance(args[0], Value):  # one of several results, by its name
            return function(*args)
        if target in READS_SHAPE:
            read = function(*map_values(args, lambda value: value.real.to(value.dtype), Tensor.clone))
            return read if not isinstance(read, Tensor) else self._decompose(node, function, args, kwargs)
        is_left = node in self._left_in_float
        return self._call(node, rule_of(target), function, args, kwargs, op=target, is_left=is_left)

    def _call(
        self,
        node: Node,
        rule: OpRule | None,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        op: Any,
        is_left: bool,
        written: Any = None,
    ) -> Any:
        """Call an op by its rule, if it has one for these operands; else by the primitives that it is made of.

        ``written``: the op as the model has it, if ``function`` is another, in float64.
        """
        if rule is not None and _fits(function, args, kwargs):
            args, kwargs = tree_map(_name_in_double, (args, dict(kwargs)), is_leaf=is_value)
            is_aten = isinstance(op, torch._ops.OpOverload)  # an op that no pattern names: float, as written
            try:
                return self._call_op(rule, function, args, kwargs, op=op, is_left=is_left, sums_floats=is_aten)
            except NoOracleError:  # it has none for these
                pass
        return self._decompose(node, written or function, args, kwargs)

    def _decompose(self, node: Node, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Evaluate an op by its primitives, in float32; what it changes in place is changed for what follows."""
        key = (node, describe(args, kwargs))
        if key not in self._opened:
            self._opened[key] = open_op(function, args, kwargs)
        opened = self._opened[key]
        capabilities = replace(self.capabilities, float_accumulation=True)
        result, changed = evaluate_opened(opened, args, kwargs, capabilities)
        if changed:
            given = [each for each in tree_leaves((node.args, dict(node.kwargs))) if isinstance(each, Node)]
            tensors = [each for each in given if isinstance(self.values[each], (Tensor, Value))]
            for number, value in changed.items():
                self.values[tensors[number]] = value
                for each in self._held.change(tensors[number], value):
                    if each in self.values:
                        self.values[each] = self._held.read(each)
        return result

    def _quantize(self, node: Node, value: Any) -> Any:
        """A weight is quantized by the model's own op; every other value keeps its exact real result."""
        if not isinstance(value, Value) and node not in self._constants:  # it is made of integers, such as a mask
            value = as_value(value)
        if not isinstance(value, Value):
            quantize: Any = node.target
            arguments = (attribute_of(self.model, str(a.target)) if isinstance(a, Node) else a for a in node.args[1:])
            return Quantized(integers=integers_of(quantize(value, *arguments)), node=node)
        return self._round(node, value)

    def _round(self, node: Node, value: Value) -> Quantized:
        """A value on the grid of the node that rounds it, with the steps by which a right backend may differ."""
        if node.op != "call_module":
            scales, zero_points, axis = qparams_of(self.model, node)
            if axis is not None:
                return round_by_channel(value, node, scales, zero_points, axis)
        return round_value(value, node, self._grid_of(node), self._choose_requantize(value))

    def _dequantize(self, quantized: Any) -> Any:
        if isinstance(quantized, Value):  # float16: the value is what it was rounded to
            return quantized
        node = quantized.node
        is_module = node.op == "call_module"
        found = custom_qparams_of(self.modules[str(node.target)]) if is_module else qparams_of(self.model, node)
        scale, zero_point, axis = found
        if axis is not None:
            scale, zero_point = lay_along(axis, quantized.integers, scale, zero_point)
        counts_weights = self.counts_weights and quantized.computed is None
        value = dequantize(quantized.integers, scale, zero_point, counts_weights=counts_weights)
        if self.can_clip and quantized.computed is None:
            return allow_for_clipping(value, self.values[node.args[0]], quantized.integers, ends_of(node))
        value = replace(value, accumulator=Accumulator(step=scale))
        ambiguity = quantized.tie_ambiguity
        if ambiguity is None or not bool(ambiguity.any()):
            return value
        return replace(value, errors={"upstream": ambiguity * scale, **value.errors})

    def _grid_of(self, node: Node) -> Grid:
        is_module = node.op == "call_module"
        return custom_grid_of(self.modules[str(node.target)]) if is_module else grid_of(self.model, node)

    def _evaluate_custom(self, node: Node, args: tuple[Any, ...]) -> Quantized:
        """A vendor's quantized class of a custom module: its float function, on the grid of its own. (CUS-01)"""
        module = self.modules[str(node.target)]
        values = tuple(self._dequantize(each) if isinstance(each, Quantized) else each for each in args)
        function: Any = self._copy_to_double(module).float_function
        call = OpCall(function=function, args=values, kwargs={}, capabilities=self.capabilities)
        call = replace(call, result=run_in_double(call))
        errors = bound_evaluation(int(getattr(module, "roundings", 0)), call)
        return self._round(node, Value(real=call.result, errors=errors))

    def _evaluate_module(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], node: Node) -> Any:
        if isinstance(module, nn.Sequential):
            return self._evaluate_fused(module, args, kwargs, node)
        if type(module) in MODULES:
            return MODULES[type(module)](self, module, args, kwargs)
        if (kind := find_reference_kind(module)) is not None:
            function, args = REFERENCE_MODULES[kind](module, self._read_weight(module), *args, **kwargs)
            return self._call_op(_find_rule(function), function, args, {}, op=getattr(nn, kind.__name__, kind))
        if type(module) in FLOAT_MODULES:  # its products are summed in float32, whatever is done with integers
            weight = Value(real=module.weight.detach().double())
            function, args = FLOAT_MODULES[type(module)](module, weight, *args, **kwargs)
            return self._call_op(_find_rule(function), function, args, {}, op=type(module), sums_floats=True)
        if hasattr(module, "get_quantized_weight"):
            return self._evaluate_own_reference(module, args, kwargs)
        is_left = node in self._left_in_float
        rule, written = rule_of(type(module)), run_module(module)
        double = None if rule is None else self._copy_to_double(module)
        return self._call(node, rule, double, args, kwargs, op=type(module), is_left=is_left, written=written)

    def _evaluate_fused(
        self, module: nn.Sequential, args: tuple[Any, ...], kwargs: Mapping[str, Any], node: Node
    ) -> Any:
        """The modules of a fused one, in turn; of one with a forward of its own, such as a sum, what that calls."""
        if type(module).forward is nn.Sequential.forward:
            (value,) = args
            for inner in module:
                value = self._evaluate_module(inner, (value,), {}, node)
            return value
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        key = (id(module), *given)
        if key not in self._forwards:
            self._forwards[key] = self._open_forward(module, given)
        walk = self._forwards[key]
        outputs = walk._evaluate_graph(args, kwargs)
        return torch.fx.node.map_arg(outputs, lambda node: walk.values[node])

    def _open_forward(self, module: nn.Module, given: Collection[str]) -> Walk:
        """A walk of what a module's forward calls with these arguments; none of the modules in it is gone into."""
        parameters = inspect.signature(module.forward).parameters.items()
        defaults = {name: parameter.default for name, parameter in parameters if name not in given}
        try:
            graph = _ForwardTracer().trace(module, concrete_args=defaults)
        except Exception as error:  # the forward is the vendor's, and may raise anything on a proxy
            text = f"the forward of {type(module).__name__} cannot be traced: {type(error).__name__}: {error}"
            raise NoOracleError(text) from error
        walk = Walk(
            GraphModule(module, graph), self.capabilities, counts_weights=self.counts_weights, can_clip=self.can_clip
        )
        walk._references = self._references
        walk._left_in_float = frozenset()  # what follows the module decides
        return walk

    def _evaluate_own_reference(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        """A vendor's own reference module: its forward in float64, within the bounds of what is known of it.

        Of a dot product those of the rule for dot products, whose errors its forward must not enlarge; of one that is
        registered with roundings, those of their own. (NUM-04) Where weights count, it has its float weight.
        """
        require_weight(module)
        if self.counts_weights:
            return self._evaluate_forward(module, Value(real=torch.empty(0)), args, kwargs)
        roots = [root for root, reference in self._references.items() if reference is type(module)]
        rule = next((rule for op in (type(module), *roots) if (rule := rule_of(op)) is not None), None)
        operands = open_dot_product(module, roots, lambda: self._read_weight(module), args, kwargs)
        if operands is not None:
            function, opened = operands
            known = self._call_op(_find_rule(function), function, opened, {}, op=roots[0] if roots else type(module))
            args = map_values(args, lambda value: Value(real=value.real), Tensor.clone)  # their errors are in `known`
        elif rule is None:
            text = f"no rule in the oracle's table for module {type(module).__name__}"
            raise NoOracleError(f"{text}: register its pattern with roundings")
        else:
            known = Value(real=torch.empty(0))
        value = self._evaluate_forward(module, known, args, kwargs)
        if rule is None:
            return value
        double = self._copy_to_double(module)
        call = OpCall(function=double, args=args, kwargs=kwargs, capabilities=self.capabilities, result=value.real)
        return replace(value, errors=add_errors(value.errors, rule.bound(call)))

    def _evaluate_forward(self, module: Any, known: Value, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
        """A module's own forward in float64, with the errors of a value that it is computed from."""
        call = OpCall(function=self._copy_to_double(module), args=args, kwargs=kwargs, capabilities=self.capabilities)
        return replace(known, real=run_in_double(call))

    def _copy_to_double(self, module: nn.Module) -> nn.Module:
        """The module in float64, made once; its weights are as folded to integers, or float where weights count."""

        def read(part: Any) -> Tensor:
            return part.weight.detach().double() if self.counts_weights else self._read_weight(part).real

        if id(module) not in self._doubles:
            self._doubles[id(module)] = copy_to_double(module, read)
        return self._doubles[id(module)]

    def _read_weight(self, module: Any) -> Value:
        """A reference module's weight as it was folded to integers, once, with torch's own semantics."""
        if module.weight_dtype is torch.float16:
            return read_half_weight(module.weight.detach().half(), counts_weights=self.counts_weights)
        integers = integers_of(module.get_quantized_weight())
        scale, zero_point = module.weight_scale.double(), module.weight_zero_point.double()
        axis = int(module.weight_axis) if scale.numel() > 1 else 0
        scale, zero_point = lay_along(axis, integers, scale, zero_point)
        value = dequantize(integers, scale, zero_point, counts_weights=self.counts_weights)
        return allow_for_clipping(value, module.weight, integers, ends_of_weight(module)) if self.can_clip else value

    def _call_op(
        self,
        rule: OpRule,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        op: Any,
        is_left: bool = False,
        sums_floats: bool = False,
    ) -> Any:
        """Call an op; one left in float is summed in float32 by any backend; integer products may come as floats.

        ``op``: what patterns call it.
        """
        sums_floats = sums_floats or (is_left and rule.arithmetic != DOT_PRODUCT)
        capabilities = replace(self.capabilities, float_accumulation=True) if sums_floats else self.capabilities
        if capabilities.requantize_of:
            capabilities = replace(capabilities, requantize=capabilities.requantize_for(leaf_name(op)))
        granted = capabilities.tolerance_for(leaf_name(op)) if capabilities.tolerance else 0.0
        call = OpCall(function=rule.exact or function, args=args, kwargs=kwargs, capabilities=capabilities)
        result = call.evaluate(lambda value: value.real.clone(), lambda tensor: tensor.double())
        call = replace(call, result=result)
        errors = rule.bound(call)
        tolerance = max([granted, *(value.tolerance for value in call.values())])
        if isinstance(result, (tuple, list)):
            if not isinstance(errors, tuple):  # each cause has a tuple, of a bound for each result
                errors = [{cause: each[number] for cause, each in errors.items()} for number in range(len(result))]
            accumulator = find_accumulator(rule, call, None)
            return tuple(
                Value(real=real, errors=settle_errors(real, each), accumulator=accumulator, tolerance=tolerance)
                for real, each in zip(result, errors, strict=True)
            )
        errors = settle_errors(result, errors, call)
        factors = [value for value in call.values() if value.real.dim() > 1 or value is call.values()[0]]
        step = None
        if rule.arithmetic == DOT_PRODUCT and len(factors) > 1:
            step = find_accumulator_step(function, factors[0], factors[1], result)
        if rule.arithmetic == MOVES and len(factors) == 1 and result.shape == factors[0].real.shape:
            step = factors[0].step  # a relu on an accumulator
        accumulator = find_accumulator(rule, call, step)
        return Value(real=result, errors=errors, step=step, accumulator=accumulator, tolerance=tolerance)


class _ForwardTracer(torch.fx.Tracer):
    """Traces the forward of one module, and goes into none of the modules inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Take every module as it is."""
        return True


def _find_last_read(model: GraphModule) -> Mapping[Node, Sequence[Node]]:
    """Return the values that no node reads after one, by that one; what a result is read from is not among them."""
    results = [node for output in model.graph.find_nodes(op="output") for node in output.all_input_nodes]
    kept = {source for node in results for source in node.all_input_nodes[:1]}
    last = torch.fx.Interpreter(model).user_to_last_uses
    return {node: [each for each in read if each not in kept] for node, read in last.items()}


def _read_discrete(value: Value | Tensor) -> Exact:
    """The result of integers or truth values: there is one, but where the choice is undecided."""
    real, errors = (value.real, value.errors) if isinstance(value, Value) else (value, {})
    return Exact(real=real.double(), errors=errors, step=torch.ones((), dtype=torch.float64), is_discrete=True)


def _fits(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a rule is one of these operands: floats, in float32, and of a result without places."""
    dtypes = {each for each in tree_leaves((args, dict(kwargs)), is_leaf=is_value) if isinstance(each, torch.dtype)}
    is_float = all(value.real.is_floating_point() for value in _values_in(args, kwargs))
    return is_float and dtypes <= {torch.float32} and not getattr(function, "return_indices", False)


def _name_in_double(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def _part_complex(value: Value) -> Value:
    """Complex numbers as pairs of real ones, each off by no more than the number."""
    if not value.real.is_complex():
        return value
    real = torch.view_as_real(value.real)
    return Value(real=real, errors={cause: each.unsqueeze(-1).expand_as(real) for cause, each in value.errors.items()})


def _values_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Value]:
    return [item for item in flatten((args, tuple(kwargs.values()))) if isinstance(item, Value)]


def _find_rule(function: Any) -> OpRule:
    """The rule of a function that a module computes."""
    rule = rule_of(function)
    if rule is None:
        raise NoOracleError(f"no rule in the oracle's table for {function}")
    return rule


def _enter(value: Any) -> Any:
    return Value(real=value.double()) if isinstance(value, Tensor) and value.is_floating_point() else value
