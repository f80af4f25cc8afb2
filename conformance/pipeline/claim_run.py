"""One claim through all stages: its cases one after the other, each as far as it goes, then one check for each stage.

A case in which a stage finds a fault goes no further; when none is left, the later stages are skipped and carry the
verdict of the check that ended the claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.machine.messages import Begin, Trace
from conformance.pipeline.graph_text import graphs_of
from conformance.stages.annotate import check_annotations
from conformance.stages.bench import Bench
from conformance.stages.config import plan_claim
from conformance.stages.convert import ConvertStage, ReferenceCase
from conformance.stages.evidence import PROBE, gather_evidence, needs_probe
from conformance.stages.execution import ExecutionEvidence, ExecutionStage
from conformance.stages.fuse import FuseStage
from conformance.stages.invariance import check_invariance
from conformance.stages.lower import LowerStage, check_leftover
from conformance.stages.nonfinite import measure_nonfinite
from conformance.stages.numerics import ComparedCase, NumericsStage
from conformance.stages.prepare import PrepareStage
from conformance.stages.refusal import check_refusal
from conformance.stages.stage import (
    AnyStage,
    CaseResult,
    StageError,
    gives_quantizer,
    make_failure,
    make_internal_error,
    make_pass,
    make_skip,
)
from refimpl import explain
from reports.numbers import Scalar
from reports.schema import Check, Measurement, Where
from reports.verdicts import Verdict

ENOUGH = 4
"""After this many cases, if the backend's code raised in all of them, the others are not tried: it does not run."""

ClaimMessage = Begin | Check | Trace | Measurement


def run_claim(bench: Bench, claim: Claim) -> Iterator[ClaimMessage]:
    """Take a claim through all stages; never raises for a backend's fault.

    Yields a check for each stage, in order; a Begin before each piece of work that runs the backend's code; then the
    decisions and graphs, and the measurements. A failure of the suite itself is a check too (outcome "error",
    UNEXERCISED), and ends the claim.
    """
    run = ClaimRun(bench, claim)
    verdicts = set[Verdict]()
    for message in run.steps():
        if isinstance(message, Check):
            verdicts.add(message.verdict)
        yield message
    graphs = {} if verdicts <= {Verdict.VERIFIED, Verdict.UNSHOWN} else run.graphs()
    trace, evidence = Trace(decisions=run.decisions(), graphs=graphs), run.evidence()
    yield trace if evidence is None else replace(trace, execution=evidence.kind, sureness=evidence.text)
    yield from run.measurements


@dataclass(kw_only=True)
class Reruns:
    """Chooses the cases that are run again: each n-th, those of new ranks, and each that is the largest so far."""

    every: int
    asked: int = 0
    ranks: set[tuple[int, ...]] = field(default_factory=set)
    largest: int = 0

    def chooses(self, case: Case) -> bool:
        """Tell whether the next case is run again, and take note of it."""
        ranks = tuple(len(each.shape) for each in case.inputs)
        is_chosen = self.asked % self.every == 0 or ranks not in self.ranks or case.size > self.largest
        if is_chosen:
            self.ranks.add(ranks)
            self.largest = max(self.largest, case.size)
        self.asked += 1
        return is_chosen


class ClaimRun:
    """The work on one claim, and its results so far.

    ``rerun_cases``: of the cases that passed all stages, those that are run again. ``faulty``: the stages' results for
    the first case with a fault. ``measurements``: measurements so far.
    """

    def __init__(self, bench: Bench, claim: Claim) -> None:
        claim = replace(claim, preparation=bench.preparation)
        self.bench = bench
        self.claim = claim
        self.cases: tuple[Case, ...] = ()
        self.rerun_cases: list[ComparedCase] = []
        self.faulty: tuple[CaseResult, ...] = ()
        self.measurements: list[Measurement] = []
        self._prepare = PrepareStage(bench, claim)
        self._execution = ExecutionStage(bench, claim)
        self._numerics = NumericsStage(bench, claim)
        self._lower = LowerStage(bench, claim)
        self._stages: tuple[AnyStage, ...] = (
            FuseStage(bench, claim), self._prepare, ConvertStage(bench, claim), self._lower, self._execution,
            self._numerics,
        )  # fmt: skip
        self._ended: Check | None = None
        self._done = 0
        self._reruns = Reruns(every=bench.effort.every)

    def steps(self) -> Iterator[Begin | Check]:
        """Take the claim through all stages."""
        yield self._judge_whole("config", self._plan)
        if gives_quantizer(self.bench.backend):
            yield Begin(stage="annotate")
            yield self._judge_whole("annotate", self._check_annotations)
        for case in self.cases:
            yield from self._take(case)
            if self._is_over:
                break
        yield from self._look_at_numbers()
        yield from self._conclude()
        yield Begin(stage="refusal")
        yield self._judge_whole("refusal", lambda: check_refusal(self.bench, self.claim, self.rerun_cases[0]))
        yield Begin(stage="invariance")
        yield self._judge_whole("invariance", self._check_invariance)

    def decisions(self) -> list[dict[str, Scalar]]:
        """Return the decision log of the claim's first prepared case."""
        prepared = self._prepare.first
        return [] if prepared is None else [dict[str, Scalar](row) for row in explain(prepared).rows()]

    def evidence(self) -> ExecutionEvidence | None:
        """Return what shows the execution; None if no case came so far."""
        return self._execution.evidence if self._execution.passed else None

    def graphs(self) -> dict[str, str]:
        """Return the graphs of the first case with a fault (or of the first of all), as far as it came."""
        if self.faulty:
            return graphs_of(self.claim, self.faulty)
        return graphs_of(self.claim, _trail_of(self.rerun_cases[0])) if self.rerun_cases else {}

    # -- stages that look at the claim as a whole ----------------------------------------------------------------------

    def _judge_whole(self, stage: str, work: Callable[[], Check]) -> Check:
        if self._ended is not None:
            return make_skip(stage, self._ended)
        started = time.perf_counter()
        torch.default_generator.manual_seed(self.bench.seed_for(self.claim.id, stage))
        try:
            check = work()
        except StageError as error:
            check = make_failure(self.claim.id, stage, error)
        except Exception as error:
            check = make_internal_error(self.claim.id, stage, error)
        if check.outcome == "error" or not self.cases:
            self._ended = check
        return replace(check, seconds=round(time.perf_counter() - started, 6))

    def _plan(self) -> Check:
        self.cases = plan_claim(self.bench, self.claim)
        return make_pass(self.claim.id, "config", len(self.cases))

    def _check_annotations(self) -> Check:
        return check_annotations(self.bench, self.claim, self.cases, self._lower.annotated)

    def _check_invariance(self) -> Check:
        has_twin = not self._has_fault and not self.bench.runs_elsewhere
        check = check_invariance(self.bench, self.claim, self.rerun_cases, self._run_twin if has_twin else None)
        if check.outcome == "pass":
            check_leftover(self.bench)
        if self.bench.profile != "quick":
            self.measurements = list(measure_nonfinite(self.claim, self.rerun_cases[0]))
        return check

    def _run_twin(self) -> ComparedCase:
        """Take the twin of the first case through all stages, which do not count it. Raises StageError for a fault."""
        case = self.rerun_cases[0].case.twin
        result: Any = case
        for stage in self._stages:
            stage.seed(case)
            result = stage.run(result)
        assert isinstance(result, ComparedCase)
        return result

    # -- stages of a case ----------------------------------------------------------------------------------------------

    def _take(self, case: Case) -> Iterator[Begin]:
        """Take a case through the stages, as far as it goes, and note their results."""
        result: Any = case
        trail = list[CaseResult]()
        for stage in self._stages:
            yield Begin(stage=stage.name, case=case.name)
            attempt = stage.attempt(case, result)
            trail += [] if attempt.partial_result is None else [attempt.partial_result]
            if attempt.is_faulty and not self.faulty:
                self.faulty = tuple(trail)
            result = attempt.result
            if result is None:
                break
        else:
            if self._reruns.chooses(case):
                self.rerun_cases.append(result)
        self._done += 1

    @property
    def _is_over(self) -> bool:
        """Whether the remaining cases need not be tried."""
        has_broken = any(stage.internal is not None for stage in self._stages)
        return has_broken or ENOUGH <= sum(stage.raised for stage in self._stages) == self._done

    @property
    def _has_fault(self) -> bool:
        """Whether some stage has found a fault in some case."""
        return any(stage.errors or stage.internal for stage in self._stages) or not self._numerics.passes

    def _look_at_numbers(self) -> Iterator[Begin]:
        """Gather what numbers show of the execution, in a claim without a fault so far."""
        if self._has_fault or not self._execution.passed:
            return
        if needs_probe(self.bench, self.claim, self._execution.reports):
            yield Begin(stage=self._execution.name, case=PROBE.case)
            torch.default_generator.manual_seed(self.bench.seed_for(self.claim.id, PROBE.case))
        self._execution.look_at_numbers(partial(gather_evidence, self.bench, self.claim))

    def _conclude(self) -> Iterator[Check]:
        """Yield a check for each stage over all cases; one that leaves no case ends the claim."""
        for stage in self._stages:
            if self._ended is not None:
                yield make_skip(stage.name, self._ended)
                continue
            check = stage.conclude(untried=len(self.cases) - self._done)
            if check.outcome == "error" or not stage.passed:
                self._ended = check
            yield check


def find_case(bench: Bench, claim: Claim, where: Where) -> Case:
    """Find a case of a claim (else its first one). Raises StageError if the suite cannot build the claim's cases."""
    cases = plan_claim(bench, claim)
    return next((case for case in cases if case.name == where.case), cases[0])


def rebuild(bench: Bench, claim: Claim, where: Where) -> ReferenceCase:
    """Take a case of a claim (else its first one) to its reference model and inputs again, as they were in the run.

    Raises StageError for what the flow refuses.
    """
    claim = replace(claim, preparation=bench.preparation)
    case = find_case(bench, claim, where)
    result: Any = case
    for stage in (FuseStage(bench, claim), PrepareStage(bench, claim), ConvertStage(bench, claim)):
        stage.seed(case)
        result = stage.run(result)
    assert isinstance(result, ReferenceCase)
    return result


def _trail_of(compared: ComparedCase) -> tuple[CaseResult, ...]:
    reference = compared.reference
    return reference.prepared.built, reference, compared.executed.lowered
