"""The execution stage: checks that the pattern ran quantized. (LOW-04)"""

from __future__ import annotations

from dataclasses import dataclass

from conformance.machine.guard import Finds, guard
from conformance.stages.bench import Bench
from conformance.stages.float_ops import explain_float
from conformance.stages.lower import LoweredCase, make_backend_error
from conformance.stages.stage import CaseResult, CaseStage, StageError
from reports.verdicts import Verdict


@dataclass(frozen=True, kw_only=True)
class ExecutedCase(CaseResult):
    """A lowered model, and whether it runs in float."""

    lowered: LoweredCase

    @property
    def runs_in_float(self) -> bool:
        """Whether the backend reports that the pattern, or a part of it, runs in float."""
        return self.fault is not None


class ExecutionStage(CaseStage[LoweredCase, ExecutedCase]):
    """Asks the backend what the lowered model executes.

    Judged is whether that includes a quantized op and no float fallback (LOW-04). A fault makes the claim FALLBACK, and
    the numbers are compared all the same; its evidence names the float ops and the kernels.
    """

    name = "execution"

    def run(self, before: LoweredCase) -> ExecutedCase:
        """Ask the backend. Raises StageError when its code raises."""
        return check_execution(self.bench, before)


@guard("execution", Finds.FALLBACK)
def check_execution(bench: Bench, lowered: LoweredCase) -> ExecutedCase:
    """Ask the backend what it executed. Raises StageError when the backend's code raises."""
    try:
        execution = bench.backend.execution(lowered.model)
    except Exception as error:
        raise make_backend_error("execution", error) from error
    if execution is None:
        return ExecutedCase(lowered=lowered)
    floats = [explain_float(lowered.reference.model, str(each)) for each in execution.float_fallbacks]
    if execution.quantized_ops and not floats:
        return ExecutedCase(lowered=lowered)
    text = f"runs in float: {'; '.join(floats)}" if floats else "the backend shows no quantized op that ran"
    names = {"float_ops": floats, "kernels": list(execution.kernels)}
    shown = {key: value for key, value in names.items() if value}
    return ExecutedCase(lowered=lowered, fault=StageError("LOW-04", Verdict.FALLBACK, text, **shown))
