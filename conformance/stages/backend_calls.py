"""Running a backend's code: what it raises is its fault, with the evidence."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from torch import Tensor

from conformance.claims.inputs import Batch
from conformance.machine.memory import filled
from reports.results import Verdict


class StageError(Exception):
    """A stage found a fault (or could not go on): the rule, the verdict and the evidence."""

    def __init__(self, rule: str, verdict: Verdict, message: str, **evidence: object) -> None:
        super().__init__(message)
        self.rule = rule
        self.verdict = verdict
        self.evidence = evidence


def run_lowered(lowered: Callable[..., Any], case: str, inputs: Batch) -> Any:
    """Run a lowered model on copies of the inputs; what it returns is copied, for it may be its own buffer.

    Raises StageError when the backend's code raises.
    """
    try:
        output = lowered(*(value.clone() for value in inputs))
    except Exception as error:
        raise backend_error(f"running {case},", error) from error
    return _copied(output)


def told_again(lower: Callable[[], Callable[..., Any]], case: str, inputs: Batch) -> str:
    """Compile and run once more what raised, where memory holds something else; return what it says now.

    A kernel that reads behind its operands may raise with a number that it found there.
    """
    try:
        with filled(0x5A):
            run_lowered(lower(), case, inputs)
    except StageError as error:
        return str(error)
    return ""


def _copied(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach().cpu().clone()
    return type(output)(map(_copied, output)) if type(output) in (tuple, list) else output


def backend_error(where: str, error: Exception) -> StageError:
    """A fault in the backend's code refutes the claim: what the config claims, the backend must do."""
    text = "".join(traceback.format_exception(error, limit=-6))
    return StageError("LOW-01", Verdict.REFUTED, f"{where} raised {type(error).__name__}: {error}", traceback=text)
