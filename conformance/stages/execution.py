"""The execution stage: checks that the pattern ran quantized. (LOW-04)"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.machine.guard import guard
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.float_ops import format_float, list_quantized, read_name
from fx_quant_conformance.conformance.stages.state import (
    CaseState,
    ClaimState,
    ExecutionEvidence,
    LoweredModel,
    make_backend_error,
)
from fx_quant_conformance.reports.verdicts import Verdict

_MOST_NAMED, _WIDTH = 3, 60
NOT_SAID = "the backend does not say what ran"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """In how many cases the backend has said what it executes, of how many, and why it has not in the first other."""

    told: int
    of: int
    untold: str = NOT_SAID

    @property
    def are_complete(self) -> bool:
        """Whether the backend has said so in every case."""
        return self.told == self.of

    def __str__(self) -> str:
        if not self.told:
            return self.untold
        if self.are_complete:
            return "the backend says what ran"
        return f"the backend says what ran in {self.told} of {self.of} cases only; else {self.untold}"


def ask_execution(bench: Bench, model: LoweredModel, reference: GraphModule) -> Execution | str:
    """Ask the backend what a lowered model executes. Raises FaultFound when the backend's code raises.

    Of the quantized ops, those count that the reference model has, and that its decision log has quantized. Returns why
    it is not known what runs if the backend says nothing, or names other quantized ops only.
    """
    try:
        execution = model.execution()
    except Exception as error:
        raise make_backend_error("execution", error) from error
    if execution is None:
        return NOT_SAID
    known = list_quantized(reference)
    counting = tuple(text for text in execution.quantized_ops if read_name(text) in known)  # rule: LOW-04
    if execution.quantized_ops and not counting and not execution.float_fallbacks:
        return _format_unknown(execution.quantized_ops, known)
    return replace(execution, quantized_ops=counting)


def _format_unknown(texts: Sequence[str], known: Sequence[str]) -> str:
    """Say that a report names no op of the model, what it names, and what to name."""
    found = ", ".join(repr(text[:_WIDTH]) for text in texts[:_MOST_NAMED]) + ", …" * (len(texts) > _MOST_NAMED)
    wanted = (
        f"begin each text with the name of a node of the reference model, such as {', '.join(map(repr, known[:1]))}"
    )
    return f"the backend's report names no op that the model has quantized: found {found}; {wanted}"


@guard("execution")
def check_execution(run: ClaimState, state: CaseState) -> Iterator[Fault]:
    """Ask the backend what the lowered model executes: a quantized op, and no float fallback. (LOW-04)

    The numbers of a fallback are compared all the same.
    """
    execution = ask_execution(run.bench, state.lowered, state.reference)
    if isinstance(execution, str):
        run.untold.append(execution)
        return
    floats = [format_float(state.reference, str(each)) for each in execution.float_fallbacks]
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
