"""Trials: a reference model run through a backend and compared with the oracle, whole and pattern by pattern.

The oracle carries its bound from op to op: where an upstream rounding may fall either way, the bound downstream is
whole steps wide. So a model is compared end to end first; where that fails, or where the bound hides a step, each
quantized pattern is cut out, fed its reference inputs and compared alone. (NUM-03, LOW-04)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from conformance.claims.inputs import Batch
from conformance.oracle.dynamic import asked_dynamic_range
from conformance.oracle.evaluate import Walk
from conformance.oracle.grids import NoOracleError, placeholder_grids
from conformance.pipeline.workbench import Workbench
from conformance.stages.backend_calls import StageError, backend_error, run_lowered
from conformance.stages.check import Check
from conformance.stages.numerics import Finding, compare_all, judge
from conformance.stages.reruns import REPETITION, compare_outputs
from conformance.whole_models.subgraphs import Part, parts
from refimpl import explain
from reports.results import Verdict
from reports.schema import GREEN

BLIND_LSB = 1.0
"""Beyond the rounding itself, a bound this wide admits integers that are not next to the exact result."""


def verified(bench: Workbench, reference: GraphModule, batches: Sequence[Batch]) -> Check:
    """Compare a model with the oracle, end to end and, where that does not tell, pattern by pattern.

    The message names the first pattern, in the order of the graph, of those that are worst alone; the evidence has all.
    """
    if not any(decision.is_quantized for decision in explain(reference).plan.decisions):
        return _check(Verdict.UNEXERCISED, "NUM-03", "the config quantizes nothing of this model")
    whole = tried(bench, reference, batches)
    is_blind = whole.slack_lsb is None or whole.slack_lsb >= BLIND_LSB
    if whole.verdict is Verdict.VERIFIED and not is_blind:
        return whole
    alone = [(part, tried(bench, part.model, part.batches, moves_only=part.moves_only))
             for part in parts(reference, batches)]  # fmt: skip
    return _concluded(whole, alone)


def tried(bench: Workbench, model: GraphModule, batches: Sequence[Batch], *, moves_only: bool = False) -> Check:
    """Lower a reference model, run it on batches, and judge the outputs by the oracle and by what was executed."""
    try:
        lowered = bench.lower(model, batches[0])
        floating = _in_float(bench, lowered, model)
        check = judge(list(_findings(bench, model, lowered, batches)), moves_only=moves_only)
    except StageError as error:
        return failed(error)
    except NoOracleError as error:
        return _check(Verdict.UNEXERCISED, "NUM-03", f"no oracle: {error}")
    if not floating or check.verdict is Verdict.REFUTED:
        return check
    text, evidence = f"runs in float: {'; '.join(floating)}", {**check.evidence, "float_ops": floating}
    return replace(check, rule="LOW-04", outcome="fail", verdict=Verdict.FALLBACK, message=text, evidence=evidence)


def _findings(
    bench: Workbench, model: GraphModule, lowered: Callable[..., Any], batches: Sequence[Batch]
) -> Iterator[Finding]:
    """Compare every output for every batch, and the first batch's with those of a second run. (NUM-07)"""
    walk = Walk(model, bench.capabilities, dynamic_range=asked_dynamic_range(model))
    grids = tuple(placeholder_grids(model))
    outputs = [run_lowered(lowered, f"batch {number}", batch) for number, batch in enumerate(batches)]
    for number, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
        yield from compare_all(f"batch {number}", walk.exact(batch), output, grids)
    again = run_lowered(lowered, "batch 0", batches[0])
    yield compare_outputs("batch 0", REPETITION, outputs[0], again)


def _in_float(bench: Workbench, lowered: Callable[..., Any], model: GraphModule) -> list[str]:
    """What the backend says to run in float though the decision log has it quantized. (LOW-04)

    A float fallback counts if its text begins with the name of a quantized node, or if nothing in the model is float.
    """
    try:
        execution = bench.backend.execution(lowered)
    except Exception as error:
        raise backend_error("execution", error) from error
    if execution is None:
        return []
    present, plan = {node.name for node in model.graph.nodes}, explain(model).plan
    quantized = {name for decision in plan.decisions if decision.is_quantized for name in decision.nodes}
    floating = {name for name, *_ in plan.unmatched} | {each.node for each in plan.decisions if not each.is_quantized}
    is_whole = not floating & present
    found = [text for text in execution.float_fallbacks if is_whole or text.partition(" ")[0] in quantized]
    return found if found or execution.quantized_ops else ["all of it: the backend shows no quantized op that ran"]


def _concluded(whole: Check, alone: Sequence[tuple[Part, Check]]) -> Check:
    """Say of a model that is off, or of which the bound does not tell, what its patterns are alone."""
    wrong = [(part, check) for part, check in alone if check.verdict is not Verdict.VERIFIED]
    evidence: dict[str, object] = {**whole.evidence, "patterns": len(alone), "bound_lsb": whole.slack_lsb}
    if not wrong:
        held = f"alone, on their reference inputs, all {len(alone)} patterns hold"
        told = {Verdict.VERIFIED: "", Verdict.UNEXERCISED: f"{whole.message}; {held}"}
        message = told.get(whole.verdict, f"{whole.message}; {held}: it goes wrong in context")
        return replace(whole, message=message, evidence=evidence)
    rank = min(check.verdict.rank for _, check in wrong)
    part, first = next((part, check) for part, check in wrong if check.verdict.rank == rank)
    verdict = _explained(whole, first)
    seen = _line(whole.message) or f"end to end nothing shows within a bound of {whole.slack_lsb:.3g} LSB"
    is_open = first.verdict is Verdict.UNEXERCISED
    named = f"the first {'that cannot be judged' if is_open else 'to differ'} is {part.node} ({part.pattern})"
    evidence |= {
        **first.evidence,
        "node": part.node,
        "pattern": part.pattern,
        "node_lsb": first.max_lsb,
        "alone": {part.node: f"{check.verdict.value} by {check.rule}: {_line(check.message)}" for part, check in wrong},
    }
    return replace(
        whole,
        rule=first.rule if verdict is first.verdict else whole.rule,
        outcome=_outcome(verdict),
        verdict=verdict,
        message=f"{seen}; alone, on its reference inputs, {named}: {_line(first.message)}",
        evidence=evidence,
    )


def _line(message: str) -> str:
    return message.partition("\n")[0]


def _explained(whole: Check, first: Check) -> Verdict:
    """The worst of both; but numbers that are off end to end are no worse than the pattern alone that explains them."""
    is_numeric = whole.rule == "NUM-03" and whole.max_lsb is not None
    if is_numeric and first.verdict is not Verdict.UNEXERCISED:
        return first.verdict
    return Verdict.worst((whole.verdict, first.verdict))


def _outcome(verdict: Verdict) -> str:
    if verdict is Verdict.UNEXERCISED:
        return "skip"
    return "pass" if verdict in GREEN else "fail"


def failed(error: StageError) -> Check:
    """Return the check of a model that did not come as far as numbers."""
    return _check(error.verdict, error.rule, str(error), error.evidence)


def model_row(model: str, check: Check, seconds: float) -> dict[str, Any]:
    """Return the results-file row of a model."""
    return {
        "kind": "model",
        "model": model,
        "verdict": check.verdict.value,
        "waived": False,
        "message": check.message,
        "max_lsb": check.max_lsb,
        "cases": check.cases,
        "seconds": round(seconds, 6),
        "evidence": {"rule": check.rule, **check.evidence},
    }


def _check(verdict: Verdict, rule: str, message: str, evidence: Mapping[str, Any] | None = None) -> Check:
    return Check(
        stage="numerics",
        rule=rule,
        outcome=_outcome(verdict),
        verdict=verdict,
        message=message,
        evidence=evidence or {},
    )
