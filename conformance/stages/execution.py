"""The execution stage: checks that the pattern ran quantized. (LOW-04)"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.base import Execution
from conformance.machine.fault import Fault
from conformance.machine.guard import guard
from conformance.remote.client import ElsewhereModel
from conformance.stages.bench import Bench
from conformance.stages.float_ops import explain_float
from conformance.stages.state import CaseState, ClaimState, ExecutionEvidence, LoweredModel, make_backend_error
from reports.verdicts import Verdict


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


def ask_execution(bench: Bench, model: LoweredModel) -> Execution | None:
    """Ask the backend what a lowered model executes. Raises FaultFound when the backend's code raises."""
    try:
        return model.execution() if isinstance(model, ElsewhereModel) else bench.backend.execution(model)
    except Exception as error:
        raise make_backend_error("execution", error) from error


@guard("execution")
def check_execution(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Ask the backend what the lowered model executes: a quantized op, and no float fallback. (LOW-04)

    The numbers of a fallback are compared all the same.
    """
    execution = ask_execution(run.bench, state.lowered)
    if execution is None:
        return
    run.told += 1
    floats = [explain_float(state.reference, str(each)) for each in execution.float_fallbacks]
    if execution.quantized_ops and not floats:
        return
    state.runs_in_float = True
    text = f"runs in float: {'; '.join(floats)}" if floats else "the backend shows no quantized op that ran"
    names = {"float_ops": floats, "kernels": list(execution.kernels)}
    shown = {key: value for key, value in names.items() if value}
    yield Fault(rule="LOW-04", verdict=Verdict.FALLBACK, message=text, evidence=shown)


def judge_evidence(evidence: ExecutionEvidence) -> Iterator[Fault]:
    """Find that nothing shows a claim's execution, or that numbers contradict what the backend reports. (LOW-04)"""
    if evidence.fault is not None:
        yield evidence.fault
    elif evidence.kind == "none":
        text = f"execution not shown: {evidence.text}"
        yield Fault(rule="LOW-04", verdict=Verdict.UNSHOWN, message=text)
