"""The oracle: the exact real result of a reference model, and how far a right backend may be from it (NUM-03, NUM-04).

It walks the reference graph, in either form. Weights enter as the integers that the reference model itself folds them
to; between dequantize and quantize everything is float64, in which products and sums of 8-bit integers of these sizes
are exact but for about 2⁻⁵⁰. Each value carries a bound on its error (error_bounds.py). Where a value is quantized and
the bound lets it fall on either side of a tie, one step of error goes on; elsewhere none. How a value is quantized
follows from what the backend declares (requantizing.py).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from backends.base import Capabilities, Requantize, RoundingMode
from conformance.oracle.dynamic import dequantize, half_steps_of, read_half_weight
from conformance.oracle.error_bounds import (
    DOT_PRODUCT,
    FUNCTION,
    MOVES,
    Accumulator,
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
from conformance.oracle.requantizing import (
    Target,
    bound_factor,
    bound_first_rounding,
    find_accumulator,
    find_target,
)
from conformance.oracle.rules_dynamic import MODULES, NODES
from conformance.oracle.rules_weighted import FLOAT_MODULES, REFERENCE_MODULES
from conformance.oracle.table import rule_of
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.tracing import attribute_of

_FLOAT32 = Requantize()
READS_SHAPE = frozenset({"size", "dim", "numel", getattr})
"""What is called to read a shape: it is the same of a value and of its integers."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact result of one output of a model.

    ``grid``: the output's; None: the output is a float tensor. ``errors``: by cause, in real units (error_bounds.py).
    ``step``: what distances are measured in: the grid's scale; of a float output the step of its accumulator, or of
    half precision at its value. ``accumulator``, ``is_function``: those of the value (error_bounds.py).
    ``requantize``: how a right backend makes its integers.
    """

    real: Tensor
    errors: Mapping[str, Tensor]
    step: Tensor
    grid: Grid | None = None
    accumulator: Accumulator | None = None
    is_function: bool = False
    requantize: Requantize = _FLOAT32

    @cached_property
    def integers(self) -> Tensor:
        """v: the real result in steps of the grid, plus its zero point; clamped, not rounded. (NUM-03)"""
        assert self.grid is not None, "a float output has no integers"
        return self.grid.integers(self.real).clamp(self.grid.low, self.grid.high)

    @cached_property
    def slack_by_cause(self) -> dict[str, Tensor]:
        """The slack by cause, in steps: of quantized outputs beyond 1/2, of float outputs in all. (NUM-04)

        ``final`` is the factor of the rescale and what follows (requantizing.py); of a float output 2u·|y|.
        """
        by_cause = {cause: (error / self.step).expand_as(self.real) for cause, error in self.errors.items()}
        if self.grid is None:
            return by_cause | {"final": 2 * U * self.real.abs() / self.step}
        by_cause["final"] = bound_factor(self.requantize, self.integers, self.grid.zero_point)
        if self.requantize.rounds_twice and self.accumulator is not None:
            first = bound_first_rounding(self.requantize, self.accumulator, self.grid.scale)
            by_cause["first rounding"] = first.expand_as(self.real)
        return by_cause

    @cached_property
    def slack(self) -> Tensor:
        """The sum over all causes, in steps."""
        return sum(self.slack_by_cause.values(), torch.zeros_like(self.real))

    @cached_property
    def target(self) -> Target:
        """The integers that are right but for the slack. (NUM-03)"""
        assert self.grid is not None, "a float output has no integers"
        if not self.has_named_rounding:
            return Target(centre=self.integers, half=0.5)
        error = sum(self.errors.values(), torch.zeros_like(self.real))
        return find_target(self.requantize, self.real, self.grid, self.accumulator, error).clamp(self.grid)

    @property
    def has_named_rounding(self) -> bool:
        """Whether the backend declares to which integer it rounds, and does not leave it at the nearest."""
        return self.accumulator is not None and self.requantize.rounding is not RoundingMode.NEAREST


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
        self._constants: dict[Node, Any] = {}
        self._left_in_float = frozenset(_find_nodes_left_in_float(model))

    def exact(self, inputs: tuple[Any, ...]) -> tuple[Exact, ...]:
        """Evaluate on inputs; return the exact result of each output tensor, in order.

        Raises NoOracleError for an op without a rule, or an output that is no tensor.
        """
        feed = iter(inputs)
        self.values = {}
        with torch.no_grad():
            for node in self.model.graph.nodes:
                if node.op == "output":
                    return tuple(exact for output in flatten(node.args[0]) for exact in self._read_results(output))
                self.values[node] = _enter(next(feed)) if node.op == "placeholder" else self._evaluate(node)
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
        return Exact(
            real=computed.real, errors=computed.errors, step=torch.tensor(grid.scale, dtype=torch.float64), grid=grid,
            accumulator=computed.accumulator, is_function=computed.is_function,
            requantize=self._choose_requantize(computed),
        )  # fmt: skip

    def _choose_requantize(self, value: Value) -> Requantize:
        """Return how a value is quantized: as declared if it is made of integers alone, else in float32."""
        return _FLOAT32 if value.accumulator is None else self.capabilities.requantize

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
        grid, requantize = grid_of(self.model, node), self._choose_requantize(value)
        real = grid.integers(value.real)
        integers = real.clamp(grid.low, grid.high)
        is_on_grid = not value.errors and bool((real == integers.round()).all())
        if is_on_grid and not requantize.rounding.is_directed:  # no ambiguity
            return Quantized(integers=integers, node=node, computed=value)
        error = value.error()
        slack = error / grid.scale + bound_factor(requantize, integers, grid.zero_point)  # rule: NUM-04
        if value.accumulator is not None and requantize.rounds_twice:
            slack = slack + bound_first_rounding(requantize, value.accumulator, grid.scale)
        target = find_target(requantize, value.real, grid, value.accumulator, error)
        reach = target.half + slack
        low = (target.centre - reach).ceil().clamp(grid.low, grid.high)
        high = (target.centre + reach).floor().clamp(grid.low, grid.high)
        integers = target.centre.round().clamp(low, high)
        return Quantized(integers=integers, node=node, computed=value, tie_ambiguity=high - low)

    def _dequantize(self, quantized: Any) -> Any:
        if isinstance(quantized, Value):  # float16: the value is what it was rounded to
            return quantized
        scale, zero_point, axis = qparams_of(self.model, quantized.node)
        if axis is not None:
            scale, zero_point = _along(axis, quantized.integers, scale, zero_point)
        counts_weights = self.counts_weights and quantized.computed is None
        value = dequantize(quantized.integers, scale, zero_point, counts_weights=counts_weights)
        value = replace(value, accumulator=Accumulator(step=scale))
        ambiguity = quantized.tie_ambiguity
        if ambiguity is None or not bool(ambiguity.any()):
            return value
        return replace(value, errors={"upstream": ambiguity * scale, **value.errors})

    def _evaluate_module(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_left: bool = False
    ) -> Any:
        if isinstance(module, nn.Sequential):
            return self._evaluate_chain(module, args)
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

    def _evaluate_chain(self, module: Any, args: tuple[Any, ...]) -> Any:
        """The modules of a fused one, in turn; one that adds a second input does so after the first module."""
        value, *second = args
        for number, inner in enumerate(module):
            value = self._evaluate_module(inner, (value,), {})
            if number == 0 and second:
                value = self._call_op(_find_rule(module.add), module.add, (value, *second), {})
        return value

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
        call = replace(call, result=result)
        errors, is_function = rule.bound(call), _approximates(rule, call)
        if isinstance(result, (tuple, list)):
            if not isinstance(errors, tuple):  # each cause has a tuple, of a bound for each result
                errors = [{cause: each[number] for cause, each in errors.items()} for number in range(len(result))]
            accumulator = find_accumulator(rule, call, None)
            return tuple(
                Value(real=real, errors=each, accumulator=accumulator, is_function=is_function)
                for real, each in zip(result, errors, strict=True)
            )
        factors = [value for value in call.values() if value.real.dim() > 1 or value is call.values()[0]]
        step = None
        if rule.arithmetic == DOT_PRODUCT and len(factors) > 1:
            step = find_accumulator_step(function, factors[0], factors[1], result)
        if rule.arithmetic == MOVES and len(factors) == 1 and result.shape == factors[0].real.shape:
            step = factors[0].step  # a relu on an accumulator
        accumulator = find_accumulator(rule, call, step)
        return Value(real=result, errors=errors, step=step, accumulator=accumulator, is_function=is_function)


def _approximates(rule: OpRule, call: OpCall) -> bool:
    """Tell whether a function was evaluated for an op's result, by the op or before it, on the same float value."""
    return rule.arithmetic == FUNCTION or any(value.is_function for value in call.values())


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
