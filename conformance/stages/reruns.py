"""Running a case again, under a change that may make no difference, and comparing the outputs. (NUM-06, NUM-07)"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import NoOracleError
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.frames import NoAnswer
from fx_quant_conformance.conformance.machine.memory import fill_memory
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.remote.client import format_trace
from fx_quant_conformance.conformance.remote.executor import OverwrittenError
from fx_quant_conformance.conformance.stages.layouts import clone_with_strides
from fx_quant_conformance.conformance.stages.meaning import tensors_of
from fx_quant_conformance.conformance.stages.state import FirstRun, LoweredModel, make_backend_error
from fx_quant_conformance.reports.schema import Where

Run = Callable[[], list[Tensor]]
"""Runs a lowered model; returns its output tensors."""

REPETITION, BATCH, CHANNELS_LAST, STRIDED, THREADS = "repetition", "batch", "channels_last", "strided", "threads"
EMPTY, OPERANDS, MODELS = "no rows", "operands", "models"
CHANGES: dict[str, str] = {
    REPETITION: "a second run on the same input gave another output",
    BATCH: "a batch in parts gave another output than the whole",
    CHANNELS_LAST: "inputs in channels_last layout gave another output than contiguous ones",
    STRIDED: "inputs that lie otherwise in memory gave another output than contiguous ones",
    THREADS: "two threads gave another output than one",
    EMPTY: "a batch without rows gave another shape than the float model's",
    OPERANDS: "the inputs were written to, which the float model leaves as they are",
    MODELS: "two models of one structure are not kept apart",
}
"""The changes that may make no difference, with the message for one that does."""
REORDERING = frozenset(CHANGES) - {REPETITION, EMPTY, OPERANDS, MODELS}
"""The changes under which sums may have another order, or a value another place in a vector."""

MOST_SHOWN = 8
"""Differences that the evidence has at most."""


def compare_outputs(where: Where, change: str, first: Any, second: Any) -> Fault | None:
    """Compare two outputs that must be equal, bit for bit but for the sign of zero; NaN equals NaN. (NUM-07)"""
    expected, actual = tensors_of(first), tensors_of(second)
    if len(expected) != len(actual):
        return _make_fault(where, change, f": {len(actual)} tensors for {len(expected)}")
    for number, (left, right) in enumerate(zip(expected, actual, strict=True)):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (right, left)]
            return _make_fault(where, change, f": {kinds[0]} for {kinds[1]}")
        differs = (left != right) & ~(left.isnan() & right.isnan())
        if bool(differs.any()):
            indexes = differs.nonzero()[:MOST_SHOWN].tolist()
            return _make_fault(
                where,
                change,
                f", first at index {indexes[0]}",
                output=number,
                index=indexes,
                count=int(differs.sum()),
                expected=[_to_number(left[tuple(index)].item()) for index in indexes],
                found=[_to_number(right[tuple(index)].item()) for index in indexes],
            )
    return None


def _make_fault(where: Where, change: str, how: str, **evidence: object) -> Fault:
    """Return the fault of an output that differs. What varies from run to run leads: it may cause the others."""
    varies = {"nondeterministic": True} if change == REPETITION else {}
    return Fault(
        rule="NUM-07",
        message=f"{where}: {CHANGES[change]}{how}",
        where=where,
        size=float(change == REPETITION),
        evidence={"change": change, **evidence, **varies},
    )


def _to_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


@dataclass(kw_only=True)
class RepeatRun:
    """A lowered model that is run repeatedly on the values of one input."""

    case: Case
    name: str
    """The input's name."""
    inputs: Batch
    lowered: LoweredModel
    steps: float = 0
    """By how many steps quantized outputs may differ that are both right by the exact results, float ones by any; 0:
    not at all."""
    first: FirstRun | None = None
    """Its first run, if there was one; it also gives exact results."""
    filling: int = 0x5A
    """The byte that memory is filled with in a run."""
    compared: list[Where] = field(default_factory=list)
    """The runs that were compared."""
    _ahead: deque[tuple[Batch, list[Tensor] | Exception]] = field(default_factory=deque)

    @cached_property
    def model(self) -> nn.Module:
        """The float model, with its own parameters."""
        return self.case.build().eval()

    @cached_property
    def expected(self) -> list[Tensor]:
        """The outputs of the first run."""
        if self.first is None:
            return self.run(self.inputs)
        return [each.detach().clone() for each in tensors_of(self.first.output)]

    @property
    def runs(self) -> bool:
        """Whether the lowered model takes its inputs at all, and gives a tensor."""
        try:
            return bool(self.expected)
        except Exception:  # whatever the backend's code raises
            return False

    def where(self, change: str, detail: str = "") -> Where:
        """Return the place of a run under a change."""
        return Where(case=self.case.name, input=self.name, change=change, detail=detail)

    def run(self, inputs: Batch) -> list[Tensor]:
        """Run the lowered model on copies of the inputs, in their own layout; the results are copied as well.

        Memory is full of a byte that alternates: an element that nobody writes shows.
        """
        if self._ahead:
            known, result = self._ahead.popleft()
            if known is inputs:
                if isinstance(result, Exception):
                    raise result
                return result
            self._ahead.clear()
        copies = [clone_with_strides(each) for each in inputs]
        self.filling ^= 0xFF
        with fill_memory(self.filling):
            return [each.detach().clone() for each in tensors_of(self.lowered(*copies))]

    def foresee(self, runs: Sequence[Batch]) -> None:
        """Say which runs come next: the model makes them together. `run` gives their results."""
        self._ahead.clear()
        fillings = []
        for _ in runs:
            self.filling ^= 0xFF
            fillings.append(self.filling)
        try:
            for inputs, output in zip(runs, self.lowered.run_all(runs, fillings), strict=True):
                self._ahead.append((inputs, tensors_of(output)))
        except Exception as error:  # what the backend's code raises, it raises in that run
            self._ahead.append((runs[len(self._ahead)], error))

    def run_float(self, inputs: Batch) -> list[Tensor] | None:
        """Run the float model, on copies in the inputs' own layout. None: it does not take such inputs."""
        try:
            with torch.no_grad():
                return tensors_of(self.model(*map(clone_with_strides, inputs)))
        except Exception:  # whatever it is that the op raises: it is no input for it
            return None

    def compare(
        self, where: Where, run: Run, *, plain: Batch | None = None, expected: list[Tensor] | None = None
    ) -> Iterator[Fault]:
        """Compare the outputs of a changed run with those for ``plain`` inputs, else for the run's own.

        ``expected`` replaces these outputs. Raising where the float model does not is a fault. (LOW-01)
        """
        self.compared.append(where)
        change = where.change
        try:
            expected = expected or (self.expected if plain is None else self.run(plain))
            actual = run()
        except NoAnswer as error:
            raise make_backend_error(change, error) from error
        except OverwrittenError as error:
            yield Fault(rule="NUM-07", message=f"{where}: {error}", where=where, evidence={"change": change})
            return
        except Exception as error:
            text = f"{where}: raised {type(error).__name__}: {error}; the float model takes such inputs"
            yield Fault(
                rule="LOW-01", message=text, where=where, evidence={"change": change, "traceback": format_trace(error)}
            )
            return
        fault = compare_outputs(where, change, expected, actual)
        if fault is not None and change in REORDERING:
            faults = self._format_faults(self.inputs if plain is None else plain, expected, actual)
            if faults == "":
                return
            fault = replace(fault, message=f"{fault.message}{f': {faults}' if faults else ''}")
        if fault is not None and change != REPETITION and self._varies(actual, run):
            fault = replace(fault, evidence={**fault.evidence, "nondeterministic": True})
        if fault is not None:
            yield fault

    def _varies(self, actual: list[Tensor], run: Run) -> bool:
        """Tell whether a changed run gives something else when repeated; later runs are not affected by it."""
        filling = self.filling
        try:
            repeated = run()
        except Exception:  # whatever the backend's code raises now
            return True
        self.filling = filling
        return compare_outputs(Where(), REPETITION, actual, repeated) is not None

    def _format_faults(self, inputs: Batch, expected: list[Tensor], actual: list[Tensor]) -> str | None:
        """Say where outputs that differ are not both right: "" where they are, None where they must be equal. (NUM-06)

        Where there is no oracle, sums in another order (``steps`` without an end) may be right.
        """
        shapes = [[each.shape for each in outputs] for outputs in (expected, actual)]
        if self.first is None or not self.steps or shapes[0] != shapes[1]:
            return None
        try:
            exacts = list(self.first.exact_of(inputs))
        except NoOracleError:
            return "" if math.isinf(self.steps) else None
        if [exact.real.shape for exact in exacts] != shapes[0]:
            return None
        faults = (_format_fault(*outputs, self.steps) for outputs in zip(exacts, expected, actual, strict=True))
        return next(filter(None, faults), "")


def _format_fault(exact: Exact, left: Tensor, right: Tensor, steps: float) -> str:
    """Say where two outputs differ that are not both right results, or by too many steps."""
    if exact.grid is None:
        places, target = [each.double() / exact.step for each in (left, right)], exact.real / exact.step
        away = torch.maximum(*((place - target).abs() for place in places)) - exact.slack
        far = torch.zeros_like(places[0])
    else:
        places, target = [exact.grid.integers(each).round() for each in (left, right)], exact.integers
        away = torch.maximum(*(exact.target.measure_excess(place, exact.slack) for place in places))
        far = (places[0] - places[1]).abs() - steps
    wrong = (left != right) & ~((away <= 0) & (far <= 0))  # NaN is wrong
    if not bool(wrong.any()):
        return ""
    worst = float(torch.maximum(*((place - target).abs() for place in places))[wrong].max())
    return f"{int(wrong.sum())} of {wrong.numel()} values are not both right, one {worst:.6g} LSB from the exact result"
