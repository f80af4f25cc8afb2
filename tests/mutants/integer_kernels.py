"""A backend in miniature that computes on integers, as hardware does; each step is a method, for a test to get wrong.

It interprets the decomposed reference model. Between quantize and quantize a value is integers and their grid, or an
accumulator of integers that is still to be rescaled; no float op of the reference model is run. Integers are held in
float64, in which all sums and products of these sizes are exact.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from fx_quant_conformance.backends.base import Backend, Capabilities, Execution, Representation
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import pattern_name
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize, is_quantize
from tests.conformance.support.told import name_ops

PATTERNS = frozenset(
    {
        "nn.Linear",
        "nn.Linear+nn.ReLU",
        "nni.LinearReLU",
        "nn.Linear+nn.BatchNorm1d",
        "F.linear",
        "nnqat.Linear",
        "nniqat.LinearReLU",
        "nnqat.Conv2d",
        "nniqat.ConvReLU2d",
        "nn.Conv2d",
        "nn.Conv2d+nn.ReLU",
        "nni.ConvReLU2d",
        "nn.Conv2d+nn.BatchNorm2d",
        "torch.conv2d",
        "operator.add",
        "operator.add+nn.ReLU",
        "operator.mul",
        "torch.cat",
        "nn.ReLU",
        "nn.MaxPool2d",
        "nn.AvgPool2d",
        "nn.AdaptiveAvgPool2d",
        "torch.flatten",
        "torch.transpose",
    }
)


CLAIMS = ("*/static:*",)
"""These kernels know no other claims."""
SAMPLE = (
    "nn.Linear/static:in=quint8*/ptq/per_channel*",
    "nn.Linear+nn.ReLU/static:in=quint8*/ptq/per_channel*",
    "nn.Conv2d/static:in=quint8*/ptq/per_channel*",
    "torch.conv2d/static:in=qint8*/ptq/per_channel*",
    "operator.*/static:in=quint8*/ptq/*",
    "torch.*/*=quint8*/ptq/no_weight",
    "nn.ReLU/*=quint8*/ptq/*",
    "nn.*Pool2d/*=quint8*/ptq/*",
    "nn.MaxPool2d/*=qint8*/ptq/*",
)
"""What the gate runs of them in full."""
LIMITS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {"nn.Conv2d": {"padding_mode": ("zeros",)}}
"""These kernels pad with the zero point alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Quantized values: real = (q - zero_point) * scale, low <= q <= high; per channel along axis 0 if many scales."""

    q: Tensor
    scale: Tensor
    zero_point: Tensor
    low: int
    high: int

    def centred(self) -> Tensor:
        """Return the integers with 0 for the real zero."""
        shape = [-1, *[1] * (self.q.dim() - 1)] if self.zero_point.numel() > 1 else []
        return self.q - self.zero_point.reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """An accumulator: real = total * scale. ``late``: a bias, as a real, that is added after the rescale.

    ``own``: makes integers of the result's grid, where an op has an arithmetic of its own.
    """

    total: Tensor
    scale: Tensor
    rectified: bool = False
    late: Tensor | None = None
    own: Callable[[Integers], Tensor] | None = None


class Kernels(Interpreter):
    """An honest set of integer kernels: exact sums, one rescale, half to even, clamp."""

    def run_node(self, n: Node) -> Any:
        arguments, keywords = self.fetch_args_kwargs_from_env(n)
        if is_quantize(n):
            return self.quantize(arguments[0], arguments[1:], n.target)
        if is_dequantize(n):
            return arguments[0]
        if n.op == "output":
            results = arguments[0]
            return tuple(map(self.dequantize, results)) if isinstance(results, tuple) else self.dequantize(results)
        if n.op == "call_module":
            return self.call(self.fetch_attr(str(n.target)), arguments)
        if n.op == "call_function":
            return self.function(n.target, arguments, keywords)
        return super().run_node(n)

    # -- steps that a fault may replace ------------------------------------------------------------------------------

    def zeroed(self, x: Integers) -> Tensor:
        """Take the zero point off an activation."""
        return x.centred()

    def weight_scale(self, weight: Integers) -> Tensor:
        return weight.scale

    def linear(self, x: Integers, weight: Integers) -> Tensor:
        return F.linear(self.zeroed(x), weight.centred())

    def convolution(self, x: Integers, weight: Integers, geometry: tuple[Any, ...]) -> Tensor:
        return F.conv2d(self.zeroed(x), weight.centred(), None, *geometry)

    def with_bias(self, total: Sum, bias: Tensor) -> Sum:
        return replace(total, total=total.total + bias / total.scale)

    def add(self, x: Integers, y: Integers) -> Sum:
        return Sum(total=self.zeroed(x) * x.scale + self.zeroed(y) * y.scale, scale=torch.ones(()).double())

    def add_number(self, x: Integers, number: float) -> Sum:
        return Sum(total=self.zeroed(x) + number / x.scale, scale=x.scale)

    def mul(self, x: Integers, y: Integers) -> Sum:
        return Sum(total=self.zeroed(x) * self.zeroed(y), scale=x.scale * y.scale)

    def mul_number(self, x: Integers, number: float) -> Sum:
        return Sum(total=self.zeroed(x) * number, scale=x.scale)

    def cat(self, values: list[Integers], dim: int) -> Integers:
        return replace(values[0], q=torch.cat([value.q for value in values], dim))

    def average(self, pool: Any, x: Integers) -> Tensor:
        total: Tensor = pool(self.zeroed(x))
        return total

    def maximum(self, pool: Any, x: Integers) -> Tensor:
        total: Tensor = pool(x.q)
        return total

    def rescale(self, total: Tensor, ratio: Tensor) -> Tensor:
        return total * ratio

    def rounded(self, value: Tensor) -> Tensor:
        return value.round()

    def placed(self, value: Tensor, zero_point: Tensor) -> Tensor:
        """Put the zero point on a rounded result."""
        return value + zero_point

    def clamped(self, value: Tensor, grid: Integers, *, rectified: bool) -> Tensor:
        low = max(grid.low, int(grid.zero_point)) if rectified else grid.low
        return value.clamp(low, grid.high)

    def relu(self, x: Integers) -> Integers:
        return replace(x, q=torch.maximum(x.q, x.zero_point))

    def dequantize(self, x: Integers) -> Tensor:
        return (x.centred() * x.scale).float()

    # -- the plan ----------------------------------------------------------------------------------------------------

    def quantize(self, value: Any, numbers: tuple[Any, ...], target: Any) -> Integers:
        scale, zero_point = (torch.as_tensor(number).double() for number in numbers[:2])
        grid = Integers(q=torch.empty(0), scale=scale, zero_point=zero_point, low=numbers[-3], high=numbers[-2])
        if isinstance(value, Tensor):
            return replace(grid, q=target(value, *numbers).double())
        return value if isinstance(value, Integers) else self.requantize(value, grid)

    def scaled(self, value: Sum, grid: Integers) -> Tensor:
        """Integers of a grid, before its zero point and its ends."""
        if value.own is not None:
            return value.own(grid)
        scaled = self.rounded(self.rescale(value.total, value.scale / grid.scale))
        return scaled if value.late is None else scaled + self.rounded(value.late / grid.scale)

    def requantize(self, value: Sum, grid: Integers) -> Integers:
        placed = self.placed(self.scaled(value, grid), grid.zero_point)
        return replace(grid, q=self.clamped(placed, grid, rectified=value.rectified))

    def call(self, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        if isinstance(module, nn.Sequential):
            for inner in module:
                arguments = (self.call(inner, arguments),)
            return arguments[0]
        if isinstance(module, (nnqr.Linear, nnqr.Conv2d)):
            return self.reference_module(module, arguments[0])
        if isinstance(module, nn.MaxPool2d):
            return replace(arguments[0], q=self.maximum(copy.copy(module), arguments[0]))
        if isinstance(module, (nn.AvgPool2d, nn.AdaptiveAvgPool2d)):
            return Sum(total=self.average(copy.copy(module), arguments[0]), scale=arguments[0].scale)
        return self.function(F.relu, arguments, {}) if isinstance(module, nn.ReLU) else module(*arguments)

    def reference_module(self, module: Any, x: Integers) -> Sum:
        weight = Integers(
            q=module.get_quantized_weight().double(),
            scale=module.weight_scale.double(),
            zero_point=module.weight_zero_point.double(),
            low=module.weight_quant_min,
            high=module.weight_quant_max,
        )
        if isinstance(module, nnqr.Linear):
            return self.weighted(x, weight, module.bias, ())
        geometry = (module.stride, module.padding, module.dilation, module.groups)
        return self.weighted(*_in_numbers(x, weight, module.bias, *geometry))

    def weighted(self, x: Integers, weight: Integers, bias: Tensor | None, geometry: tuple[Any, ...]) -> Sum:
        total = self.convolution(x, weight, geometry) if geometry else self.linear(x, weight)
        per_channel = [-1, *[1] * (weight.q.dim() - 2)]
        scale = (x.scale * self.weight_scale(weight)).reshape(per_channel)
        found = Sum(total=total, scale=scale)
        return found if bias is None else self.with_bias(found, bias.detach().double().reshape(per_channel))

    def function(self, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if target is F.linear:
            x, weight, *bias = arguments
            return self.weighted(x, weight, bias[0] if bias else keywords.get("bias"), ())
        if target is torch.conv2d:
            return self.weighted(*_in_numbers(*arguments, **keywords))
        if target in (operator.add, operator.mul):
            return self.binary(target is operator.add, *arguments)
        if target is torch.cat:
            return self.cat(arguments[0], *arguments[1:] or (keywords.get("dim", 0),))
        if target is F.relu:
            is_sum = isinstance(arguments[0], Sum)
            return replace(arguments[0], rectified=True) if is_sum else self.relu(arguments[0])
        return replace(arguments[0], q=target(arguments[0].q, *arguments[1:], **keywords))

    def binary(self, is_sum: bool, x: Any, y: Any) -> Sum:
        if isinstance(x, Integers) and isinstance(y, Integers):
            return (self.add if is_sum else self.mul)(x, y)
        x, number = (x, y) if isinstance(x, Integers) else (y, x)
        return (self.add_number if is_sum else self.mul_number)(x, number)


def _in_numbers(
    x: Integers,
    weight: Integers,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Integers, Integers, Tensor | None, tuple[Any, ...]]:
    """A convolution's operands and geometry, with padding in numbers; what is more on one side is in the input."""
    if padding == "same":
        steps = (dilation, dilation) if isinstance(dilation, int) else dilation
        total = [step * (size - 1) for step, size in zip(steps, weight.q.shape[2:], strict=True)]
        more = (0, total[1] % 2, 0, total[0] % 2)
        x, padding = replace(x, q=F.pad(x.q, more, value=float(x.zero_point))), tuple(each // 2 for each in total)
    return x, weight, bias, (stride, 0 if padding == "valid" else padding, dilation, groups)


Make = Callable[[GraphModule], Interpreter]


def varied(method: str, body: Callable[..., Any], kernels: type[Kernels] = Kernels) -> type[Kernels]:
    """Return kernels with one step replaced; the body gets the honest step first, then the step's arguments."""

    def step(self: Kernels, *arguments: Any, **keywords: Any) -> Any:
        return body(getattr(super(made, self), method), *arguments, **keywords)

    made = type(f"Varied_{method}", (kernels,), {method: step})
    return made


class IntegerBackend(Backend):
    """Claims a handful of qnnpack's patterns, and runs them on the given kernels; says so if it ``reports``."""

    representation = Representation.DECOMPOSED

    def __init__(
        self, kernels: Make = Kernels, name: str = "honest", *, reports: bool = True, **capabilities: Any
    ) -> None:
        self.name = name
        self._reports = reports
        self._kernels = kernels
        self._capabilities = Capabilities(
            weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"), limits=LIMITS, **capabilities
        )

    def backend_config(self) -> BackendConfig:
        return small_config()

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        run: Callable[..., Any] = torch.no_grad()(self._kernels(reference_model).run)
        return run

    def execution(self, lowered: Any) -> Execution | None:
        return Execution(quantized_ops=name_ops(lowered), float_fallbacks=()) if self._reports else None


class SilentIntegers(IntegerBackend):
    """The honest kernels of a backend that cannot say what it runs."""

    def __init__(self) -> None:
        super().__init__(name="silent_integers", reports=False)


@cache
def small_config() -> BackendConfig:
    """The entries of qnnpack's config whose patterns these kernels know."""
    entries = [entry for entry in native_config("qnnpack").configs if pattern_name(entry.normal_pattern) in PATTERNS]
    return BackendConfig("small").set_backend_pattern_configs(entries)
