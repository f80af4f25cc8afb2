"""Cases for what invariance tries, and kernels that vary with what they should not: one for each way. (NUM-07)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.base import Capabilities
from conformance.claims.case import Case, Regime
from conformance.claims.inputs import Batch
from conformance.ops.op_model import Input, Role
from conformance.stages.invariance import check_invariance
from conformance.stages.numerics import Finding

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
    regime = Regime(name="any", ranges=((-1.0, 1.0),))
    return Case(name="a case", build=lambda: Op(function), inputs=inputs, regime=regime)


def drawn_for(case: Case) -> list[tuple[str, Batch]]:
    torch.manual_seed(0)
    is_index = [each.role is Role.INDEX for each in case.inputs]
    return [
        (name, tuple(
            torch.randint(0, 9, each.shape) if index else torch.rand(each.shape).mul(64).round() - 32
            for each, index in zip(case.inputs, is_index, strict=True)
        ))
        for name in ("first", "second")
    ]  # fmt: skip


def findings(
    lowered: Function, case: Case, capabilities: Capabilities | None = None, without: Sequence[str] = ()
) -> list[Finding]:
    capabilities = Capabilities() if capabilities is None else capabilities
    return list(check_invariance(case, drawn_for(case), lowered, capabilities, left_out=without))


def tried(found: Sequence[Finding]) -> list[str]:
    """What was changed, comparison by comparison."""
    return [finding.case.removeprefix("a case, first, ") for finding in found]


def differing(lowered: Function, case: Case) -> set[str]:
    return {str(finding.evidence["change"]) for finding in findings(lowered, case) if finding.problem}


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
