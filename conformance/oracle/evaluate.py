"""The oracle: the exact real result of a reference model, and how far a right backend may be from it (NUM-03, NUM-04).

It walks the reference graph, in either form. Weights enter as the integers that the reference model itself folds them
to; between dequantize and quantize everything is float64, in which products and sums of 8-bit integers of these sizes
are exact but for about 2⁻⁵⁰. Beside each value goes a bound on its error (error_bounds.py). Where a value is
quantized and the bound lets it fall on either side of a tie, one step of error goes on; elsewhere none.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from backends.base import Capabilities
from conformance.oracle.dynamic import half_steps
from conformance.oracle.error_bounds import DOT_PRODUCT, MOVES, OpCall, OpRule, U, Value, accumulator_step, map_values
from conformance.oracle.grids import Grid, NoOracleError, grid_of, is_constant, is_range_clamp, qparams
from conformance.oracle.rules_dynamic import MODULES, NODES
from conformance.oracle.rules_weighted import FLOAT_MODULES, REFERENCE_MODULES
from conformance.oracle.table import rule_of
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.tracing import attribute_of


@dataclass(frozen=True, kw_only=True)
class Exact:
    """The exact result behind one output of a model.

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
        return by_cause | {"final": _final(self.integers, self.grid)}

    @cached_property
    def slack(self) -> Tensor:
        """The sum of all parts, in steps."""
        return sum(self.slack_by_cause.values(), torch.zeros_like(self.real))


def _final(integers: Tensor, grid: Grid) -> Tensor:
    return (3 * (integers - grid.zero_point).abs() + integers.abs()) * U


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """Integers on the walk, the node that made them, and, of a computed value, what it was before.

    ``tie_ambiguity``: by how many steps a right backend's integer may differ; None: by none.
    """

    integers: Tensor
    node: Node
    computed: Value | None = None
    tie_ambiguity: Tensor | None = None


class Walk:
    """Evaluations of one reference graph in float64.

    ``counts_weights``: the error of quantizing the weights is carried along (cause ``weights``): for comparing a model
    before and after. ``dynamic_range``: the integers that a dynamic input is quantized to; None: those of its dtype.
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
        self._left_in_float = frozenset(_left_in_float(model))

    def exact(self, inputs: tuple[Any, ...]) -> tuple[Exact, ...]:
        """Evaluate on inputs; return the exact result behind each output tensor, in order.

        Raises NoOracleError for an op without a row, or an output that is no tensor.
        """
        feed = iter(inputs)
        self.values = {}
        with torch.no_grad():
            for node in self.model.graph.nodes:
                if node.op == "output":
                    return tuple(exact for output in flat(node.args[0]) for exact in self._results(output))
                self.values[node] = _entered(next(feed)) if node.op == "placeholder" else self._node(node)
        raise NoOracleError("the graph has no output node")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _results(self, output: Any) -> Iterator[Exact]:
        """The results behind one output; a module that returns several has as many."""
        if is_dequantize(output) and isinstance(quantized := self.values[output.args[0]], Quantized):
            yield self._on_grid(quantized)
            return
        for value in flat(self.values.get(output) if isinstance(output, Node) else None):
            if isinstance(value, Quantized):
                yield self._on_grid(value)
            elif isinstance(value, Value):
                step = half_steps(value.real) if value.step is None else value.step
                yield Exact(real=value.real, errors=value.errors, step=step)
            else:
                raise NoOracleError(f"the model's output {output} is not a computed tensor")

    def _on_grid(self, quantized: Quantized) -> Exact:
        grid = grid_of(self.model, quantized.node)
        computed = quantized.computed
        if computed is None:
            raise NoOracleError(f"the model's output {quantized.node} is a constant")
        step = torch.tensor(grid.scale, dtype=torch.float64)
        return Exact(real=computed.real, errors=computed.errors, step=step, grid=grid)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> Any:
        if node.op == "get_attr":
            return attribute_of(self.model, str(node.target))
        if node.target in NODES and not (node.target is operator.getitem and self._is_value(node.args[0])):
            return NODES[node.target](self, node)
        if is_quantize(node) or is_dequantize(node):
            if node in self._constants:
                return self._constants[node]
            found = self._quantize(node) if is_quantize(node) else self._dequantize(node)
            if is_constant(node):
                self._constants[node] = found
            return found
        if is_range_clamp(node) and isinstance(self.values[node.args[0]], Value):  # type: ignore[index]
            return self.values[node.args[0]]  # type: ignore[index]  # rule: CVT-09; the grid's bounds clamp it
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: self.values[value])
        if node.op == "call_module":
            return self._module(self.modules[str(node.target)], args, kwargs, node in self._left_in_float)
        target: Any = node.target
        function = target if callable(target) else _method(target)
        if not _has_value((args, kwargs)):
            return function(*args, **kwargs)  # of attributes and plain data: float32, as the model computes it
        if target in READS_SHAPE:
            return function(*map_values(args, lambda value: value.real, Tensor.clone))
        if (rule := rule_of(target)) is not None:
            return self._call(rule, function, args, kwargs, self._sums(rule, node in self._left_in_float))
        raise NoOracleError(f"no rule in the oracle's table for {node.op} {target}")

    def _is_value(self, argument: Any) -> bool:
        return isinstance(argument, Node) and isinstance(self.values[argument], Value)

    def _quantize(self, node: Node) -> Any:
        """A weight is quantized by the model's own op; every other value keeps its exact real result."""
        value = self.values[node.args[0]]  # type: ignore[index]
        if not isinstance(value, Value):
            return Quantized(integers=_integers(node, value, self._argument), node=node)
        grid = grid_of(self.model, node)
        real = grid.integers(value.real)
        integers = real.clamp(grid.low, grid.high)
        if not value.errors and bool((real == integers.round()).all()):  # on the grid: nothing to doubt
            return Quantized(integers=integers, node=node, computed=value)
        slack = value.error() / grid.scale + _final(integers, grid)  # rule: NUM-04
        low, high = ((real + end).round().clamp(grid.low, grid.high) for end in (-slack, slack))
        return Quantized(integers=integers.round(), node=node, computed=value, tie_ambiguity=high - low)

    def _argument(self, argument: Any) -> Any:
        return attribute_of(self.model, str(argument.target)) if isinstance(argument, Node) else argument

    def _dequantize(self, node: Node) -> Any:
        quantized = self.values[node.args[0]]  # type: ignore[index]
        if isinstance(quantized, Value):  # float16: the value is what it was rounded to
            return quantized
        scale, zero_point, axis = qparams(self.model, quantized.node)
        if axis is not None:
            shape = [1] * quantized.integers.dim()
            shape[axis] = -1
            scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
        real = (quantized.integers - zero_point) * scale
        ambiguity = quantized.tie_ambiguity
        errors = {"upstream": ambiguity * scale} if ambiguity is not None and bool(ambiguity.any()) else {}
        if self.counts_weights and quantized.computed is None:
            errors["weights"] = (scale / 2).expand_as(real)
        return Value(real=real, errors=errors, step=scale)

    def _sums(self, rule: OpRule, is_left: bool) -> Capabilities:
        """What is not quantized again is summed in float32 by any backend; integer products may come as floats."""
        sums_floats = is_left and rule.verifier != DOT_PRODUCT
        return replace(self.capabilities, float_accumulation=True) if sums_floats else self.capabilities

    def _module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_left: bool = False
    ) -> Any:
        if isinstance(module, nn.Sequential):
            return self._chain(module, args)
        if type(module) in MODULES:
            return MODULES[type(module)](self, module, args, kwargs)
        kind = next((each for each in type(module).__mro__ if each in REFERENCE_MODULES), None)
        if kind is not None:
            function, args = REFERENCE_MODULES[kind](module, self.reference_weight(module), *args, **kwargs)
            return self._call(_known_rule(function), function, args, {})
        if type(module) in FLOAT_MODULES:
            return self._float(module, args, kwargs)
        rule = rule_of(type(module))
        if rule is None:
            raise NoOracleError(f"no rule in the oracle's table for module {type(module).__name__}")
        return self._call(rule, rule.exact or self._double(module), args, kwargs, self._sums(rule, is_left))

    def _float(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A float module with a weight: its products are summed in float32, whatever is done with integers."""
        weight = Value(real=module.weight.detach().double())
        function, args = FLOAT_MODULES[type(module)](module, weight, *args, **kwargs)
        capabilities = replace(self.capabilities, float_accumulation=True)
        return self._call(_known_rule(function), function, args, {}, capabilities)

    def _chain(self, module: Any, args: tuple[Any, ...]) -> Any:
        """The modules of a fused one, in turn; one that adds a second input does so after the first module."""
        value, *second = args
        for number, inner in enumerate(module):
            value = self._module(inner, (value,), {})
            if number == 0 and second:
                value = self._call(_known_rule(module.add), module.add, (value, *second), {})
        return value

    def _double(self, module: nn.Module) -> nn.Module:
        """The module in float64, made once."""
        if id(module) not in self._doubles:
            self._doubles[id(module)] = copy.deepcopy(module).double().eval()
        return self._doubles[id(module)]

    def reference_weight(self, module: Any) -> Value:
        """Return a reference module's weight as it was folded to integers, once, with torch's own semantics."""
        if module.weight_dtype is torch.float16:
            real = module.weight.detach().half().double()
            return Value(real=real, errors={"weights": half_steps(real) / 2} if self.counts_weights else {})
        quantized = module.get_quantized_weight()
        integers = (quantized.int_repr() if quantized.is_quantized else quantized).double()
        shape = [1] * integers.dim()
        if module.weight_scale.numel() > 1:
            shape[int(module.weight_axis)] = -1
        scale, zero_point = (each.double().reshape(shape) for each in (module.weight_scale, module.weight_zero_point))
        real = (integers - zero_point) * scale
        errors = {"weights": (scale / 2).expand_as(real)} if self.counts_weights else {}
        return Value(real=real, errors=errors, step=scale)

    def _call(
        self, rule: OpRule, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        capabilities: Capabilities | None = None,
    ) -> Any:  # fmt: skip
        call = OpCall(
            function=rule.exact or function, args=args, kwargs=kwargs, capabilities=capabilities or self.capabilities,
        )  # fmt: skip
        result = call.on(lambda value: value.real.clone(), lambda tensor: tensor.double())
        errors = rule.bound(replace(call, result=result))
        if isinstance(result, (tuple, list)):
            return tuple(Value(real=real, errors=_item(errors, number)) for number, real in enumerate(result))
        factors = [value for value in call.values() if value.real.dim() > 1 or value is call.values()[0]]
        step = None
        if rule.verifier == DOT_PRODUCT and len(factors) > 1:
            step = accumulator_step(function, factors[0], factors[1], result)
        if rule.verifier == MOVES and len(factors) == 1 and result.shape == factors[0].real.shape:
            step = factors[0].step  # a relu on an accumulator
        return Value(real=result, errors=errors, step=step)


def _known_rule(function: Any) -> OpRule:
    """The rule of a function that a module computes."""
    rule = rule_of(function)
    if rule is None:
        raise NoOracleError(f"no rule in the oracle's table for {function}")
    return rule


def _left_in_float(model: GraphModule) -> Iterator[Node]:
    """Nodes from which no way leads to a quantize."""
    becoming = set[Node]()
    for node in reversed(model.graph.nodes):
        if is_quantize(node) or becoming.intersection(node.users):
            becoming.add(node)
        else:
            yield node


def _item(errors: Any, number: int) -> Any:
    """The errors of one of several results: a bound gives a tuple of them, or each cause has a tuple."""
    return errors[number] if isinstance(errors, tuple) else {cause: each[number] for cause, each in errors.items()}


def _entered(value: Any) -> Any:
    return Value(real=value.double()) if isinstance(value, Tensor) and value.is_floating_point() else value


def flat(output: Any) -> list[Any]:
    """List what is in a structure of tuples and lists, in order; of anything else, itself."""
    if isinstance(output, (tuple, list)):
        return [item for each_item in output for item in flat(each_item)]
    return [output]


def _integers(node: Node, value: Tensor, argument: Callable[[Any], Any]) -> Tensor:
    quantize: Any = node.target
    found: Tensor = quantize(value, *map(argument, node.args[1:]))
    return (found.int_repr() if found.is_quantized else found).double()


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


READS_SHAPE = frozenset({"size", "dim", "numel", getattr})
"""What is called to read a shape: it is the same of a value and of its integers."""


def _has_value(structure: Any) -> bool:
    if isinstance(structure, (tuple, list)):
        return any(map(_has_value, structure))
    return isinstance(structure, Value) or (isinstance(structure, dict) and any(map(_has_value, structure.values())))
