"""Running a case again, under a change that may make no difference, and comparing the outputs. (NUM-06, NUM-07)"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from conformance.claims.case import Case
from conformance.claims.inputs import Batch
from conformance.machine.memory import filled
from conformance.oracle.evaluate import Exact
from conformance.oracle.grids import NoOracleError
from conformance.stages.layouts import kept
from conformance.stages.numerics import Finding
from conformance.stages.structure import tensors

Lowered = Callable[..., Any]
Run = Callable[[], list[Tensor]]
ExactOf = Callable[[Batch], Sequence[Exact]]

REPETITION, BATCH, CHANNELS_LAST, STRIDED, THREADS = "repetition", "batch", "channels_last", "strided", "threads"
EMPTY, OPERANDS = "no rows", "operands"
SAID: dict[str, str] = {
    REPETITION: "a second run on the same input gave another output",
    BATCH: "a batch in parts gave another output than the whole",
    CHANNELS_LAST: "inputs in channels_last layout gave another output than contiguous ones",
    STRIDED: "inputs that are not contiguous gave another output than contiguous ones",
    THREADS: "two threads gave another output than one",
    EMPTY: "a batch without rows gave another shape than the float model's",
    OPERANDS: "the inputs were written to, which the float model leaves as they are",
}
REORDERING = frozenset(SAID) - {REPETITION, EMPTY, OPERANDS}
"""What may change the order of sums, or where a value lies in a vector."""

SHOWN = 8
"""How many differences the evidence has."""


def compare_outputs(case: str, change: str, first: Any, second: Any) -> Finding:
    """Compare two outputs that must be equal, bit for bit but for the sign of zero; NaN equals NaN. (NUM-07)"""
    expected, found = tensors(first), tensors(second)
    if len(expected) != len(found):
        return _finding(case, f"{SAID[change]}: {len(found)} tensors for {len(expected)}", {"change": change})
    for number, (left, right) in enumerate(zip(expected, found, strict=True)):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (right, left)]
            return _finding(case, f"{SAID[change]}: {kinds[0]} for {kinds[1]}", {"change": change})
        differs = (left != right) & ~(left.isnan() & right.isnan())
        if bool(differs.any()):
            indexes = differs.nonzero()[:SHOWN].tolist()
            evidence = {
                "change": change, "output": number, "index": indexes, "count": int(differs.sum()),
                "expected": [_number(left[tuple(index)].item()) for index in indexes],
                "found": [_number(right[tuple(index)].item()) for index in indexes],
            }  # fmt: skip
            return _finding(case, f"{SAID[change]}, first at index {indexes[0]}", evidence)
    return _alike(case)


def _alike(case: str) -> Finding:
    return Finding(case=case, max_lsb=0.0, slack_lsb=0.0, excess=-0.5, is_within_one=True, rule="NUM-07")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _finding(case: str, problem: str, evidence: Mapping[str, object], rule: str = "NUM-07") -> Finding:
    return Finding(
        case=case, max_lsb=float("inf"), slack_lsb=0.0, excess=float("inf"), is_within_one=False, rule=rule,
        problem=problem, evidence={"case": case, **evidence},
    )  # fmt: skip


@dataclass(kw_only=True)
class Trial:
    """A case, what the backend made of it, and the inputs on which it is run again and again.

    ``exact_of``: what gives the exact results of inputs; ``steps``: by how many steps quantized outputs may differ that
    are both right by it, float ones by any (0: not at all). ``filling``: the byte that memory is filled with in a run.
    ``first``: what the inputs gave in an earlier run, if there was one.
    """

    case: Case
    name: str
    inputs: Batch
    lowered: Lowered
    steps: float = 0
    exact_of: ExactOf | None = None
    filling: int = 0x5A
    first: Any = None

    @cached_property
    def model(self) -> nn.Module:
        """The float model, with parameters of its own."""
        return self.case.build().eval()

    @cached_property
    def expected(self) -> list[Tensor]:
        """What the inputs gave first."""
        return self.run(self.inputs) if self.first is None else [each.detach().clone() for each in tensors(self.first)]

    @property
    def runs(self) -> bool:
        """Whether the lowered model takes its inputs at all, and gives a tensor."""
        try:
            return bool(self.expected)
        except Exception:  # whatever the backend's code raises
            return False

    def run(self, inputs: Batch) -> list[Tensor]:
        """Run the lowered model on copies of the inputs, in their own layout; the results are copied as well.

        Memory is full of a byte that alternates: an element that nobody writes shows.
        """
        copies = [kept(each) for each in inputs]
        self.filling ^= 0xFF
        with filled(self.filling):
            return [each.detach().clone() for each in tensors(self.lowered(*copies))]

    def floats(self, inputs: Batch) -> list[Tensor] | None:
        """Run the float model, on copies in the inputs' own layout. None: it does not take such inputs."""
        try:
            with torch.no_grad():
                return tensors(self.model(*map(kept, inputs)))
        except Exception:  # whatever it is that the op raises: it is no input for it
            return None

    def compared(
        self, change: str, label: str, run: Run, *, plain: Batch | None = None, given: list[Tensor] | None = None
    ) -> Finding:
        """Compare what a changed run gives with what the backend makes of ``plain`` inputs, else of the trial's own.

        ``given`` is to be compared with in place of that. To raise where the float model does not is to give something
        else. (LOW-01)
        """
        where = f"{self.case.name}, {self.name}, {f'{change}: {label}' if label else change}"
        try:
            expected = given or (self.expected if plain is None else self.run(plain))
            found = run()
        except Exception as error:
            told = f"raised {type(error).__name__}: {error}; the float model takes such inputs"
            text = "".join(traceback.format_exception(error, limit=-6))
            return _finding(where, told, {"change": change, "traceback": text}, rule="LOW-01")
        finding = compare_outputs(where, change, expected, found)
        if finding.problem and change in REORDERING:
            wrong = self._wrong(self.inputs if plain is None else plain, expected, found)
            if wrong == "":
                return _alike(where)
            finding = replace(finding, problem=f"{finding.problem}{f': {wrong}' if wrong else ''}")
        if finding.problem and change != REPETITION and self._varies(found, run):
            return replace(finding, evidence={**finding.evidence, "nondeterministic": True})
        return finding

    def _varies(self, found: list[Tensor], run: Run) -> bool:
        """Tell whether a changed run gives something else when it is done again; later runs go on as if it were not."""
        filling = self.filling
        try:
            again = run()
        except Exception:  # whatever the backend's code raises now
            return True
        self.filling = filling
        return bool(compare_outputs("", REPETITION, found, again).problem)

    def _wrong(self, inputs: Batch, expected: list[Tensor], found: list[Tensor]) -> str | None:
        """Say where outputs that differ are not both right: "" where they are, None where they must be equal. (NUM-06)

        Where there is no oracle, sums in another order (``steps`` without an end) may be right.
        """
        shapes = [[each.shape for each in outputs] for outputs in (expected, found)]
        if not self.exact_of or not self.steps or shapes[0] != shapes[1]:
            return None
        try:
            exacts = list(self.exact_of(inputs))
        except NoOracleError:
            return "" if math.isinf(self.steps) else None
        if [exact.real.shape for exact in exacts] != shapes[0]:
            return None
        return next(filter(None, (_apart(*each, self.steps) for each in zip(exacts, expected, found, strict=True))), "")


def _apart(exact: Exact, left: Tensor, right: Tensor, steps: float) -> str:
    """Say where two outputs differ that are not both roundings of the exact result, or by too many steps."""
    if exact.grid is None:
        places, target, half = [each.double() / exact.step for each in (left, right)], exact.real / exact.step, 0.0
        far = torch.zeros_like(places[0])
    else:
        places, target, half = [exact.grid.integers(each).round() for each in (left, right)], exact.integers, 0.5
        far = (places[0] - places[1]).abs() - steps
    away = torch.maximum(*((place - target).abs() for place in places)) - half - exact.slack
    wrong = (left != right) & ~((away <= 0) & (far <= 0))  # NaN is wrong
    if not bool(wrong.any()):
        return ""
    worst = float(away[wrong].max()) + half
    return f"{int(wrong.sum())} of {wrong.numel()} values are not both right, one {worst:.6g} LSB from the exact result"
