"""The numerics stage: checks that every output integer is the exact result, correctly rounded. (NUM-03 to NUM-06)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backends.base import Capabilities, Requantize
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import Batch
from conformance.claims.qconfigs import dynamic_range_of
from conformance.machine.guard import guard
from conformance.oracle.evaluate import Walk
from conformance.oracle.exact import Exact
from conformance.oracle.grids import NoOracleError
from conformance.stages.bench import Bench
from conformance.stages.comparison import Comparison, compare_all, compare_failed_run
from conformance.stages.convert import ReferenceCase
from conformance.stages.execution import ExecutedCase
from conformance.stages.lower import LoweredModel, error_on_retry, lower, run_all
from conformance.stages.resemblance import describe_resemblance
from conformance.stages.stage import MOST_OTHERS, CaseResult, CaseStage, StageError, make_failure, worst_of
from conformance.stages.statistics import summarize
from reports.schema import Check, Where, evidence
from reports.verdicts import PASSING, Verdict

ExactOf = Callable[[Batch], Sequence[Exact]]
"""Computes the exact results for inputs, one for each output."""


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    """The first output that could be compared, and the function for exact results."""

    output: Any
    exact_of: ExactOf


@dataclass(frozen=True, kw_only=True)
class ComparedCase(CaseResult):
    """A case whose outputs have been compared. ``first``: None: no output could be compared."""

    executed: ExecutedCase
    comparisons: tuple[Comparison, ...]
    first: FirstRun | None

    @property
    def is_faulty(self) -> bool:
        """Whether some output is not within its bound, or there is no oracle."""
        return self.fault is not None or any(each.excess > 0 for each in self.comparisons)

    @property
    def reference(self) -> ReferenceCase:
        """Reference model of the case."""
        return self.executed.lowered.reference

    @property
    def case(self) -> Case:
        """Case that was run."""
        return self.reference.case

    @property
    def lowered(self) -> LoweredModel:
        """Lowered model of the case."""
        return self.executed.lowered.model


class NumericsStage(CaseStage[ExecutedCase, ComparedCase]):
    """Runs the lowered model on all inputs, and compares its outputs with the oracle's exact results.

    Judged is the worst comparison of all cases (NUM-03, NUM-05): within its bound; within one step, of a function; in
    float; or wrong.
    Its message has the distance and the bound in LSB; the evidence has the worst elements, the qparams, the attribution
    and a line for each other comparison that is as bad.
    """

    name = "numerics"
    runs_backend = True

    def __init__(self, bench: Bench, claim: Claim) -> None:
        super().__init__(bench, claim)
        self._comparisons: list[Comparison] = []

    def run(self, before: ExecutedCase) -> ComparedCase:
        """Run the lowered model on every input. A fault is in a comparison or in the result: no case ends here."""
        reference = before.lowered.reference
        walk = Walk(reference.model, self._capabilities_for(before), dynamic_range=dynamic_range_of(self.claim))
        comparisons: list[Comparison] = []
        first: FirstRun | None = None
        fault: StageError | None = None
        places = [Where(case=reference.case.name, input=name) for name, _ in reference.inputs]
        outputs = run_all(before.lowered.model, places, [inputs for _, inputs in reference.inputs])
        for where, (_, inputs) in zip(places, reference.inputs, strict=True):
            try:
                exacts = walk.exact(inputs)
                output = next(outputs)
            except NoOracleError as error:
                fault = StageError("NUM-03", Verdict.UNEXERCISED, f"no oracle: {error}")
                break
            except StageError as error:
                if error.verdict is Verdict.UNEXERCISED:
                    fault = error
                    break
                comparisons.append(self._compare_failed_run(before, where, inputs, error))
                break  # a model that raises for one input is not run on the others
            first = first or FirstRun(output=output, exact_of=walk.exact)
            comparisons += compare_all(where, exacts, output, tuple(reference.grids))
        return ComparedCase(executed=before, comparisons=tuple(comparisons), first=first, fault=fault)

    def keep(self, result: ComparedCase) -> None:
        """Keep the comparisons."""
        self._comparisons += result.comparisons

    def _capabilities_for(self, executed: ExecutedCase) -> Capabilities:
        """Return the backend's capabilities; in a float fallback, those of float arithmetic."""
        capabilities = self.bench.capabilities
        if not executed.runs_in_float:
            return capabilities
        return replace(
            capabilities, float_accumulation=True, dynamic_states=False, half_row_qparams=False,
            requantize=Requantize(),
        )  # fmt: skip

    def _compare_failed_run(self, executed: ExecutedCase, where: Where, inputs: Batch, error: StageError) -> Comparison:
        lower_again = partial(lower, self.bench, executed.lowered.reference.model, inputs)
        varies = error_on_retry(lower_again, where, inputs) != str(error)
        shown = {**error.evidence, "nondeterministic": True} if varies else error.evidence
        return compare_failed_run(where, error.rule, str(error), shown)

    @property
    def passes(self) -> bool:
        """Whether all outputs so far let a claim pass."""
        is_moving = self.claim.moves_only
        return not self.errors and all(verdict_of(each, is_moving) in PASSING for each in self._comparisons)

    def has_raised(self, result: ComparedCase | None, fault: StageError | None) -> bool:
        """Tell whether the backend's code raised when it ran the lowered model."""
        return result is not None and any(each.rule == "LOW-01" for each in result.comparisons)

    def find_failing(self, verdict: Verdict) -> set[str]:
        """Return the names of the cases with an output of a verdict, or with a fault that has it."""
        only_moves = self.claim.moves_only
        alike = {each.where.case for each in self._comparisons if verdict_of(each, only_moves) is verdict}
        return alike | super().find_failing(verdict)

    def judge(self) -> Check:
        """Judge all comparisons; a claim without any is judged by its errors."""
        errors, comparisons, claim = self.errors, self._comparisons, self.claim
        if not comparisons:
            return super().judge()
        check = judge_comparisons(claim.id, comparisons, moves_only=claim.moves_only)
        if errors and check.verdict in PASSING:
            check = make_failure(claim.id, self.name, worst_of(errors))
        return replace(check, cases=len(comparisons) + len(errors), failing=check.failing + len(errors))


@guard("numerics.distance")
def judge_comparisons(claim: str, comparisons: Sequence[Comparison], *, moves_only: bool) -> Check:
    """Judge a claim's numbers by all comparisons: the worst decides. (NUM-03, NUM-05)"""
    lead = max(comparisons, key=lambda comparison: (-verdict_of(comparison, moves_only).rank, comparison.excess))
    verdict = verdict_of(lead, moves_only)
    others = _list_others(comparisons, lead, moves_only)
    return Check(
        claim=claim,
        stage="numerics",
        rule=rule_of(lead, moves_only),
        outcome="pass" if verdict in PASSING else "fail",
        verdict=verdict,
        message="; ".join(filter(None, (message_of(lead, verdict), _describe_rounding(comparisons, verdict)))),
        max_lsb=_largest_finite(each.max_lsb for each in comparisons),
        slack_lsb=_largest_finite(each.slack_lsb for each in comparisons),
        allowed=_spell_widest(comparisons),
        cases=len(comparisons),
        failing=sum(verdict_of(each, moves_only) not in PASSING for each in comparisons),
        statistics=summarize(each.sample for each in comparisons if each.sample is not None),
        evidence=evidence({} if verdict is Verdict.VERIFIED else {**lead.evidence, **others}),
    )


def _describe_rounding(comparisons: Sequence[Comparison], verdict: Verdict) -> str:
    """Say what rounding a refuted claim's results look like; "" if some are wrong in another way."""
    wrong = [each.resemblance for each in comparisons if each.excess > 0]
    known = [each for each in wrong if each is not None]
    return describe_resemblance(known) if verdict is Verdict.REFUTED and len(known) == len(wrong) else ""


def _list_others(comparisons: Sequence[Comparison], lead: Comparison, moves_only: bool) -> dict[str, object]:
    """Return as evidence a line for each further comparison that is as bad, up to a readable number."""
    verdict = verdict_of(lead, moves_only)
    alike = [each for each in comparisons if each is not lead and verdict_of(each, moves_only) is verdict]
    shown: dict[str, object] = {"others": [message_of(each, verdict) for each in alike[:MOST_OTHERS]]} if alike else {}
    if any(each.evidence.get("nondeterministic") for each in alike):
        shown["nondeterministic"] = True
    return shown


def verdict_of(comparison: Comparison, moves_only: bool) -> Verdict:
    """Return a claim's verdict by one comparison. An output computed in float is never verified, however right."""
    if comparison.ran_in_float:
        return Verdict.FALLBACK
    if comparison.excess <= 0:
        return Verdict.VERIFIED
    is_approximation = comparison.is_within_one and comparison.is_function and not moves_only
    return Verdict.QUALITY if is_approximation else Verdict.REFUTED  # rule: NUM-03


def rule_of(comparison: Comparison, moves_only: bool) -> str:
    """Return the rule that a comparison holds a claim to: that of its problem, else that of the numbers."""
    return comparison.rule or ("NUM-05" if moves_only else "NUM-03")


def message_of(comparison: Comparison, verdict: Verdict) -> str:
    """Say in a line what is wrong; "" if nothing is."""
    if verdict is Verdict.VERIFIED:
        return ""
    if comparison.problem:
        return f"{comparison.where}: {comparison.problem}"
    text = f"{comparison.where}: distance {comparison.max_lsb:.6g} LSB, allowed {_spell_bound(comparison)}"
    return f"within one step, not correctly rounded: {text}" if verdict is Verdict.QUALITY else text


def _spell_widest(comparisons: Sequence[Comparison]) -> str:
    """Return the widest bound of several comparisons; "" if none has one."""
    finite = [each for each in comparisons if math.isfinite(each.slack_lsb) and not each.problem]
    return _spell_bound(max(finite, key=lambda each: each.slack_lsb)) if finite else ""


def _spell_bound(comparison: Comparison) -> str:
    """Return what a right result may be off by, whole: half a step and the slack, or the slack alone."""
    return f"{comparison.allowed}{comparison.slack_lsb:.3g}"


def _largest_finite(values: Iterable[float]) -> float | None:
    """Return the largest finite value: an output that cannot be measured hides no other's distance."""
    return max((round(value, 6) for value in values if math.isfinite(value)), default=None)
