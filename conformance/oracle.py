"""The oracle: the exact real result of a reference model on given integers, and how far an integer output is from it.

It walks the reference graph. Activations and weights enter as integers; between dequantize and quantize everything is
float64, in which products and sums of 8-bit integers of these sizes are exact but for about 2⁻⁵⁰. The same walk on
absolute operands gives the bound for kernels that accumulate in floating point (NUM-04).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.grids import (
    Grid,
    NoOracleError,
    grid_of,
    input_grids,
    is_range_clamp,
    qparams,
    quantized_from,
)
from refimpl.invariants import is_dequantize, is_quantize
from refimpl.tracing import attribute_of

__all__ = ["Exact", "Grid", "NoOracleError", "Walk", "grid_of", "input_grids", "slack"]

UNIT_ROUNDOFF = 2.0**-24  # of float32


# -- the table: what computes an op exactly, and how many terms one result sums --------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """How the oracle treats an op: ``terms(operands)`` is the number of products or summands behind one result.

    0: the op only moves or selects values (NUM-05). The exact function is the op itself on float64 operands.
    ``rescales_apart``: the operands have scales of their own, so no integer sum of them exists (NUM-04).
    """

    terms: Callable[..., int]
    rescales_apart: bool = False


def _moves(*_: Any) -> int:
    return 0


def _two(*_: Any) -> int:
    return 2


def _weight_terms(x: Tensor, weight: Tensor, *_: Any) -> int:
    return weight[0].numel() + 1


def _window(x: Tensor, *_: Any) -> int:
    """At most all spatial positions of one channel enter an average."""
    return max(1, x[0, 0].numel() if x.dim() > 2 else x[0].numel())


FUNCTIONS: dict[Any, Row] = {
    **dict.fromkeys((F.linear, F.conv1d, F.conv2d, F.conv3d), Row(_weight_terms)),
    **dict.fromkeys((operator.add, torch.add), Row(_two, rescales_apart=True)),
    **dict.fromkeys((operator.mul, torch.mul), Row(_two)),
    **dict.fromkeys(
        (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
         F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), Row(_window)
    ),
    **dict.fromkeys(
        (F.relu, torch.relu, torch.cat, torch.stack, torch.flatten, torch.narrow, torch.transpose, torch.squeeze,
         torch.unsqueeze, torch.repeat_interleave, torch.pixel_shuffle, torch.pixel_unshuffle, F.dropout,
         F.max_pool1d, F.max_pool2d, F.max_pool3d), Row(_moves)
    ),
}  # fmt: skip
METHODS: frozenset[str] = frozenset(
    {"relu", "relu_", "contiguous", "detach", "detach_", "permute", "repeat", "repeat_interleave", "reshape", "resize_",
     "squeeze", "squeeze_", "transpose", "unsqueeze", "unsqueeze_", "view", "flatten"}
)  # fmt: skip
PLAIN_MODULES: dict[type[nn.Module], Row] = {
    **dict.fromkeys(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
         nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), Row(_window)
    ),
    **dict.fromkeys(
        (nn.ReLU, nn.Identity, nn.Dropout, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.PixelShuffle,
         nn.PixelUnshuffle), Row(_moves)
    ),
}  # fmt: skip
_REFERENCE_FUNCTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nnqr.Linear: F.linear,
    nnqr.Conv1d: F.conv1d,
    nnqr.Conv2d: F.conv2d,
    nnqr.Conv3d: F.conv3d,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The exact result behind a model's output.

    ``integers``: v, the real result in steps of the output's grid plus its zero point; clamped, not rounded.
    ``absolute``: the same computation on absolute operands, in steps of the grid. ``terms``: summands behind a result.
    ``bias_step``: s_x·s_w per channel (broadcast to the output) where an int32 bias would be rounded, else None.
    ``rescaled_apart``: summands were rescaled one by one, before they were added.
    """

    integers: Tensor
    absolute: Tensor
    grid: Grid
    terms: int
    bias_step: Tensor | None
    rescaled_apart: bool = False


@dataclass(frozen=True, slots=True)
class _Value:
    """A real value on the walk: exact, on absolute operands, and a bound on what rounding the weights did to it.

    ``scale``: of the grid that it came from; None: computed.
    """

    real: Tensor
    absolute: Tensor
    weight_error: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Quantized:
    integers: Tensor
    node: Node
    computed: _Value | None = None


class Walk:
    """One evaluation of a reference graph in float64. Use ``exact`` for the output of a single pattern."""

    def __init__(self, model: GraphModule) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self._terms = 0
        self._bias_step: Tensor | None = None
        self._rescaled_apart = False
        self._values: dict[Node, Any] = {}

    def exact(self, inputs: tuple[Tensor, ...]) -> Exact:
        """Evaluate on float32 inputs that lie on the input grids.

        Raises NoOracleError for an op without a row, or when the output is not one quantized tensor.
        """
        self._terms, self._bias_step, self._rescaled_apart = 0, None, False
        feed = iter(inputs)
        values: dict[Node, Any] = {}
        with torch.no_grad():
            for node in self.model.graph.nodes:
                if node.op == "output":
                    break
                values[node] = next(feed) if node.op == "placeholder" else self._node(node, values)
        self._values = values
        result, quantize = self._result()
        grid = grid_of(self.model, quantize)
        return Exact(
            integers=grid.integers(result.real).clamp(grid.low, grid.high),
            absolute=result.absolute / grid.scale,
            grid=grid,
            terms=self._terms,
            bias_step=self._bias_step,
            rescaled_apart=self._rescaled_apart,
        )

    def weight_bound(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Return the real result before the output is quantized, the inputs as quantized, and a bound; all float64.

        The bound is on what rounding the weights did: weights w rounded to steps s_w change a result by at most
        ½·Σ |x|·s_w. To it is added 2⁻¹⁶ of the largest absolute result: far above any float32 rounding of a folded
        batch norm, far below any fault of structure.
        """
        self.exact(inputs)
        result, _ = self._result()
        on_grid = tuple(
            self._values[user].real
            for node in self.model.graph.nodes if node.op == "placeholder"
            for quantize in map(quantized_from, node.users) for user in quantize.users
        )  # fmt: skip
        return result.real, on_grid, result.weight_error + 2.0**-16 * result.absolute.max()

    def _result(self) -> tuple[_Value, Node]:
        """The computed value that the output quantizes, and the quantize node."""
        last: Any = next(node for node in self.model.graph.nodes if node.op == "output").args[0]
        quantized = self._values[last.args[0]] if is_dequantize(last) else None
        if not isinstance(quantized, _Quantized) or quantized.computed is None:
            raise NoOracleError(f"the model's output {last} is not a computed value that was quantized")
        return quantized.computed, quantized.node

    def _node(self, node: Node, values: dict[Node, Any]) -> Any:
        if node.op == "get_attr":
            return attribute_of(self.model, str(node.target))
        if is_quantize(node):
            return self._quantize(node, values[node.args[0]])  # type: ignore[index]
        if is_dequantize(node):
            return self._dequantize(values[node.args[0]])  # type: ignore[index]
        if is_range_clamp(node) and isinstance(values[node.args[0]], _Value):  # type: ignore[index]
            return values[node.args[0]]  # type: ignore[index]  # rule: CVT-09; the grid's bounds clamp it
        arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lambda value: values[value])
        if node.op == "call_module":
            return self._module(self.modules[str(node.target)], arguments)
        if node.op == "call_method" and node.target in METHODS:
            return self._call(Row(_moves), lambda x, *rest: getattr(x, str(node.target))(*rest), arguments, keywords)
        if node.op == "call_function" and not _has_value(arguments) and not _has_value(keywords):
            function: Any = node.target
            return function(*arguments, **keywords)  # of attributes and raw inputs: float32, as the model computes it
        if node.op == "call_function" and node.target in FUNCTIONS:
            return self._call(FUNCTIONS[node.target], node.target, arguments, keywords)
        raise NoOracleError(f"no row in the oracle's table for {node.op} {node.target}")

    def _quantize(self, node: Node, value: Any) -> _Quantized:
        """A float32 input or weight is quantized by torch's own op; a computed value keeps its exact real result."""
        if isinstance(value, _Value):
            grid = grid_of(self.model, node)
            integers = grid.integers(value.real).round().clamp(grid.low, grid.high)
            return _Quantized(integers, node, value)
        quantize: Any = node.target
        found = quantize(value, *(self._argument(argument) for argument in node.args[1:]))
        return _Quantized((found.int_repr() if found.is_quantized else found).double(), node)

    def _argument(self, argument: Any) -> Any:
        return attribute_of(self.model, str(argument.target)) if isinstance(argument, Node) else argument

    def _dequantize(self, value: _Quantized) -> _Value:
        scale, zero_point, axis = qparams(self.model, value.node)
        if axis is not None:
            shape = [1] * value.integers.dim()
            shape[axis] = -1
            scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
        real = (value.integers - zero_point) * scale
        half_step = scale / 2 if _is_constant(value.node.args[0]) else torch.zeros_like(scale)
        return _Value(real, real.abs(), half_step.expand_as(real), scale)

    def _module(self, module: nn.Module, arguments: tuple[Any, ...]) -> _Value:
        if isinstance(module, nn.Sequential):
            for inner in module:
                arguments = (self._module(inner, arguments),)
            result: _Value = arguments[0]
            return result
        function = _REFERENCE_FUNCTIONS.get(type(module))
        if function is not None:
            return self._reference_module(module, function, arguments[0])
        if type(module) in PLAIN_MODULES:
            return self._call(PLAIN_MODULES[type(module)], module, arguments, {})
        raise NoOracleError(f"no row in the oracle's table for module {type(module).__name__}")

    def _reference_module(self, module: Any, function: Callable[..., Tensor], x: _Value) -> _Value:
        """Weight as integers, folded once with torch's own semantics; bias as it is, in float."""
        quantized = module.get_quantized_weight()
        integers = (quantized.int_repr() if quantized.is_quantized else quantized).double()
        per_channel = [-1, *[1] * (integers.dim() - 1)]
        scale = module.weight_scale.double().reshape(per_channel if module.weight_scale.numel() > 1 else [])
        zero_point = module.weight_zero_point.double().reshape(per_channel if module.weight_scale.numel() > 1 else [])
        real = (integers - zero_point) * scale
        weight = _Value(real, real.abs(), (scale / 2).expand_as(real), scale)
        arguments: list[Any] = [x, weight, module.bias]
        if function is not F.linear:
            arguments += [module.stride, module.padding, module.dilation, module.groups]
        return self._call(FUNCTIONS[function], function, tuple(arguments), {})

    def _call(self, row: Row, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Value:
        is_weighted = row.terms is _weight_terms
        if is_weighted:
            self._note_bias(arguments)
        operands = (arguments, keywords)
        real = _each(operands, lambda value: value.real, lambda bias: bias.double())
        absolute = _each(operands, lambda value: value.absolute, lambda bias: bias.double().abs())
        error = _each(operands, lambda value: value.weight_error, lambda bias: torch.zeros_like(bias).double())
        if is_weighted:
            error = ((absolute[0][0], *error[0][1:]), error[1])
        self._terms += row.terms(*real[0])
        self._rescaled_apart |= row.rescales_apart
        return _Value(*(function(*args, **kwargs) for args, kwargs in map(_cloned, (real, absolute, error))))

    def _note_bias(self, arguments: tuple[Any, ...]) -> None:
        """Remember s_x·s_w when there is a bias that an int32 representation would round. (NUM-04)"""
        x, weight = arguments[:2]
        has_bias = len(arguments) > 2 and isinstance(arguments[2], Tensor)
        if has_bias and x.scale is not None:
            trailing = [1] * (weight.real.dim() - 2)
            step = (x.scale * weight.scale).flatten()
            self._bias_step = step.reshape(-1, *trailing)


def _has_value(structure: Any) -> bool:
    if isinstance(structure, (tuple, list)):
        return any(map(_has_value, structure))
    return isinstance(structure, _Value) or (isinstance(structure, dict) and any(map(_has_value, structure.values())))


def _is_constant(node: Any) -> bool:
    """Tell whether a value depends on attributes of the model alone: a weight."""
    return node.op == "get_attr" or (node.op != "placeholder" and all(map(_is_constant, node.all_input_nodes)))


def _cloned(arguments: Any) -> Any:
    """Copy the tensors, so that an in-place op does not change an operand of the walk."""
    return _each(arguments, lambda value: value, lambda tensor: tensor.clone())


def _each(structure: Any, of_value: Callable[[_Value], Any], of_tensor: Callable[[Tensor], Any]) -> Any:
    if isinstance(structure, _Value):
        return of_value(structure)
    if isinstance(structure, Tensor):
        return of_tensor(structure) if structure.is_floating_point() else structure
    if isinstance(structure, (tuple, list)):
        return type(structure)(_each(item, of_value, of_tensor) for item in structure)
    if isinstance(structure, dict):
        return {key: _each(item, of_value, of_tensor) for key, item in structure.items()}
    return structure


def slack(exact: Exact, *, int32_bias: bool, float_accumulation: bool) -> Tensor:
    """Return how far, beyond 1/2, a correctly rounding backend may be from v, per element. (NUM-04)

    The rescale in float32, of the result and, where summands have scales of their own, of each of them (a rounding of
    the ratio and one of the product: results may cancel, their errors do not); an int32 bias where the backend declares
    one; the dot-product bound γₙ on absolute operands where the backend accumulates in floating point (Higham, Accuracy
    and Stability, 3.1).
    """
    from_zero = exact.integers - exact.grid.zero_point
    total = (3 * from_zero.abs() + exact.integers.abs()) * UNIT_ROUNDOFF
    if exact.rescaled_apart:
        total = total + 2 * exact.absolute * UNIT_ROUNDOFF
    if int32_bias and exact.bias_step is not None:
        total = total + 0.5 * exact.bias_step / exact.grid.scale
    if float_accumulation and exact.terms:
        n = exact.terms + 2  # each operand is rounded once more when it is dequantized
        gamma = n * UNIT_ROUNDOFF / (1 - n * UNIT_ROUNDOFF)
        total = total + gamma * exact.absolute
    return total
