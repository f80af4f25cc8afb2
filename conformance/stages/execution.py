"""The execution stage: checks that the pattern ran quantized. (LOW-04)"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from backends.base import Execution
from conformance.claims.claim import Claim
from conformance.machine.guard import guard
from conformance.remote.client import ElsewhereModel
from conformance.stages.bench import Bench
from conformance.stages.float_ops import explain_float
from conformance.stages.lower import LoweredCase, LoweredModel, make_backend_error
from conformance.stages.stage import CaseResult, CaseStage, Problem, StageError, make_failure, make_internal_error
from reports.schema import Check
from reports.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class ExecutedCase(CaseResult):
    """A lowered model, and whether it runs in float. ``is_told``: the backend has said what runs."""

    lowered: LoweredCase
    is_told: bool = True

    @property
    def runs_in_float(self) -> bool:
        """Whether the backend reports that the pattern, or a part of it, runs in float."""
        return self.fault is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """In how many cases the backend has said what it executes, of how many."""

    told: int
    of: int

    @property
    def are_complete(self) -> bool:
        """Whether the backend has said so in every case."""
        return self.told == self.of

    def __str__(self) -> str:
        if self.told and not self.are_complete:
            return f"the backend says what ran in {self.told} of {self.of} cases only"
        return "the backend says what ran" if self.told else "the backend does not say what ran"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionEvidence:
    """What shows that integers computed a claim, and in words how sure that is.

    ``problem``: what the backend reports is not true.
    """

    kind: Literal["reported", "numbers", "none"]
    text: str
    problem: Problem | None = None


class ExecutionStage(CaseStage[LoweredCase, ExecutedCase]):
    """Asks the backend what the lowered model executes.

    Judged is whether that includes a quantized op and no float fallback (LOW-04). A fault makes the claim FALLBACK, and
    the numbers are compared all the same; its evidence names the float ops and the kernels. Without a fault, what shows
    the execution is judged: nothing (UNSHOWN), or a report that the numbers contradict (REFUTED).
    """

    name = "execution"

    def __init__(self, bench: Bench, claim: Claim) -> None:
        super().__init__(bench, claim)
        self._told = 0
        self._evidence: ExecutionEvidence | None = None

    def run(self, before: LoweredCase) -> ExecutedCase:
        """Ask the backend. Raises StageError when its code raises."""
        return check_execution(self.bench, before)

    def keep(self, result: ExecutedCase) -> None:
        """Count the cases of which the backend says what it executes."""
        self._told += result.is_told

    @property
    def reports(self) -> Reports:
        """In how many cases so far the backend has said what it executes."""
        return Reports(told=self._told, of=self.passed)

    @property
    def evidence(self) -> ExecutionEvidence:
        """What shows the execution; before numbers are looked at, only what the backend says."""
        kind: Literal["reported", "none"] = "reported" if self.reports.are_complete else "none"
        return self._evidence or ExecutionEvidence(kind=kind, text=str(self.reports))

    def look_at_numbers(self, gather: Callable[[Reports], ExecutionEvidence]) -> None:
        """Gather the evidence that numbers add to what the backend says."""
        started = time.perf_counter()
        try:
            self._evidence = gather(self.reports)
        except Exception as error:
            self.internal = make_internal_error(self.claim.id, self.name, error)
        self._seconds += time.perf_counter() - started

    def judge(self) -> Check:
        """Judge the stage by all its cases; one that finds no fault there, by the evidence."""
        check, evidence = super().judge(), self.evidence
        if check.outcome != "pass":
            return check
        if evidence.problem is not None:
            error = StageError(evidence.problem.rule, evidence.problem.verdict, evidence.problem.message)
        elif evidence.kind == "none":
            error = StageError("LOW-04", Verdict.UNSHOWN, f"execution not shown: {evidence.text}")
        else:
            return check
        return replace(make_failure(self.claim.id, self.name, error), cases=check.cases)


def ask_execution(bench: Bench, model: LoweredModel) -> Execution | None:
    """Ask the backend what a lowered model executes. Raises StageError when the backend's code raises."""
    try:
        return model.execution() if isinstance(model, ElsewhereModel) else bench.backend.execution(model)
    except Exception as error:
        raise make_backend_error("execution", error) from error


@guard("execution")
def check_execution(bench: Bench, lowered: LoweredCase) -> ExecutedCase:
    """Ask the backend what it executed. Raises StageError when the backend's code raises."""
    execution = ask_execution(bench, lowered.model)
    if execution is None:
        return ExecutedCase(lowered=lowered, is_told=False)
    floats = [explain_float(lowered.reference.model, str(each)) for each in execution.float_fallbacks]
    if execution.quantized_ops and not floats:
        return ExecutedCase(lowered=lowered)
    text = f"runs in float: {'; '.join(floats)}" if floats else "the backend shows no quantized op that ran"
    names = {"float_ops": floats, "kernels": list(execution.kernels)}
    shown = {key: value for key, value in names.items() if value}
    return ExecutedCase(lowered=lowered, fault=StageError("LOW-04", Verdict.FALLBACK, text, **shown))
