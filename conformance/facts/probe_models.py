"""Probes: tiny models of one op, on grids that the probe chooses, taken through the flow and run by a backend.

A probe swaps the observers of a prepared model for fixed ones, so that scales, zero points and operands are exactly
what it needs to tell one kind of arithmetic from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from backends.base import Backend, Capabilities
from conformance.facts.kernel_models import Rounding, Rule
from conformance.machine.memory import filled
from conformance.oracle.grids import Grid
from conformance.stages.backend_calls import StageError, run_lowered
from refimpl import (
    BackendConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FixedQParamsObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    explain,
    prepare_fx,
)
from refimpl.observers import dtype_range

WEIGHT_SCALE = 2.0**-7
"""The scale of every weight: a weight holds 127 steps somewhere, in each channel."""

WEIGHT_END = 127


class Bench(Protocol):
    """What a probe needs of the workbench. ``lower`` and what it returns may raise whatever the backend raises."""

    backend: Backend
    config: BackendConfig
    capabilities: Capabilities

    def convert(self, prepared: GraphModule) -> GraphModule:
        """Return the reference model, in the form that the backend takes."""
        ...

    def lower(self, reference: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Return what the backend makes of a reference model: something to call with inputs like the examples."""
        ...


class Unmeasured(Exception):
    """A probe cannot tell; the message is the reason, for the report."""


Operand: TypeAlias = tuple[Grid, Tensor]
"""An input of a model: the grid that it is quantized to, and its float32 values."""


def operand(grid: Grid, centred: Tensor) -> Operand:
    """Return an input whose values are on their grid. ``centred``: their integers less the zero point."""
    return grid, grid.values(centred + grid.zero_point)


def all_integers(grid: Grid) -> Tensor:
    """Return every integer of a grid, less its zero point (float64)."""
    return torch.arange(grid.low, grid.high + 1).double() - grid.zero_point


class OneInput(nn.Module):
    """Calls a function, a method or a module of one tensor."""

    def __init__(self, op: Any, *arguments: Any) -> None:
        super().__init__()
        self.op = op(*arguments) if isinstance(op, type) else op
        self.arguments = () if isinstance(op, type) else arguments

    def forward(self, x: Tensor) -> Any:
        """Return the op's result for a tensor of any shape that it takes."""
        if isinstance(self.op, str):
            return getattr(x, self.op)(*self.arguments)
        return self.op(x, *self.arguments)


class TwoInputs(nn.Module):
    """Calls a function of two tensors, and a ReLU behind it if asked for."""

    def __init__(self, op: Callable[..., Any], *, rectified: bool = False) -> None:
        super().__init__()
        self.op = op
        self.relu = nn.ReLU() if rectified else None

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Return the function's result for two tensors, rectified if asked for."""
        result = self.op(x, y)
        return result if self.relu is None else self.relu(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model of one op, its inputs, and the grid of its output."""

    model: nn.Module
    inputs: tuple[Operand, ...]
    output: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where probes run: a backend, the pattern and dtype config of a claim, and a weight scheme.

    ``has_relu``: the config also claims the pattern with a ReLU behind it.
    """

    bench: Bench
    pattern: Any
    dtypes: DTypeConfig
    scheme: str
    has_relu: bool

    def grid(self, scale: float, zero_point: int | None = None) -> Grid:
        """Return a grid of an activation over the whole range; its zero point is in the middle, and odd."""
        low, high = activation_range(self.dtypes)
        middle = (low + high) // 2 if zero_point is None else zero_point
        dtype = str(self.dtypes.input_dtype).removeprefix("torch.")
        return Grid(scale=scale, zero_point=middle, low=low, high=high, dtype=dtype)

    def relu_grid(self, scale: float) -> Grid:
        """Return a grid whose zero point, a quarter into the range, is neither integer 0 nor an end."""
        whole = self.grid(scale)
        return self.grid(scale, whole.low + (whole.high - whole.low) // 4)

    def fixed_grid(self) -> Grid | None:
        """Return the output's grid where the dtype config leaves no other. (DTY-05)"""
        wanted = self.dtypes.output_dtype_with_constraints
        if wanted.scale_exact_match is None or wanted.zero_point_exact_match is None:
            return None
        return self.grid(float(wanted.scale_exact_match), int(wanted.zero_point_exact_match))

    def run(self, setup: Setup) -> Tensor:
        """Return a model's results as integers less the output's zero point (float64). Raises Unmeasured.

        A kernel whose second run differs from the first has no results to speak of (NUM-07).
        """
        lowered = self._lowered(setup)
        try:
            first, second = (self._ran(lowered, setup, byte) for byte in (0x55, 0xAA))
        except StageError as error:
            raise _raised("running it", error) from error
        found = _steps(first, setup.output)
        if not torch.equal(found, _steps(second, setup.output)):
            raise Unmeasured("two runs on the same input gave different results")
        return found

    def _ran(self, lowered: Callable[..., Any], setup: Setup, byte: int) -> Any:
        """Run a model where memory is full of a byte, so that elements that a kernel never writes change."""
        with filled(byte):
            return run_lowered(lowered, "a probe", tuple(values for _, values in setup.inputs))

    def execution(self, setup: Setup) -> str:
        """Say what a backend runs for a model, as far as it tells. Raises Unmeasured."""
        lowered = self._lowered(setup)
        try:
            execution = self.bench.backend.execution(lowered)
        except Exception as error:  # the backend's code: what it raises is what there is to report
            raise _raised("execution", error) from error
        if execution is None:
            return "not told by the backend"
        if execution.float_fallbacks:
            return f"in float: {'; '.join(execution.float_fallbacks)}"
        return "quantized" if execution.quantized_ops else "the backend shows no quantized op that ran"

    def _lowered(self, setup: Setup) -> Callable[..., Any]:
        """Take a model through prepare, convert and the backend's lower. Raises Unmeasured."""
        mapping = QConfigMapping().set_global(qconfig_of(self.dtypes, self.scheme))
        prepared = prepare_fx(setup.model.eval(), mapping, None, backend_config=self.bench.config)
        _check_quantized(prepared)
        _set_grids(prepared, [grid for grid, _ in setup.inputs], setup.output)
        reference = self.bench.convert(prepared)
        try:
            return self.bench.lower(reference, tuple(values for _, values in setup.inputs))
        except Exception as error:  # the backend's code: what it raises is what there is to report
            raise _raised("lower", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op to fingerprint. ``patterns``: any of these in a config claims it, the first that is found is probed.

    ``example``: a setup to ask what the backend runs for it. ``rounding`` is measured first; the other properties are
    given the rule that it found. All may raise Unmeasured.
    """

    patterns: tuple[Any, ...]
    example: Callable[[Site], Setup]
    rounding: Callable[[Site], Rounding]
    properties: tuple[tuple[str, Callable[[Site, Rule], str]], ...]
    has_weight: bool = False


def activation_range(dtypes: DTypeConfig) -> tuple[int, int]:
    """Return the widest range of integers that a dtype config allows for its activations."""
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    ranges = [_range(constraints) for constraints in ends]
    return max(low for low, _ in ranges), min(high for _, high in ranges)


def _range(constraints: DTypeWithConstraints) -> tuple[int, int]:
    assert constraints.dtype is not None
    low, high = dtype_range(constraints.dtype)
    least, most = constraints.quant_min_lower_bound, constraints.quant_max_upper_bound
    return low if least is None else max(low, int(least)), high if most is None else min(high, int(most))


_SCHEMES: dict[str, tuple[Any, torch.qscheme]] = {
    "per_tensor_symmetric": (MinMaxObserver, torch.per_tensor_symmetric),
    "per_channel_symmetric": (PerChannelMinMaxObserver, torch.per_channel_symmetric),
    "per_tensor_affine": (MinMaxObserver, torch.per_tensor_affine),
    "per_channel_affine": (PerChannelMinMaxObserver, torch.per_channel_affine),
}


def qconfig_of(dtypes: DTypeConfig, scheme: str) -> QConfig:
    """Return a QConfig that a dtype config takes; weights are in -127..127 of qint8."""
    wanted, output = dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints
    low, high = activation_range(dtypes)
    of_activation: dict[str, Any] = {"dtype": wanted.dtype, "quant_min": low, "quant_max": high}
    if output.scale_exact_match is not None:
        fixed = FixedQParamsObserver.with_args(
            scale=output.scale_exact_match, zero_point=output.zero_point_exact_match, **of_activation
        )
        return QConfig(activation=fixed, weight=MinMaxObserver)
    activation = MinMaxObserver.with_args(eps=_eps(wanted, output), **of_activation)
    observer, qscheme = _SCHEMES.get(scheme, _SCHEMES["per_tensor_symmetric"])
    eps = _eps(dtypes.weight_dtype_with_constraints)
    of_weight = {"dtype": torch.qint8, "quant_min": -WEIGHT_END, "quant_max": WEIGHT_END, "eps": eps}
    return QConfig(activation=activation, weight=observer.with_args(qscheme=qscheme, **of_weight))


def _eps(*constraints: DTypeWithConstraints) -> float:
    bounds = [float(each.scale_min_lower_bound) for each in constraints if each.scale_min_lower_bound is not None]
    return max([*bounds, torch.finfo(torch.float32).eps])


def _check_quantized(prepared: GraphModule) -> None:
    for decision in explain(prepared).plan.decisions:
        if not decision.is_quantized:
            reasons = decision.reason or "; ".join(map(str, decision.refusals))
            raise Unmeasured(f"prepare leaves {decision.pattern} in float: {reasons}")


def _set_grids(prepared: GraphModule, grids: Sequence[Grid], output: Grid) -> None:
    """Swap the observers of the inputs and of the output for ones that give these grids."""
    placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    result = next(iter(prepared.graph.find_nodes(op="output"))).args[0]
    observers = [next(iter(node.users)) for node in placeholders]
    for observer, grid in [*zip(observers, grids, strict=True), (result, output)]:
        assert isinstance(observer, Node) and "activation_post_process" in str(observer.target)
        fixed = FixedQParamsObserver(
            grid.scale, grid.zero_point, dtype=getattr(torch, grid.dtype), quant_min=grid.low, quant_max=grid.high
        )
        prepared.add_module(str(observer.target), fixed)


def _raised(where: str, error: Exception) -> Unmeasured:
    cause = error.__cause__ or error
    text = str(cause).strip().splitlines() or [""]
    return Unmeasured(f"{where} raised {type(cause).__name__}: {text[0][:200]}")


def _steps(result: Any, grid: Grid) -> Tensor:
    """Turn a float output into integers less the zero point. Raises Unmeasured for what is not on the grid."""
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise Unmeasured(f"the output is a {type(result).__name__} that is not a float tensor")
    position = grid.integers(result.detach().clone())
    found = position.round()
    if not bool(torch.isfinite(position).all()):
        raise Unmeasured("the output is not finite")
    if bool(((position - found).abs() > 2.0**-10).any()):
        raise Unmeasured("the output is not on its quantization grid: it was computed in float")
    return found - grid.zero_point
