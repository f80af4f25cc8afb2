"""Stages: what the stages of a claim have in common, and how they report faults.

A stage takes the previous stage's result for a case, and returns its own kind of result, or raises StageError for a
fault that ends the case. When all cases are done, it returns one check over all of them.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch.fx import GraphModule

from backends.base import Backend
from backends.discovery import describe_error
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.machine.guard import guard
from conformance.remote.client import RemoteBackend
from conformance.stages.bench import Bench
from conformance.stages.shared import find_shared
from refimpl import ConfigError, RefimplError
from reports.schema import Check, Where, evidence
from reports.verdicts import Verdict

RULES: dict[str, str] = {
    "config": "CFG-09",
    "annotate": "OBS-15",
    "fuse": "FUS-03",
    "prepare": "OBS-01",
    "convert": "CVT-01",
    "lower": "LOW-01",
    "execution": "LOW-04",
    "numerics": "NUM-03",
    "refusal": "DTY-06",
    "invariance": "NUM-07",
}
"""The stages in order, and the rule that each names when it finds no fault."""
STAGES: tuple[str, ...] = tuple(RULES)
OF_A_QUANTIZER = ("annotate",)
"""The stages that only a backend with a torchao Quantizer has."""
MOST_OTHERS = 20
"""Most lines about further failing cases in the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A broken rule, and how it shows. ``node``: the first node that shows it, if one is known."""

    rule: str
    message: str
    verdict: Verdict = Verdict.REFUTED
    node: str = ""


class StageError(Exception):
    """A stage found a fault, or could not go on: the rule, the verdict and the evidence."""

    def __init__(self, rule: str, verdict: Verdict, message: str, **evidence: object) -> None:
        super().__init__(message)
        self.rule = rule
        self.verdict = verdict
        self.evidence = evidence


def gives_quantizer(backend: Backend) -> bool:
    """Tell whether a backend gives a torchao Quantizer, which can be asked here, for some of its claims."""
    if isinstance(backend, RemoteBackend):
        return backend.description.has_quantizer and not backend.runs_elsewhere
    return type(backend).quantizer is not Backend.quantizer


def stages_of(backend: Backend) -> tuple[str, ...]:
    """Return the stages of a backend's claims, in order."""
    has_all = gives_quantizer(backend)
    return STAGES if has_all else tuple(stage for stage in STAGES if stage not in OF_A_QUANTIZER)


def raise_problem(problem: Problem | None, model: GraphModule) -> None:
    """Raise a StageError for a problem of a model."""
    if problem is not None:
        shown = {"node": problem.node} if problem.node else {}
        raise StageError(problem.rule, problem.verdict, problem.message, graph=model.code, **shown)


@guard("flow")
def run_flow(rule: str, step: Callable[[], GraphModule]) -> GraphModule:
    """Run a step of refimpl. Raises StageError: a ConfigError refutes the claim, any other RefimplError leaves it open.

    An error that blames the QConfig or the model says nothing against the config.
    """
    try:
        return step()
    except ConfigError as error:
        raise StageError(rule, Verdict.REFUTED, str(error)) from error
    except RefimplError as error:
        raise StageError(rule, Verdict.UNEXERCISED, str(error)) from error


# -- checks -----------------------------------------------------------------------------------------------------------


def make_pass(claim: str, stage: str, cases: int) -> Check:
    """Return the check of a stage that found no fault."""
    return Check(
        claim=claim, stage=stage, rule=RULES[stage], outcome="pass", verdict=Verdict.VERIFIED, cases=cases
    )  # fmt: skip


def make_failure(claim: str, stage: str, error: StageError) -> Check:
    """Return the check of a stage that found a fault, or could not go on."""
    outcome: Literal["skip", "fail"] = "skip" if error.verdict is Verdict.UNEXERCISED else "fail"
    return Check(
        claim=claim, stage=stage, rule=error.rule, outcome=outcome, verdict=error.verdict, message=str(error),
        evidence=evidence(error.evidence),
    )  # fmt: skip


def make_skip(stage: str, ended: Check) -> Check:
    """Return the check of a stage that is not reached; it has the verdict of the check that ended the claim."""
    message = ended.message if ended.outcome == "skip" else f"not reached: {ended.stage} ended the claim"
    return Check(
        claim=ended.claim, stage=stage, rule=RULES[stage], outcome="skip", verdict=ended.verdict, message=message
    )  # fmt: skip


def make_internal_error(claim: str, stage: str, error: Exception) -> Check:
    """Return the check of a stage in which the suite itself failed."""
    message = f"internal error of the suite: {describe_error(error)}"
    shown = evidence({"traceback": "".join(traceback.format_exception(error))})
    return Check(
        claim=claim, stage=stage, rule="", outcome="error", verdict=Verdict.UNEXERCISED, message=message, evidence=shown
    )  # fmt: skip


# -- stages of a case -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """A stage's result for a case. ``fault``: a fault after which the case goes on all the same."""

    fault: StageError | None = None

    @property
    def is_faulty(self) -> bool:
        """Whether the stage found a fault."""
        return self.fault is not None


Before = TypeVar("Before")
After = TypeVar("After", bound=CaseResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[After]):
    """The outcome of a stage's work on one case.

    ``result``: None: the case goes no further. ``partial_result``: the result, or its part made before the fault.
    """

    result: After | None
    is_faulty: bool
    partial_result: CaseResult | None


class CaseStage(ABC, Generic[Before, After]):
    """One stage of a claim's cases.

    So far the cases ``tried`` have come to it, ``passed`` of them have a result, and the backend's code raised in
    ``raised`` of them. ``proven``: variants that need no further run of the check that is made once for each.
    ``errors``: all faults. ``internal``: the check of a failure of the suite itself.
    """

    name: ClassVar[str]
    """Name of the stage, one of STAGES."""
    runs_backend: ClassVar[bool] = False
    """Whether the backend's code may raise here, so that a claim may end before all its cases are tried."""

    def __init__(self, bench: Bench, claim: Claim) -> None:
        self.bench = bench
        self.claim = claim
        self.tried: list[Case] = []
        self.passed = 0
        self.raised = 0
        self.proven: set[str] = set()
        self.errors: list[StageError] = []
        self.internal: Check | None = None
        self.partial_result: CaseResult | None = None
        self._seconds = 0.0

    @property
    def entered(self) -> int:
        """Number of cases that have come to the stage."""
        return len(self.tried)

    @abstractmethod
    def run(self, before: Before) -> After:
        """Do the work on one case. Raises StageError for a fault that ends the case."""

    def seed(self, case: Case) -> None:
        """Seed torch's generator for the work on a case, whatever ran before."""
        torch.default_generator.manual_seed(self.bench.seed_for(self.claim.id, self.name, case.name))

    def keep(self, result: After) -> None:
        """Keep of a case's result what the check over all cases needs."""
        return

    def attempt(self, case: Case, before: Before) -> Attempt[After]:
        """Do the work on one case, from its own seed, and count the outcome."""
        started = time.perf_counter()
        self.seed(case)
        self.tried.append(case)
        self.partial_result, result, fault = None, None, None
        try:
            result = self.run(before)
            fault = result.fault
            self.keep(result)
        except StageError as error:
            fault = error
        except Exception as error:
            self.internal = make_internal_error(self.claim.id, self.name, error)
        if fault is not None:
            fault.evidence = {"where": Where(case=case.name), **fault.evidence}
            self.errors.append(fault)
        self.passed += result is not None
        self.raised += self.has_raised(result, fault)
        self._seconds += time.perf_counter() - started
        if result is None:
            return Attempt(result=None, is_faulty=True, partial_result=self.partial_result)
        return Attempt(result=result, is_faulty=result.is_faulty, partial_result=result)

    def has_raised(self, result: After | None, fault: StageError | None) -> bool:
        """Tell whether the backend's code raised where the case was to be lowered or run."""
        return False

    def conclude(self, untried: int) -> Check:
        """Return the check over all cases; ``untried``: number of cases left when the claim ended."""
        check = self.internal or self.judge()
        if check.verdict is not Verdict.VERIFIED and check.outcome in ("pass", "fail"):
            shared = find_shared(self.tried, self.find_failing(check.verdict))
            check = replace(check, evidence=evidence({**check.evidence, "shared": shared})) if shared else check
        if untried and self.runs_backend and check.outcome == "fail":
            check = replace(check, evidence=evidence({**check.evidence, "cases not tried": untried}))
        return replace(check, seconds=round(self._seconds, 6))

    def find_failing(self, verdict: Verdict) -> set[str]:
        """Return the names of the cases that have a verdict, that of the stage's check."""
        places = (error.evidence["where"] for error in self.errors if error.verdict is verdict)
        return {place.case for place in places if isinstance(place, Where)}

    def judge(self) -> Check:
        """Judge the stage by all its cases."""
        if not self.errors:
            return make_pass(self.claim.id, self.name, self.entered)
        check = make_failure(self.claim.id, self.name, worst_of(self.errors))
        return replace(check, cases=self.entered, failing=len(self.errors))


def worst_of(errors: Sequence[StageError]) -> StageError:
    """Return the first of the worst, with the other messages in its evidence."""
    verdict = Verdict.worst(error.verdict for error in errors)
    worst = next(error for error in errors if error.verdict is verdict)
    others = [f"{error.evidence.get('where', '')}: {error}" for error in errors if error is not worst]
    if others:
        worst.evidence["others"] = others[:MOST_OTHERS]
    return worst


AnyStage = CaseStage[Any, Any]
