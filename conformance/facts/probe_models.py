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

from fx_quant_conformance.conformance.claims.qconfigs import make_qconfig, observer_arguments_of
from fx_quant_conformance.conformance.facts.kernel_models import Rescale, Rounding, Rule
from fx_quant_conformance.conformance.machine.fault import FaultFound
from fx_quant_conformance.conformance.machine.memory import fill_memory
from fx_quant_conformance.conformance.ops.op_model import OneInput, Step, TwoInputs
from fx_quant_conformance.conformance.oracle.grids import Grid
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.execution import ask_execution
from fx_quant_conformance.conformance.stages.lower import lower, run_lowered
from fx_quant_conformance.conformance.stages.state import LoweredModel
from fx_quant_conformance.refimpl import DTypeConfig, FixedQParamsObserver, QConfig, QConfigMapping, explain, prepare_fx
from fx_quant_conformance.refimpl.legacy import qint8
from fx_quant_conformance.refimpl.observers.observers import dtype_range

WEIGHT_SCALE = 2.0**-7
"""The scale of every weight: a weight holds 127 steps somewhere, in each channel."""

WEIGHT_END = 127


class Unmeasured(Exception):
    """A probe cannot tell; the message is the reason, for the report."""


Operand: TypeAlias = tuple[Grid, Tensor]
"""An input of a model: the grid that it is quantized to, and its float32 values."""


def make_operand(grid: Grid, centred: Tensor) -> Operand:
    """Return an input whose values are on their grid. ``centred``: their integers less the zero point."""
    return grid, grid.values(centred + grid.zero_point)


def centred_integers_of(grid: Grid) -> Tensor:
    """Return every integer of a grid, less its zero point (float64)."""
    return torch.arange(grid.low, grid.high + 1).double() - grid.zero_point


def build_one_input(op: Any, *arguments: Any) -> nn.Module:
    """Return a model that calls a function, a method or a module of one tensor."""
    step = Step(op=op(*arguments)) if isinstance(op, type) else Step(op=op, arguments=arguments)
    return OneInput([step])


def build_two_inputs(op: Callable[..., Any], *, rectified: bool = False) -> nn.Module:
    """Return a model that calls a function of two tensors, and optionally a ReLU after it."""
    return TwoInputs([Step(op=op), *([Step(op=nn.ReLU())] if rectified else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeModel:
    """A model of one op, its inputs, and the grid of its output."""

    model: nn.Module
    inputs: tuple[Operand, ...]
    output: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The place where probes run: a backend, the pattern and dtype config of a claim, and a weight scheme."""

    bench: Bench
    pattern: Any
    dtypes: DTypeConfig
    scheme: str
    has_relu: bool
    """Whether the config also claims the pattern with a ReLU after it."""

    def make_grid(self, scale: float, zero_point: int | None = None) -> Grid:
        """Return a grid of an activation over the widest claimed range; its zero point is in the middle, and odd."""
        ends = (self.dtypes.input_dtype_with_constraints, self.dtypes.output_dtype_with_constraints)
        arguments = observer_arguments_of(*ends)
        low, high = dtype_range(arguments["dtype"])
        low, high = arguments.get("quant_min", low), arguments.get("quant_max", high)
        middle = (low + high) // 2 if zero_point is None else zero_point
        dtype = str(arguments["dtype"]).removeprefix("torch.")
        return Grid(scale=scale, zero_point=middle, low=low, high=high, dtype=dtype)

    def make_relu_grid(self, scale: float) -> Grid:
        """Return a grid whose zero point, a quarter into the range, is neither integer 0 nor an end.

        Raises Unmeasured where the config claims no relu.
        """
        if not self.has_relu:
            raise Unmeasured("the config claims no relu behind this op")
        whole = self.make_grid(scale)
        return self.make_grid(scale, whole.low + (whole.high - whole.low) // 4)

    def find_fixed_grid(self) -> Grid | None:
        """Return the output's grid where the dtype config leaves no other. (DTY-05)"""
        output = self.dtypes.output_dtype_with_constraints
        if output.scale_exact_match is None or output.zero_point_exact_match is None:
            return None
        return self.make_grid(float(output.scale_exact_match), int(output.zero_point_exact_match))

    def run(self, probe: ProbeModel) -> Tensor:
        """Return a model's results as integers less the output's zero point (float64). Raises Unmeasured.

        A kernel whose second run differs from the first has no results to speak of (NUM-07). The two runs find memory
        full of different bytes, so that elements that a kernel never writes differ.
        """
        _, lowered = self._lower(probe)
        outputs = list[Any]()
        try:
            for byte in (0x55, 0xAA):
                with fill_memory(byte):
                    outputs.append(run_lowered(lowered, "a probe", tuple(values for _, values in probe.inputs)))
        except FaultFound as error:
            raise _make_failure("running it", error) from error
        first, second = (_read_steps(output, probe.output) for output in outputs)
        if not torch.equal(first, second):
            raise Unmeasured("two runs on the same input gave different results")
        return first

    def format_execution(self, probe: ProbeModel) -> str:
        """Say what a backend runs for a model, as far as it reports it. Raises Unmeasured."""
        reference, lowered = self._lower(probe)
        try:
            execution = ask_execution(self.bench, lowered, reference)
        except FaultFound as error:
            raise _make_failure("execution", error) from error
        if isinstance(execution, str):
            return "not told by the backend"
        if execution.float_fallbacks:
            return f"in float: {'; '.join(execution.float_fallbacks)}"
        return "quantized" if execution.quantized_ops else "the backend shows no quantized op that ran"

    def _lower(self, probe: ProbeModel) -> tuple[GraphModule, LoweredModel]:
        """Return the reference model, and what the backend's lower makes of it. Raises Unmeasured."""
        qconfig: Any = make_qconfig(self.dtypes, self.scheme)
        weight = qconfig.weight.with_args(dtype=qint8, quant_min=-WEIGHT_END, quant_max=WEIGHT_END)
        mapping = QConfigMapping().set_global(QConfig(activation=qconfig.activation, weight=weight))
        prepared = prepare_fx(probe.model.eval(), mapping, None, backend_config=self.bench.config)
        _check_quantized(prepared)
        _set_grids(prepared, [grid for grid, _ in probe.inputs], probe.output)
        reference = self.bench.convert(prepared)
        try:
            return reference, lower(self.bench, reference, tuple(values for _, values in probe.inputs))
        except Exception as error:  # the backend's code may raise anything
            raise _make_failure("lower", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An op to fingerprint. All that is called for it may raise Unmeasured."""

    patterns: tuple[Any, ...]
    """Any of these in a config claims it; the first one in the config is probed."""
    example: Callable[[Site], ProbeModel]
    """A model to ask what the backend runs for it."""
    rounding: Callable[[Site], Rounding]
    """It is measured first; the other properties get its rule."""
    properties: tuple[tuple[str, Callable[[Site, Rule], str | Rescale]], ...]
    has_weight: bool = False
    requantizes: bool = True
    """Whether its rescale is one that a backend declares."""


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


def _make_failure(where: str, error: Exception) -> Unmeasured:
    cause = error.__cause__ or error
    text = str(cause).strip().splitlines() or [""]
    return Unmeasured(f"{where} raised {type(cause).__name__}: {text[0][:200]}")


def _read_steps(output: Any, grid: Grid) -> Tensor:
    """Turn a float output into integers less the zero point. Raises Unmeasured for values that are not on the grid."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise Unmeasured(f"the output is a {type(output).__name__} that is not a float tensor")
    position = grid.integers(output.detach().clone())
    integers = position.round()
    if not bool(torch.isfinite(position).all()):
        raise Unmeasured("the output is not finite")
    if bool(((position - integers).abs() > 2.0**-10).any()):
        raise Unmeasured("the output is not on its quantization grid: it was computed in float")
    return integers - grid.zero_point
