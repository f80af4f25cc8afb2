"""Probes: tiny models of one op, on grids that the probe chooses, taken through the flow and run by a backend.

A probe swaps the observers of a prepared model for fixed ones, so that scales, zero points and operands are exactly
what it needs to tell one kind of arithmetic from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from conformance.claims.qconfigs import make_qconfig
from conformance.facts.kernel_models import Rounding, Rule
from conformance.machine.memory import memory_filled_with
from conformance.ops.op_model import OneInput, Step, TwoInputs
from conformance.oracle.grids import Grid
from conformance.stages.bench import Bench
from conformance.stages.lower import LoweredModel, lower, run_lowered
from conformance.stages.stage import StageError
from refimpl import (
    DTypeConfig,
    DTypeWithConstraints,
    FixedQParamsObserver,
    QConfig,
    QConfigMapping,
    explain,
    prepare_fx,
)
from refimpl.observers import dtype_range

WEIGHT_SCALE = 2.0**-7
"""The scale of every weight: a weight holds 127 steps somewhere, in each channel."""

WEIGHT_END = 127


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


def one_input(op: Any, *arguments: Any) -> nn.Module:
    """Return a model that calls a function, a method or a module of one tensor."""
    step = Step(op=op(*arguments)) if isinstance(op, type) else Step(op=op, arguments=arguments)
    return OneInput([step])


def two_inputs(op: Callable[..., Any], *, rectified: bool = False) -> nn.Module:
    """Return a model that calls a function of two tensors, and a ReLU after it if asked for."""
    return TwoInputs([Step(op=op), *([Step(op=nn.ReLU())] if rectified else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeModel:
    """A model of one op, its inputs, and the grid of its output."""

    model: nn.Module
    inputs: tuple[Operand, ...]
    output: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where probes run: a backend, the pattern and dtype config of a claim, and a weight scheme.

    ``has_relu``: the config also claims the pattern with a ReLU after it.
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

    def run(self, probe: ProbeModel) -> Tensor:
        """Return a model's results as integers less the output's zero point (float64). Raises Unmeasured.

        A kernel whose second run differs from the first has no results to speak of (NUM-07).
        """
        lowered = self._lowered(probe)
        try:
            first, second = (self._ran(lowered, probe, byte) for byte in (0x55, 0xAA))
        except StageError as error:
            raise _raised("running it", error) from error
        found = _steps(first, probe.output)
        if not torch.equal(found, _steps(second, probe.output)):
            raise Unmeasured("two runs on the same input gave different results")
        return found

    def _ran(self, lowered: LoweredModel, probe: ProbeModel, byte: int) -> Any:
        """Run a model where memory is full of a byte, so that elements that a kernel never writes change."""
        with memory_filled_with(byte):
            return run_lowered(lowered, "a probe", tuple(values for _, values in probe.inputs))

    def execution(self, probe: ProbeModel) -> str:
        """Say what a backend runs for a model, as far as it tells. Raises Unmeasured."""
        lowered = self._lowered(probe)
        try:
            execution = self.bench.backend.execution(lowered)
        except Exception as error:  # the backend's code: what it raises is what there is to report
            raise _raised("execution", error) from error
        if execution is None:
            return "not told by the backend"
        if execution.float_fallbacks:
            return f"in float: {'; '.join(execution.float_fallbacks)}"
        return "quantized" if execution.quantized_ops else "the backend shows no quantized op that ran"

    def _lowered(self, probe: ProbeModel) -> LoweredModel:
        """Take a model through prepare, convert and the backend's lower. Raises Unmeasured."""
        mapping = QConfigMapping().set_global(qconfig_of(self.dtypes, self.scheme))
        prepared = prepare_fx(probe.model.eval(), mapping, None, backend_config=self.bench.config)
        _check_quantized(prepared)
        _set_grids(prepared, [grid for grid, _ in probe.inputs], probe.output)
        reference = self.bench.convert(prepared)
        try:
            return lower(self.bench, reference, tuple(values for _, values in probe.inputs))
        except Exception as error:  # the backend's code: what it raises is what there is to report
            raise _raised("lower", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op to fingerprint. ``patterns``: any of these in a config claims it, the first that is found is probed.

    ``example``: a model to ask what the backend runs for it. ``rounding`` is measured first; the other properties are
    given the rule that it found. All may raise Unmeasured.
    """

    patterns: tuple[Any, ...]
    example: Callable[[Site], ProbeModel]
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


def qconfig_of(dtypes: DTypeConfig, scheme: str) -> QConfig:
    """Return a QConfig that a dtype config takes; weights are in -127..127 of qint8."""
    qconfig: Any = make_qconfig(dtypes, scheme)
    floor = dtypes.weight_dtype_with_constraints.scale_min_lower_bound
    eps = {} if floor is None else {"eps": max(float(floor), torch.finfo(torch.float32).eps)}
    ends = {"quant_min": -WEIGHT_END, "quant_max": WEIGHT_END}
    weight = qconfig.weight.with_args(dtype=torch.qint8, **ends, **eps)
    return QConfig(activation=qconfig.activation, weight=weight)


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
