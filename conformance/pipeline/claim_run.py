"""One claim through all stages: its cases one after the other, each as far as it goes, then one check for each stage.

A case in which a stage finds a fault goes no further; when none is left, the later stages are skipped and carry the
verdict of the check that ended the claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.machine.messages import Begin, Trace
from conformance.pipeline.graph_text import graphs_of
from conformance.stages.bench import Bench
from conformance.stages.config import plan_claim
from conformance.stages.convert import ConvertStage, ReferenceCase
from conformance.stages.execution import ExecutionStage
from conformance.stages.fuse import FuseStage
from conformance.stages.invariance import check_invariance
from conformance.stages.lower import LowerStage
from conformance.stages.nonfinite import measure_nonfinite
from conformance.stages.numerics import ComparedCase, NumericsStage
from conformance.stages.prepare import PrepareStage
from conformance.stages.refusal import check_refusal
from conformance.stages.stage import AnyStage, CaseResult, StageError, failed, internal_error, passed, skipped
from refimpl import explain
from reports.schema import Check, Measurement, Scalar, Where
from reports.verdicts import Verdict

ENOUGH = 4
"""When the backend's code raised in so many cases, and in all so far, the others are not tried: it does not run."""

ClaimMessage = Begin | Check | Trace | Measurement


def run_claim(bench: Bench, claim: Claim) -> Iterator[ClaimMessage]:
    """Take a claim through all stages; never raises for a backend's fault.

    Yields a check for each stage, in order, and before each piece of work that runs the backend's code which it is;
    then the decisions and graphs, and what was measured. What fails in the suite itself is a check too (outcome
    "error", UNEXERCISED), and ends the claim.
    """
    run = ClaimRun(bench, claim)
    verdicts = set[Verdict]()
    for message in run.steps():
        if isinstance(message, Check):
            verdicts.add(message.verdict)
        yield message
    graphs = {} if verdicts == {Verdict.VERIFIED} else run.graphs()
    yield Trace(decisions=run.decisions(), graphs=graphs)
    yield from run.measurements


class ClaimRun:
    """The work on one claim, and what it has found so far.

    ``kept``: of the cases that came through, each n-th, one of each rank, and the largest. ``faulty``: what was made of
    the first case with a fault. ``measurements``: what was measured on the way.
    """

    def __init__(self, bench: Bench, claim: Claim) -> None:
        self.bench = bench
        self.claim = claim
        self.cases: tuple[Case, ...] = ()
        self.kept: list[ComparedCase] = []
        self.faulty: tuple[CaseResult, ...] = ()
        self.measurements: list[Measurement] = []
        self._prepare = PrepareStage(bench, claim)
        self._stages: tuple[AnyStage, ...] = (
            FuseStage(bench, claim), self._prepare, ConvertStage(bench, claim),
            LowerStage(bench, claim), ExecutionStage(bench, claim), NumericsStage(bench, claim),
        )  # fmt: skip
        self._ended: Check | None = None
        self._done = 0
        self._through = 0
        self._ranks: set[tuple[int, ...]] = set()

    def steps(self) -> Iterator[Begin | Check]:
        """Take the claim through all stages."""
        yield self._whole("config", self._plan)
        for case in self.cases:
            yield from self._take(case)
            if self._is_over:
                break
        yield from self._conclude()
        yield Begin(stage="refusal")
        yield self._whole("refusal", lambda: check_refusal(self.bench, self.claim, self.kept[0]))
        yield Begin(stage="invariance")
        yield self._whole("invariance", self._invariance)

    def decisions(self) -> list[dict[str, Scalar]]:
        """Return the decision log of the claim's first prepared case."""
        prepared = self._prepare.first
        return [] if prepared is None else [dict[str, Scalar](row) for row in explain(prepared).rows()]

    def graphs(self) -> dict[str, str]:
        """Return the graphs of the first case with a fault (or of the first of all), as far as it came."""
        if self.faulty:
            return graphs_of(self.claim, self.faulty)
        return graphs_of(self.claim, _trail_of(self.kept[0])) if self.kept else {}

    # -- stages that look at the claim as a whole ----------------------------------------------------------------------

    def _whole(self, stage: str, work: Callable[[], Check]) -> Check:
        if self._ended is not None:
            return skipped(stage, self._ended)
        started = time.perf_counter()
        torch.default_generator.manual_seed(self.bench.seed_for(self.claim.id, stage))
        try:
            check = work()
        except StageError as error:
            check = failed(self.claim.id, stage, error)
        except Exception as error:
            check = internal_error(self.claim.id, stage, error)
        if check.outcome == "error" or not self.cases:
            self._ended = check
        return replace(check, seconds=round(time.perf_counter() - started, 6))

    def _plan(self) -> Check:
        self.cases = plan_claim(self.bench, self.claim)
        return passed(self.claim.id, "config", len(self.cases))

    def _invariance(self) -> Check:
        check = check_invariance(self.bench, self.claim, self.kept)
        if self.bench.profile != "quick":
            self.measurements = list(measure_nonfinite(self.claim, self.kept[0]))
        return check

    # -- stages of a case ----------------------------------------------------------------------------------------------

    def _take(self, case: Case) -> Iterator[Begin]:
        """Take one case through the stages, as far as it goes."""
        trail: list[CaseResult] = []
        result: Any = case
        for stage in self._stages:
            yield Begin(stage=stage.name, case=case.name)
            attempt = stage.attempt(case, result)
            trail += [] if attempt.made is None else [attempt.made]
            if attempt.is_faulty and not self.faulty:
                self.faulty = tuple(trail)
            if attempt.result is None:
                break
            result = attempt.result
        else:
            self._keep(result)
        self._done += 1

    def _keep(self, compared: ComparedCase) -> None:
        """Note a case that came through all stages; what is kept has all ranks of inputs, and the largest ones."""
        case = compared.case
        ranks = tuple(len(each.shape) for each in case.inputs)
        is_largest = case.size > max((each.case.size for each in self.kept), default=0)
        if self._through % self.bench.effort.every == 0 or ranks not in self._ranks or is_largest:
            self.kept.append(compared)
            self._ranks.add(ranks)
        self._through += 1

    @property
    def _is_over(self) -> bool:
        """Whether the cases that are left need not be tried."""
        has_broken = any(stage.internal is not None for stage in self._stages)
        return has_broken or ENOUGH <= sum(stage.raised for stage in self._stages) == self._done

    def _conclude(self) -> Iterator[Check]:
        """Yield a check for each stage over all cases; one that leaves no case ends the claim."""
        for stage in self._stages:
            if self._ended is not None:
                yield skipped(stage.name, self._ended)
                continue
            check = stage.conclude(untried=len(self.cases) - self._done)
            if check.outcome == "error" or not stage.passed:
                self._ended = check
            yield check


def rebuild(bench: Bench, claim: Claim, where: Where) -> ReferenceCase:
    """Take a case of a claim (else its first one) to its reference model and inputs again, as they were in the run.

    Raises StageError for what the flow refuses.
    """
    cases = plan_claim(bench, claim)
    case = next((case for case in cases if case.name == where.case), cases[0])
    result: Any = case
    for stage in (FuseStage(bench, claim), PrepareStage(bench, claim), ConvertStage(bench, claim)):
        stage.seed(case)
        result = stage.run(result)
    assert isinstance(result, ReferenceCase)
    return result


def _trail_of(compared: ComparedCase) -> tuple[CaseResult, ...]:
    reference = compared.reference
    return reference.prepared.built, reference, compared.executed.lowered
