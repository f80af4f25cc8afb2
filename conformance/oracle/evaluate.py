"""The oracle: the exact real result of a reference model, and how far a right backend may be from it (NUM-03, NUM-04).

It walks the reference graph, in either form. Weights enter as the integers that the reference model itself folds them
to; between dequantize and quantize everything is float64, in which products and sums of 8-bit integers of these sizes
are exact but for about 2⁻⁵⁰. Each value carries a bound on its error (error_bounds.py). Where a value is quantized and
the bound lets it fall on either side of a tie, one step of error goes on; elsewhere none.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from backends.base import Capabilities
from conformance.oracle.dynamic import dequantize, half_steps_of, read_half_weight
from conformance.oracle.error_bounds import (
    DOT_PRODUCT,
    MOVES,
    OpCall,
    OpRule,
    U,
    Value,
    find_accumulator_step,
    flatten,
    map_values,
)
from conformance.oracle.grids import (
    Grid,
    NoOracleError,
    grid_of,
    integers_of,
    is_constant,
    is_range_clamp,
    qparams_of,
)
from conformance.oracle.rules_dynamic import MODULES, NODES
from conformance.oracle.rules_weighted import FLOAT_MODULES, REFERENCE_MODULES
from conformance.oracle.table import rule_of
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.tracing import attribute_of

READS_SHAPE = frozenset({"size", "dim", "numel", getattr})
"""What is called to read a shape: it is the same of a value and of its integers."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact result of one output of a model.

    ``grid``: the output's; None: the output is a float tensor. ``errors``: by cause, in real units (error_bounds.py).
    ``step``: what distances are measured in: the grid's scale; of a float output the step of its accumulator, or of
    half precision at its value.
    """

    real: Tensor
    errors: Mapping[str, Tensor]
    step: Tensor
    grid: Grid | None = None

    @cached_property
    def integers(self) -> Tensor:
        """v: the real result in steps of the grid, plus its zero point; clamped, not rounded. (NUM-03)"""
        assert self.grid is not None, "a float output has no integers"
        return self.grid.integers(self.real).clamp(self.grid.low, self.grid.high)

    @cached_property
    def slack_by_cause(self) -> dict[str, Tensor]:
        """The slack by cause, in steps: of quantized outputs beyond 1/2, of float outputs in all. (NUM-04)

        ``final`` is the last rounding to float32: 3|r| + |r + zp| for a quantized output of r steps (the factor, the
        product, the sum with the zero point), 2|y| for a float one, in units of u.
        """
        by_cause = {cause: (error / self.step).expand_as(self.real) for cause, error in self.errors.items()}
        if self.grid is None:
            return by_cause | {"final": 2 * U * self.real.abs() / self.step}
        return by_cause | {"final": _bound_final_rounding(self.integers, self.grid)}

    @cached_property
    def slack(self) -> Tensor:
        """The sum over all causes, in steps."""
        return sum(self.slack_by_cause.values(), torch.zeros_like(self.real))


def _bound_final_rounding(integers: Tensor, grid: Grid) -> Tensor:
    return (3 * (integers - grid.zero_point).abs() + integers.abs()) * U


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Integers on the walk, the node that made them, and, of a computed value, that value.

    ``tie_ambiguity``: by how many steps a right backend's integer may differ; None: by none.
    """

    integers: Tensor
    node: Node
    computed: Value | None = None
    tie_ambiguity: Tensor | None = None


class Walk:
    """Evaluations of one reference graph in float64.

    ``counts_weights``: the error of quantizing the weights counts too (cause ``weights``): for comparing a model before
    and after. ``dynamic_range``: the integers that a dynamic input is quantized to; None: those of its dtype.
    """

    def __init__(
        self,
        model: GraphModule,
        capabilities: Capabilities | None = None,
        *,
        counts_weights: bool = False,
        dynamic_range: tuple[int, int] | None = None,
    ) -> None:
        self.model = model
        self.capabilities = capabilities or Capabilities()
        self.counts_weights = counts_weights
        self.dynamic_range = dynamic_range
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.values: dict[Node, Any] = {}
        """What each node gave in the last evaluation: Value, Quantized, Tensor or plain data."""
        self._doubles: dict[int, nn.Module] = {}
        self._forwards: dict[tuple[Any, ...], Walk] = {}
        self._constants: dict[Node, Any] = {}
        self._left_in_float = frozenset(_find_nodes_left_in_float(model))

    def exact(self, inputs: tuple[Any, ...]) -> tuple[Exact, ...]:
        """Evaluate on inputs; return the exact result of each output tensor, in order.

        Raises NoOracleError for an op without a rule, or an output that is no tensor.
        """
        outputs = self._evaluate_graph(tuple(map(_enter, inputs)), {})
        return tuple(exact for output in flatten(outputs) for exact in self._read_results(output))

    def _evaluate_graph(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Evaluate every node on the values of the placeholders, in order or by name; return the output's argument."""
        feed = iter(args)
        self.values = {}
        with torch.no_grad():
            for node in self.model.graph.nodes:
                if node.op == "output":
                    return node.args[0]
                if node.op == "placeholder":
                    name = str(node.target)
                    self.values[node] = kwargs[name] if name in kwargs else next(feed, *node.args)
                else:
                    self.values[node] = self._evaluate(node)
        raise NoOracleError("the graph has no output node")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _read_results(self, output: Any) -> Iterator[Exact]:
        """The results of one output; a module that returns several has as many."""
        is_quantized = is_dequantize(output) and isinstance(self.values[output.args[0]], Quantized)
        node = output.args[0] if is_quantized else output
        for value in flatten(self.values.get(node) if isinstance(node, Node) else None):
            if isinstance(value, Quantized):
                yield self._place_on_grid(value)
            elif isinstance(value, Value):
                step = half_steps_of(value.real) if value.step is None else value.step
                yield Exact(real=value.real, errors=value.errors, step=step)
            else:
                raise NoOracleError(f"the model's output {output} is not a computed tensor")

    def _place_on_grid(self, quantized: Quantized) -> Exact:
        grid = grid_of(self.model, quantized.node)
        computed = quantized.computed
        if computed is None:
            raise NoOracleError(f"the model's output {quantized.node} is a constant")
        step = torch.tensor(grid.scale, dtype=torch.float64)
        return Exact(real=computed.real, errors=computed.errors, step=step, grid=grid)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _evaluate(self, node: Node) -> Any:
        if node.op == "get_attr":
            return attribute_of(self.model, str(node.target))
        source = self.values[node.args[0]] if node.args and isinstance(node.args[0], Node) else None
        if node.target in NODES and not (node.target is operator.getitem and isinstance(source, Value)):
            return NODES[node.target](self, node)
        if is_quantize(node) or is_dequantize(node):
            if node in self._constants:
                return self._constants[node]
            value = self._quantize(node, source) if is_quantize(node) else self._dequantize(source)
            if is_constant(node):
                self._constants[node] = value
            return value
        if is_range_clamp(node) and isinstance(source, Value):
            return source  # rule: CVT-09; the grid's bounds clamp it
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: self.values[value])
        if node.op == "call_module":
            return self._evaluate_module(self.modules[str(node.target)], args, kwargs, node in self._left_in_float)
        target: Any = node.target
        function = (
            target if callable(target) else lambda value, *args, **kwargs: getattr(value, target)(*args, **kwargs)
        )
        if not any(isinstance(item, Value) for item in flatten((args, tuple(kwargs.values())))):
            return function(*args, **kwargs)  # of attributes and plain data: float32, as the model computes it
        if target in READS_SHAPE:
            return function(*map_values(args, lambda value: value.real, Tensor.clone))
        if (rule := rule_of(target)) is not None:
            return self._call_op(rule, function, args, kwargs, is_left=node in self._left_in_float)
        raise NoOracleError(f"no rule in the oracle's table for {node.op} {target}")

    def _quantize(self, node: Node, value: Any) -> Any:
        """A weight is quantized by the model's own op; every other value keeps its exact real result."""
        if not isinstance(value, Value):
            quantize: Any = node.target
            arguments = (attribute_of(self.model, str(a.target)) if isinstance(a, Node) else a for a in node.args[1:])
            return Quantized(integers=integers_of(quantize(value, *arguments)), node=node)
        grid = grid_of(self.model, node)
        real = grid.integers(value.real)
        integers = real.clamp(grid.low, grid.high)
        if not value.errors and bool((real == integers.round()).all()):  # on the grid: no ambiguity
            return Quantized(integers=integers, node=node, computed=value)
        slack = value.error() / grid.scale + _bound_final_rounding(integers, grid)  # rule: NUM-04
        low, high = ((real + end).round().clamp(grid.low, grid.high) for end in (-slack, slack))
        return Quantized(integers=integers.round(), node=node, computed=value, tie_ambiguity=high - low)

    def _dequantize(self, quantized: Any) -> Any:
        if isinstance(quantized, Value):  # float16: the value is what it was rounded to
            return quantized
        scale, zero_point, axis = qparams_of(self.model, quantized.node)
        if axis is not None:
            scale, zero_point = _along(axis, quantized.integers, scale, zero_point)
        counts_weights = self.counts_weights and quantized.computed is None
        value = dequantize(quantized.integers, scale, zero_point, counts_weights=counts_weights)
        ambiguity = quantized.tie_ambiguity
        if ambiguity is None or not bool(ambiguity.any()):
            return value
        return replace(value, errors={"upstream": ambiguity * scale, **value.errors})

    def _evaluate_module(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_left: bool = False
    ) -> Any:
        if isinstance(module, nn.Sequential):
            return self._evaluate_fused(module, args, kwargs)
        if type(module) in MODULES:
            return MODULES[type(module)](self, module, args, kwargs)
        kind = next((each for each in type(module).__mro__ if each in REFERENCE_MODULES), None)
        if kind is not None:
            function, args = REFERENCE_MODULES[kind](module, self._read_weight(module), *args, **kwargs)
            return self._call_op(_find_rule(function), function, args, {})
        if type(module) in FLOAT_MODULES:  # its products are summed in float32, whatever is done with integers
            weight = Value(real=module.weight.detach().double())
            function, args = FLOAT_MODULES[type(module)](module, weight, *args, **kwargs)
            return self._call_op(_find_rule(function), function, args, {}, sums_floats=True)
        rule = rule_of(type(module))
        if rule is None:
            raise NoOracleError(f"no rule in the oracle's table for module {type(module).__name__}")
        return self._call_op(rule, rule.exact or self._copy_to_double(module), args, kwargs, is_left=is_left)

    def _evaluate_fused(self, module: nn.Sequential, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The modules of a fused one, in turn; of one with a forward of its own, such as a sum, what that calls."""
        if type(module).forward is nn.Sequential.forward:
            (value,) = args
            for inner in module:
                value = self._evaluate_module(inner, (value,), {})
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
            GraphModule(module, graph), self.capabilities, counts_weights=self.counts_weights,
            dynamic_range=self.dynamic_range,
        )  # fmt: skip
        walk._left_in_float = frozenset()  # what follows the module decides
        return walk

    def _copy_to_double(self, module: nn.Module) -> nn.Module:
        """The module in float64, made once."""
        if id(module) not in self._doubles:
            self._doubles[id(module)] = copy.deepcopy(module).double().eval()
        return self._doubles[id(module)]

    def _read_weight(self, module: Any) -> Value:
        """A reference module's weight as it was folded to integers, once, with torch's own semantics."""
        if module.weight_dtype is torch.float16:
            return read_half_weight(module.weight.detach().half(), counts_weights=self.counts_weights)
        integers = integers_of(module.get_quantized_weight())
        scale, zero_point = module.weight_scale.double(), module.weight_zero_point.double()
        axis = int(module.weight_axis) if scale.numel() > 1 else 0
        scale, zero_point = _along(axis, integers, scale, zero_point)
        return dequantize(integers, scale, zero_point, counts_weights=self.counts_weights)

    def _call_op(
        self, rule: OpRule, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
        is_left: bool = False, sums_floats: bool = False,
    ) -> Any:  # fmt: skip
        """Call an op; one left in float is summed in float32 by any backend; integer products may come as floats."""
        sums_floats = sums_floats or (is_left and rule.arithmetic != DOT_PRODUCT)
        capabilities = replace(self.capabilities, float_accumulation=True) if sums_floats else self.capabilities
        call = OpCall(function=rule.exact or function, args=args, kwargs=kwargs, capabilities=capabilities)
        result = call.evaluate(lambda value: value.real.clone(), lambda tensor: tensor.double())
        errors = rule.bound(replace(call, result=result))
        if isinstance(result, (tuple, list)):
            if not isinstance(errors, tuple):  # each cause has a tuple, of a bound for each result
                errors = [{cause: each[number] for cause, each in errors.items()} for number in range(len(result))]
            return tuple(Value(real=real, errors=each) for real, each in zip(result, errors, strict=True))
        factors = [value for value in call.values() if value.real.dim() > 1 or value is call.values()[0]]
        step = None
        if rule.arithmetic == DOT_PRODUCT and len(factors) > 1:
            step = find_accumulator_step(function, factors[0], factors[1], result)
        if rule.arithmetic == MOVES and len(factors) == 1 and result.shape == factors[0].real.shape:
            step = factors[0].step  # a relu on an accumulator
        return Value(real=result, errors=errors, step=step)


class _ForwardTracer(torch.fx.Tracer):
    """Traces the forward of one module, and goes into none of the modules inside."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Take every module as it is."""
        return True


def _along(axis: int, integers: Tensor, *qparams: Tensor) -> list[Tensor]:
    """Qparams per channel, or one for all, in a shape that broadcasts to the integers along an axis."""
    shape = [1] * integers.dim()
    shape[axis] = -1
    return [numbers.reshape(shape) for numbers in qparams]


def _find_rule(function: Any) -> OpRule:
    """The rule of a function that a module computes."""
    rule = rule_of(function)
    if rule is None:
        raise NoOracleError(f"no rule in the oracle's table for {function}")
    return rule


def _find_nodes_left_in_float(model: GraphModule) -> Iterator[Node]:
    """Nodes from which no way leads to a quantize."""
    quantized_later = set[Node]()
    for node in reversed(model.graph.nodes):
        if is_quantize(node) or quantized_later.intersection(node.users):
            quantized_later.add(node)
        else:
            yield node


def _enter(value: Any) -> Any:
    return Value(real=value.double()) if isinstance(value, Tensor) and value.is_floating_point() else value
