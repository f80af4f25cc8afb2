"""Cases for what invariance tries, and kernels that vary with what they should not: one for each way. (NUM-07)"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.inputs import Batch, NamedInputs
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.ops.op_model import Input, Role
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.stages.invariance import allowed_steps_of, compare_changes
from fx_quant_conformance.conformance.stages.reruns import RepeatRun
from fx_quant_conformance.conformance.stages.state import CaseState, ExactOf, FirstRun, make_check
from fx_quant_conformance.reports.schema import Check, Where
from tests.conformance.support.held import hold

Function = Callable[..., Any]


class Op(nn.Module):
    """A float model of a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def case_of(function: Function, *shapes: tuple[int, ...], role: Role = Role.ACTIVATION) -> Case:
    inputs = tuple(Input(shape=shape, role=role, high=9) for shape in shapes)
    value_range = ValueRange(name="any", ranges=((-1.0, 1.0),))
    return Case(name="a case", build=lambda: Op(function), inputs=inputs, value_range=value_range)


def inputs_for(case: Case) -> list[NamedInputs]:
    torch.manual_seed(0)
    is_index = [each.role is Role.INDEX for each in case.inputs]
    return [
        NamedInputs(
            name,
            tuple(
                torch.randint(0, 9, each.shape) if index else torch.rand(each.shape).mul(64).round() - 32
                for each, index in zip(case.inputs, is_index, strict=True)
            ),
        )
        for name in ("first", "second")
    ]


def filled_with(value: float, shape: tuple[int, ...]) -> list[NamedInputs]:
    """Inputs of which every element is the same."""
    return [NamedInputs(name, (torch.full(shape, value),)) for name in ("first", "second")]


def compared_of(lowered: Function, case: Case) -> CaseState:
    """A case as the numerics stage leaves it; no comparison was made, and its models are stand-ins."""
    state = CaseState(case=case)
    state.model, state.lowered = case.build(), hold(lowered)
    state.prepared = state.reference = symbolic_trace(nn.Identity())
    state.draw = lambda grids: inputs_for(case)
    return state


def no_oracle(inputs: Batch) -> Sequence[Exact]:
    raise NoOracleError("an op without a rule")


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What came of running a case again: the runs that were compared, and the faults."""

    compared: list[Where]
    faults: list[Fault]

    @property
    def check(self) -> Check:
        return make_check("a claim", "invariance", self.faults, cases=len(self.compared))


def rerun(
    lowered: Function,
    case: Case,
    capabilities: Capabilities | None = None,
    without: Collection[str] = (),
    *,
    named: Sequence[NamedInputs] | None = None,
    first: FirstRun | None = None,
) -> Rerun:
    """Run a case again under every change; `named`: its inputs, `first`: its run in the numerics stage."""
    capabilities = Capabilities() if capabilities is None else capabilities
    (name, inputs), (_, others) = inputs_for(case) if named is None else named
    repeat = RepeatRun(
        case=case, name=name, inputs=inputs, lowered=hold(lowered), first=first, steps=allowed_steps_of(capabilities)
    )
    faults = list(compare_changes(repeat, others, capabilities, left_out=without))
    return Rerun(compared=repeat.compared, faults=faults)


def tried(made: Rerun) -> list[str]:
    """What was changed, run by run."""
    return [str(where).removeprefix("a case, first, ") for where in made.compared]


def changes_of(made: Rerun) -> set[str]:
    """The changes under which outputs differ; the evidence names each as well."""
    assert all(fault.evidence["change"] == fault.where.change for fault in made.faults)
    return {fault.where.change for fault in made.faults}


def differing(lowered: Function, case: Case) -> set[str]:
    return changes_of(rerun(lowered, case))


def counting() -> Function:
    """Every other run is off in its last element."""
    runs = [0]

    def run(x: Tensor) -> Tensor:
        runs[0] += 1
        result = torch.relu(x)
        result.view(-1)[-1] += runs[0] % 2
        return result

    return run


def keeping() -> Function:
    """Adds one if the run before was given something else than the first."""
    kept: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        kept.append(x.clone())
        return x + float(len(kept) > 1 and not torch.equal(kept[-2], kept[0]))

    return run


def by_batch(x: Tensor) -> Tensor:
    return x + float(len(x) % 4 == 3)


def by_neighbours(x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0) * (x.dim() - 1) + (1, 0))[:-1].abs().clamp(0, 1) * (len(x) > 2)


def by_layout(x: Tensor) -> Tensor:
    return x + float(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())


def by_memory(x: Tensor) -> Tensor:
    """Reads the elements in the order of memory, whatever the strides are."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) if not by_format(x) else x


def by_format(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def by_threads(x: Tensor) -> Tensor:
    return x + float(torch.get_num_threads() > 1)


def unwritten(x: Tensor) -> Tensor:
    """Leaves the last element as memory was."""
    result = torch.empty(x.shape, dtype=torch.uint8)
    result.view(-1)[:-1] = x.reshape(-1)[:-1].to(torch.uint8)
    return result.float()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the suite runs: one thread, but where two are tried."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def first_run(lowered: Function, named: Sequence[NamedInputs], exact_of: ExactOf) -> FirstRun:
    """The run of the first inputs, and what gives exact results."""
    return FirstRun(output=lowered(*named[0].tensors), exact_of=exact_of)
