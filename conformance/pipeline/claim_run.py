"""One claim through all stages: its cases one after the other, each as far as it goes, then one check for each stage.

A case in which a stage finds a fault goes no further, but in execution and numerics. When none is left, the later
stages are skipped and carry the verdict of the check that ended the claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.messages import Begin, Trace
from fx_quant_conformance.conformance.pipeline.graph_text import graphs_of
from fx_quant_conformance.conformance.rooms import find_rooms, list_rooms
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import plan_cases_of_claim, plan_claim
from fx_quant_conformance.conformance.stages.convert import convert_to_reference
from fx_quant_conformance.conformance.stages.evidence import PROBE, gather_evidence, needs_probe
from fx_quant_conformance.conformance.stages.execution import NOT_SAID, Reports, check_execution, judge_evidence
from fx_quant_conformance.conformance.stages.fuse import build_and_fuse
from fx_quant_conformance.conformance.stages.invariance import run_again
from fx_quant_conformance.conformance.stages.lower import lower_reference_model
from fx_quant_conformance.conformance.stages.nonfinite import measure_nonfinite
from fx_quant_conformance.conformance.stages.numerics import add_numbers, compare_with_exact
from fx_quant_conformance.conformance.stages.prepare import prepare_and_calibrate
from fx_quant_conformance.conformance.stages.refusal import try_edges
from fx_quant_conformance.conformance.stages.shared import find_shared
from fx_quant_conformance.conformance.stages.state import (
    CaseState,
    ClaimState,
    ExecutionEvidence,
    make_check,
    make_internal_error,
    make_skip,
)
from fx_quant_conformance.conformance.stages.undecided import find_undecided
from fx_quant_conformance.refimpl import explain
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from fx_quant_conformance.reports.numbers import Scalar
from fx_quant_conformance.reports.schema import Check, Measurement, Where, evidence
from fx_quant_conformance.reports.verdicts import PASSING, Verdict

ENOUGH = 4
"""After this many cases, if the backend's code raised in all of them, the others are not tried: it does not run."""

ClaimMessage = Begin | Check | Trace | Measurement
CaseStage = Callable[[ClaimState, CaseState], Iterable[Fault]]
ClaimStage = Callable[[ClaimState], Iterable[Fault]]
CASE_STAGES: dict[str, CaseStage] = {
    "fuse": build_and_fuse,
    "prepare": prepare_and_calibrate,
    "convert": convert_to_reference,
    "lower": lower_reference_model,
    "execution": check_execution,
    "numerics": compare_with_exact,
}
"""The stages that each case goes through, in order."""
GOES_ON = frozenset({"execution", "numerics", "invariance", *(room.stage for room in list_rooms())})
"""The stages that a fault does not end, so that they find several, and a case goes on after them."""
_AFTER_CONVERT = frozenset({"lower", "execution", "numerics"})
RUNS_BACKEND = frozenset({"lower", "numerics"})
"""The stages in which the backend's code may raise, so that a claim may end before all its cases are tried."""


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


@dataclass(kw_only=True)
class StageRecord:
    """How far a stage has come: the cases that came to it, those that passed it, and what it found."""

    tried: list[Case] = field(default_factory=list)
    passed: int = 0
    raised: int = 0
    """In how many cases the backend's code raised where it was to be lowered or run."""
    faults: list[Fault] = field(default_factory=list)
    internal: Check | None = None
    """The check of a failure of the suite itself."""
    seconds: float = 0.0


class ClaimRun:
    """The work on one claim, and its results so far."""

    def __init__(self, bench: Bench, claim: Claim) -> None:
        self.claim = replace(claim, preparation=bench.preparation)
        self.state = ClaimState(bench=bench, claim=self.claim)
        self.measurements: list[Measurement] = []
        self._bench = bench
        self._faulty: CaseState | None = None
        self._facts = dict[str, str]()
        """Of each case with a fault, what a waiver's condition may say of it."""
        self._progress = {name: StageRecord() for name in CASE_STAGES}
        self._evidence: ExecutionEvidence | None = None
        self._ended: Check | None = None
        self._done = 0
        self._reruns = Reruns(every=bench.effort.every)

    def steps(self) -> Iterator[Begin | Check]:
        """Take the claim through all stages."""
        yield self._judge_whole("config", plan_cases_of_claim)
        for room in find_rooms(self._bench.backend):
            yield Begin(stage=room.stage)
            yield self._judge_whole(room.stage, room.check)
        for case in self.state.cases:
            yield from self._take(case)
            if self._is_over:
                break
        several = self._progress.values()
        has_fault = any(each.internal or any(one.verdict not in PASSING for one in each.faults) for each in several)
        yield from self._judge_execution(has_fault)
        for name in CASE_STAGES:
            yield self._conclude(name)
        yield Begin(stage="refusal")
        yield self._judge_whole("refusal", try_edges)
        yield Begin(stage="invariance")
        yield self._judge_whole("invariance", partial(self._run_again, has_fault))

    def decisions(self) -> list[dict[str, Scalar]]:
        """Return the decision log of the claim's first prepared case."""
        prepared = self.state.first_prepared
        return [] if prepared is None else [dict[str, Scalar](row) for row in explain(prepared).rows()]

    def evidence(self) -> ExecutionEvidence | None:
        """Return what shows the execution; None if no case came so far."""
        if not self._progress["execution"].passed:
            return None
        kind: Literal["reported", "none"] = "reported" if self._reports.are_complete else "none"
        return self._evidence or ExecutionEvidence(kind=kind, text=str(self._reports))

    def graphs(self) -> dict[str, str]:
        """Return the graphs of the first case with a fault (or of the first of all), as far as it came."""
        shown = self._faulty or next(iter(self.state.rerun_cases), None)
        return {} if shown is None else graphs_of(self.claim, shown)

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _work(self, name: str, case: str, stage: Callable[[], Iterable[Fault]], progress: StageRecord) -> bool:
        """Do a stage's work, from a seed of its own, and note its faults; tell whether it came to its end."""
        started, found, is_done = time.perf_counter(), list[Fault](), False
        _seed(self._bench, self.claim, name, case)
        try:
            for fault in stage():
                found.append(fault)
                if name not in GOES_ON:
                    break
            else:
                is_done = True
        except FaultFound as ended:
            found.append(ended.fault)
        except Exception as error:
            progress.internal = make_internal_error(self.claim.id, name, error)
        place = Where(case=case)
        progress.faults += (each if each.where.case else replace(each, where=place) for each in found)
        progress.raised += name in RUNS_BACKEND and any(map(_says_that_code_raised, found))
        progress.seconds += time.perf_counter() - started
        return is_done

    def _judge_whole(self, name: str, stage: ClaimStage) -> Check:
        """Return the check of a stage that looks at the claim as a whole."""
        if self._ended is not None:
            return make_skip(name, self._ended)
        progress, state = StageRecord(), self.state
        self._work(name, "", partial(stage, state), progress)
        check = progress.internal or make_check(self.claim.id, name, progress.faults, cases=state.counted.get(name))
        if name in state.left_out:
            check = replace(check, outcome="skip", message=state.left_out[name])
        if check.outcome == "error" or not state.cases:
            self._ended = check
        return replace(check, seconds=round(progress.seconds, 6), failing_cases=self._name_failing(check, progress))

    def _name_failing(self, check: Check, progress: StageRecord) -> dict[str, str]:
        """Return the failing cases of a check, with what a waiver's condition may say of them."""
        if not check.failed:
            return {}
        names = {each.where.case for each in progress.faults if each.verdict not in PASSING}
        known = {case.name: case for case in self.state.cases if case.name in names}
        of_reruns = {each.case.name: each.scales for each in self.state.rerun_cases}
        spelled = {name: case.spell_facts(of_reruns.get(name)) for name, case in known.items()} | self._facts
        return {name if name in spelled else "": spelled.get(name, "{}") for name in sorted(names)}

    def _run_again(self, has_fault: bool, state: ClaimState) -> Iterator[Fault]:
        has_no_twin = has_fault or self._bench.runs_elsewhere or bool(self._bench.capabilities.where)
        yield from run_again(state, None if has_no_twin else self._run_twin)
        if self._bench.profile != "quick":
            is_dynamic = self._bench.capabilities.dynamic_batch
            self.measurements = list(measure_nonfinite(self.claim, state.rerun_cases[0], dynamic_batch=is_dynamic))

    # -- stages of a case ----------------------------------------------------------------------------------------------

    def _take(self, case: Case) -> Iterator[Begin]:
        """Take a case through the stages, as far as it goes."""
        state = CaseState(case=case)
        for name, stage in CASE_STAGES.items():
            yield Begin(stage=name, case=case.name)
            progress = self._progress[name]
            progress.tried.append(case)
            before = len(progress.faults)
            is_done = self._work(name, case.name, partial(stage, self.state, state), progress)
            progress.passed += is_done
            if not is_done or len(progress.faults) > before:
                self._faulty = self._faulty or state
                self._facts[case.name] = case.spell_facts(state.scales if name in _AFTER_CONVERT else None)
            if not is_done or (name == "convert" and self._is_outside(state)):
                break
        else:
            if self._reruns.chooses(case):
                self.state.rerun_cases.append(state)
        self._done += 1

    def _is_outside(self, state: CaseState) -> bool:
        """Tell whether a converted case has scales that the backend declares not to take, and count it."""
        conditions = self._bench.capabilities.conditions_for(leaf_name(self.claim.root))
        is_outside = bool(conditions) and not state.case.may_be(conditions, state.scales)
        self.state.outside += is_outside
        return is_outside

    def _run_twin(self) -> CaseState:
        """Take the twin of the first case through all stages, which do not count it. Raises FaultFound for a fault."""
        aside = ClaimState(bench=self._bench, claim=self.claim, proven=self.state.proven)
        return take_through(aside, self.state.rerun_cases[0].case.twin, CASE_STAGES)

    @property
    def _is_over(self) -> bool:
        """Whether the remaining cases need not be tried."""
        several = self._progress.values()
        has_broken = any(each.internal is not None for each in several)
        return has_broken or ENOUGH <= sum(each.raised for each in several) == self._done

    @property
    def _reports(self) -> Reports:
        """In how many cases so far the backend has said what it executes."""
        untold, passed = self.state.untold, self._progress["execution"].passed
        return Reports(told=passed - len(untold), of=passed, untold=next(iter(untold), NOT_SAID))

    def _judge_execution(self, has_fault: bool) -> Iterator[Begin]:
        """Judge what shows the execution, if nothing speaks against it; without a fault so far, also by numbers."""
        progress = self._progress["execution"]
        if not progress.passed or progress.faults:
            return
        if not has_fault and needs_probe(self._bench, self.claim, self._reports):
            yield Begin(stage="execution", case=PROBE.case)

        def judge() -> Iterator[Fault]:
            if not has_fault:
                _seed(self._bench, self.claim, PROBE.case, "")
                self._evidence = gather_evidence(self._bench, self.claim, self._reports)
            shown = self.evidence()
            assert shown is not None, "a case has come so far"
            yield from judge_evidence(shown)

        self._work("execution", "", judge, progress)

    def _conclude(self, name: str) -> Check:
        """Return the check of a stage over all cases; one that leaves no case ends the claim."""
        if self._ended is not None:
            return make_skip(name, self._ended)
        progress, state, shown = self._progress[name], self.state, dict[str, object]()
        cases = state.counted[name] or len(progress.tried)
        if name == "lower" and state.outside and not progress.tried and not progress.faults:
            text = f"the scales of all {state.outside} cases are outside of the conditions that the backend declares"
            progress.faults.append(Fault(rule="LOW-01", verdict=Verdict.UNEXERCISED, message=text))
        if name == "numerics" and all(each.verdict in PASSING for each in progress.faults):
            progress.faults += find_undecided(state)
        check = progress.internal or make_check(self.claim.id, name, progress.faults, cases=cases)
        if name == "numerics" and progress.internal is None:
            check = add_numbers(check, state.comparisons)
        if check.verdict is not Verdict.VERIFIED and check.outcome in ("pass", "fail"):
            failing = {each.where.case for each in progress.faults if each.verdict is check.verdict}
            if shared := find_shared(progress.tried, failing):
                shown["shared"] = shared
        if name == "convert" and state.outside:
            shown["cases outside of the declared conditions"] = state.outside
        untried = len(state.cases) - self._done
        if untried and name in RUNS_BACKEND and check.outcome == "fail":
            shown["cases not tried"] = untried
        if check.outcome == "error" or not progress.passed:
            self._ended = check
        return replace(
            check,
            seconds=round(progress.seconds, 6),
            evidence=evidence({**check.evidence, **shown}),
            failing_cases=self._name_failing(check, progress) | ({"": "{}"} if "cases not tried" in shown else {}),
        )


def _says_that_code_raised(fault: Fault) -> bool:
    """Tell whether a fault is that the backend's code did not lower or run a case."""
    return fault.rule == "LOW-01" and fault.verdict is Verdict.REFUTED


def _seed(bench: Bench, claim: Claim, stage: str, case: str) -> None:
    """Seed torch's generator for a stage's work, whatever ran before."""
    torch.default_generator.manual_seed(bench.seed_for(*filter(None, (claim.id, stage, case))))


def take_through(run: ClaimState, case: Case, stages: Iterable[str]) -> CaseState:
    """Take a case through some stages. Raises FaultFound for a fault that ends it."""
    state = CaseState(case=case)
    for name in stages:
        _seed(run.bench, run.claim, name, case.name)
        for fault in CASE_STAGES[name](run, state):
            if name not in GOES_ON:
                raise FaultFound(fault)
    return state


def find_case(bench: Bench, claim: Claim, where: Where) -> Case:
    """Find a case of a claim (else its first one). Raises FaultFound if the suite cannot build the claim's cases."""
    cases = plan_claim(bench, claim)
    return next((case for case in cases if case.name == where.case), cases[0])


def rebuild(bench: Bench, claim: Claim, where: Where) -> CaseState:
    """Take a case of a claim (else its first one) to its reference model and inputs again, as they were in the run.

    Raises FaultFound for what the flow refuses.
    """
    claim = replace(claim, preparation=bench.preparation)
    run = ClaimState(bench=bench, claim=claim)
    return take_through(run, find_case(bench, claim, where), ("fuse", "prepare", "convert"))
