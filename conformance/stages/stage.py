"""Stages: what every stage of a claim has in common, and how it says what it found.

A stage of a case takes what the stage before it made, and returns a result of its own type, or raises StageError for a
fault that ends the case. When all cases are done, it leaves one check over all of them.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.fx import GraphModule

from backends.discovery import describe_error
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.machine.guard import Finds, guard
from conformance.stages.bench import Bench
from refimpl import ConfigError, RefimplError
from reports.schema import Check, Where, evidence
from reports.verdicts import Verdict

RULES: dict[str, str] = {
    "config": "CFG-09",
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
MOST_OTHERS = 20
"""Lines about further failing cases that the evidence has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A rule that does not hold, and how it shows."""

    rule: str
    message: str
    verdict: Verdict = Verdict.REFUTED


class StageError(Exception):
    """A stage found a fault, or could not go on: the rule, the verdict and the evidence."""

    def __init__(self, rule: str, verdict: Verdict, message: str, **evidence: object) -> None:
        super().__init__(message)
        self.rule = rule
        self.verdict = verdict
        self.evidence = evidence


def raise_problem(problem: Problem | None, model: GraphModule) -> None:
    """Raise a StageError for a problem of a model."""
    if problem is not None:
        raise StageError(problem.rule, problem.verdict, problem.message, graph=model.code)


@guard("flow", Finds.ERROR)
def run_flow(rule: str, step: Callable[[], GraphModule]) -> GraphModule:
    """Run a step of refimpl. Raises StageError: a ConfigError refutes the claim, any other RefimplError leaves it open.

    What blames the QConfig or the model says nothing against the config.
    """
    try:
        return step()
    except ConfigError as error:
        raise StageError(rule, Verdict.REFUTED, str(error)) from error
    except RefimplError as error:
        raise StageError(rule, Verdict.UNEXERCISED, str(error)) from error


# -- checks -----------------------------------------------------------------------------------------------------------


def passed(claim: str, stage: str, cases: int) -> Check:
    """Return the check of a stage that found no fault."""
    return Check(
        claim=claim, stage=stage, rule=RULES[stage], outcome="pass", verdict=Verdict.VERIFIED, cases=cases
    )  # fmt: skip


def failed(claim: str, stage: str, error: StageError) -> Check:
    """Return the check of a stage that found a fault, or could not go on."""
    return Check(
        claim=claim,
        stage=stage,
        rule=error.rule,
        outcome="skip" if error.verdict is Verdict.UNEXERCISED else "fail",
        verdict=error.verdict,
        message=str(error),
        evidence=evidence(error.evidence),
    )


def skipped(stage: str, ended: Check) -> Check:
    """Return the check of a stage that is not reached; it carries the verdict of the check that ended the claim."""
    message = ended.message if ended.outcome == "skip" else f"not reached: {ended.stage} ended the claim"
    return Check(
        claim=ended.claim, stage=stage, rule=RULES[stage], outcome="skip", verdict=ended.verdict, message=message
    )  # fmt: skip


def internal_error(claim: str, stage: str, error: Exception) -> Check:
    """Return the check that stands for a stage in which the suite itself failed."""
    return Check(
        claim=claim,
        stage=stage,
        rule="",
        outcome="error",
        verdict=Verdict.UNEXERCISED,
        message=f"internal error of the suite: {describe_error(error)}",
        evidence=evidence({"traceback": "".join(traceback.format_exception(error))}),
    )


# -- stages of a case -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What a stage made of a case. ``fault``: a fault after which the case goes on all the same."""

    fault: StageError | None = None

    @property
    def is_faulty(self) -> bool:
        """Whether the stage found a fault."""
        return self.fault is not None


Before = TypeVar("Before")
After = TypeVar("After", bound=CaseResult)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Generic[After]):
    """What came of a stage's work on one case.

    ``result``: None: the case goes no further. ``made``: the result, or as much of it as there was when the fault was
    found.
    """

    result: After | None
    is_faulty: bool
    made: CaseResult | None


class CaseStage(ABC, Generic[Before, After]):
    """One stage of a claim's cases, and what it has found so far."""

    name: ClassVar[str]
    """Name of the stage, one of STAGES."""
    runs_backend: ClassVar[bool] = False
    """Whether the backend's code may raise here, so that a claim may end before all its cases are tried."""

    def __init__(self, bench: Bench, claim: Claim) -> None:
        self.bench = bench
        self.claim = claim
        self.entered = 0
        self.passed = 0
        self.raised = 0
        self.errors: list[StageError] = []
        self.internal: Check | None = None
        self.made: CaseResult | None = None
        self._seconds = 0.0

    @abstractmethod
    def run(self, before: Before) -> After:
        """Do the work on one case. Raises StageError for a fault that ends the case."""

    def seed(self, case: Case) -> None:
        """Seed torch's generator for the work on a case, whatever ran before."""
        torch.default_generator.manual_seed(self.bench.seed_for(self.claim.id, self.name, case.name))

    def attempt(self, case: Case, before: Before) -> Attempt[After]:
        """Do the work on one case, from a seed of its own, and count what comes of it."""
        started = time.perf_counter()
        self.seed(case)
        self.entered += 1
        self.made, result, fault = None, None, None
        try:
            result = self.run(before)
            fault = result.fault
        except StageError as error:
            fault = error
        except Exception as error:
            self.internal = internal_error(self.claim.id, self.name, error)
        if fault is not None:
            fault.evidence = {"where": Where(case=case.name), **fault.evidence}
            self.errors.append(fault)
        self.passed += result is not None
        self.raised += self.has_raised(result, fault)
        self._seconds += time.perf_counter() - started
        return Attempt(
            result=result, is_faulty=result is None or result.is_faulty, made=self.made if result is None else result
        )  # fmt: skip

    def has_raised(self, result: After | None, fault: StageError | None) -> bool:
        """Tell whether the backend's code raised where the case was to be lowered or run."""
        return False

    def conclude(self, untried: int) -> Check:
        """Return the check over all cases; ``untried``: how many were left when the claim ended."""
        check = self.internal or self.judge()
        if untried and self.runs_backend and check.outcome == "fail":
            check = replace(check, evidence=evidence({**check.evidence, "cases not tried": untried}))
        return replace(check, seconds=round(self._seconds, 6))

    def judge(self) -> Check:
        """Judge the stage by all its cases."""
        if not self.errors:
            return passed(self.claim.id, self.name, self.entered)
        check = failed(self.claim.id, self.name, worst_of(self.errors))
        return replace(check, cases=self.entered, failing=len(self.errors))


def worst_of(errors: Sequence[StageError]) -> StageError:
    """Return the first of the worst, with what the others say in its evidence."""
    verdict = Verdict.worst(error.verdict for error in errors)
    worst = next(error for error in errors if error.verdict is verdict)
    others = [f"{error.evidence.get('where', '')}: {error}" for error in errors if error is not worst]
    if others:
        worst.evidence["others"] = others[:MOST_OTHERS]
    return worst


AnyStage = CaseStage[Any, Any]
