"""One claim on its way through the pipeline: its cases, what each stage found, and the check that this makes.

A case in which a stage finds a fault goes no further; when none is left, the later stages are skipped and carry the
cause's verdict.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from backends.discovery import told
from conformance.claims.case import Case
from conformance.claims.claim import Claim
from conformance.claims.inputs import Batch
from conformance.claims.traits import moves_only
from conformance.oracle.grids import Grid
from conformance.stages.backend_calls import StageError
from conformance.stages.check import Check, Problem
from conformance.stages.numerics import Finding, judge
from conformance.stages.reruns import ExactOf
from reports.results import GREEN, Verdict

STAGES: tuple[str, ...] = (
    "config", "fuse", "prepare", "convert", "lower", "execution", "numerics", "refusal", "invariance",
)  # fmt: skip
_RULES = ("CFG-09", "FUS-03", "OBS-01", "CVT-01", "LOW-01", "LOW-04", "NUM-03", "DTY-06", "NUM-07")
RULES = dict(zip(STAGES, _RULES, strict=True))


ENOUGH = 4
"""When the backend's code raised in so many cases, and in all so far, the others are not tried: it does not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where the work on a claim is: what a process was doing when it died."""

    stage: str
    case: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class CaseRun:
    """The artefacts of one case, made stage by stage; an attribute is read only after the stage that sets it.

    ``exact_of``: gives the exact results of inputs; None: there was no output to compare with them. ``first``: what the
    first inputs gave, in the first run of the lowered model.
    """

    case: Case
    model: nn.Module = field(init=False)
    prepared: GraphModule = field(init=False)
    misfit: Problem | None = None
    reference: GraphModule = field(init=False)
    grids: list[Grid | None] = field(init=False)
    drawn: list[tuple[str, Batch]] = field(init=False)
    lowered: Callable[..., Any] = field(init=False)
    exact_of: ExactOf | None = None
    first: Any = None
    runs_in_float: bool = False

    @property
    def size(self) -> int:
        """How many elements the inputs have."""
        return sum(math.prod(each.shape) for each in self.case.inputs)


@dataclass(kw_only=True)
class ClaimRun:
    """What has been found of one claim.

    ``kept``: of the cases that came through, each ``every``-th, one of each rank, and the largest. ``held``: stage and
    variant of what has been seen to hold, and does not depend on the regime. ``prepared``: the first prepared model.
    ``faulty``: the first case with a fault.
    """

    claim: Claim
    every: int
    planned: Sequence[Case] = ()
    kept: list[CaseRun] = field(default_factory=list)
    ended: Check | None = None
    findings: list[Finding] = field(default_factory=list)
    held: set[tuple[str, str]] = field(default_factory=set)
    prepared: GraphModule | None = None
    faulty: CaseRun | None = None
    facts: list[dict[str, object]] = field(default_factory=list)
    _entered: Counter[str] = field(default_factory=Counter)
    _left: Counter[str] = field(default_factory=Counter)
    _errors: defaultdict[str, list[StageError]] = field(default_factory=lambda: defaultdict(list))
    _broken: dict[str, Check] = field(default_factory=dict)
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _ranks: set[tuple[int, ...]] = field(default_factory=set)
    _taken: int = 0
    _raised: int = 0

    def tried(self, stage: str, case_run: CaseRun, work: Callable[[ClaimRun, CaseRun], None]) -> bool:
        """Do a stage's work on a case; tell whether the case goes on to the next."""
        started, goes_on = time.perf_counter(), False
        self._entered[stage] += 1
        known = len(self.findings)
        try:
            work(self, case_run)
            goes_on = True
        except StageError as error:
            error.evidence.setdefault("case", case_run.case.name)
            self._errors[stage].append(error)
            self._raised += stage == "lower" and error.verdict is Verdict.REFUTED
            goes_on = error.verdict is Verdict.FALLBACK or stage == "numerics"
        except Exception as error:
            self._broken[stage] = internal_error(stage, error)
        self._raised += any(finding.rule == "LOW-01" for finding in self.findings[known:])
        found = not goes_on or self._errors[stage] or any(each.excess > 0 for each in self.findings[known:])
        self.faulty = self.faulty or (case_run if found else None)
        self._left[stage] += goes_on
        self._taken += not goes_on
        self._seconds[stage] += time.perf_counter() - started
        return goes_on

    def keep(self, case_run: CaseRun) -> None:
        """Note a case that came through all stages; what is kept has all ranks of inputs, and the largest ones."""
        ranks = tuple(len(each.shape) for each in case_run.case.inputs)
        is_largest = case_run.size > max((each.size for each in self.kept), default=0)
        if (self._left["numerics"] - 1) % self.every == 0 or ranks not in self._ranks or is_largest:
            self.kept.append(case_run)
            self._ranks.add(ranks)
        self._taken += 1

    @property
    def is_over(self) -> bool:
        """Whether the cases that are left need not be tried."""
        return bool(self._broken) or ENOUGH <= self._raised == self._taken

    def concluded(self, stage: str) -> Check:
        """Return a stage's check over all cases, and end the claim when it leaves none."""
        if self.ended is not None:
            return skipped(stage, self.ended)
        check = replace(self._judged(stage), seconds=self._seconds[stage])
        if check.outcome == "error" or not self._left[stage]:
            self.ended = check
        return check

    def _judged(self, stage: str) -> Check:
        if stage in self._broken:
            return self._broken[stage]
        errors = self._errors[stage]
        is_numeric = stage == "numerics" and self.findings
        check = judge(self.findings, moves_only=moves_only(self.claim)) if is_numeric else None
        if errors and (check is None or check.verdict in GREEN):
            check = failed(stage, _worst(errors))
        check = check or passed(stage, self._entered[stage])
        cases = len(self.findings) + len(errors) if is_numeric else self._entered[stage]
        check = replace(check, cases=cases, failing=check.failing + len(errors))
        untried = len(self.planned) - self._taken
        if untried and check.outcome == "fail" and stage in ("lower", "numerics"):
            check = replace(check, evidence={**check.evidence, "cases not tried": untried})
        return check


def _worst(errors: Sequence[StageError]) -> StageError:
    """Return the first of the worst, with what the others say in its evidence."""
    worst = next(error for error in errors if error.verdict is Verdict.worst(each.verdict for each in errors))
    others = [f"{error.evidence.get('case', '')}: {error}" for error in errors if error is not worst]
    if others:
        worst.evidence["others"] = others[:20]
    return worst


def passed(stage: str, cases: int) -> Check:
    """Return the check of a stage that found no fault."""
    return Check(stage=stage, rule=RULES[stage], outcome="pass", verdict=Verdict.VERIFIED, cases=cases)


def skipped(stage: str, ended: Check) -> Check:
    """Return the check of a stage that is not reached; it carries the verdict of the one that ended the claim."""
    message = ended.message if ended.outcome == "skip" else f"not reached: {ended.stage} ended the claim"
    return Check(stage=stage, rule=RULES[stage], outcome="skip", verdict=ended.verdict, message=message)


def failed(stage: str, error: StageError) -> Check:
    """Return the check of a stage that found a fault, or could not go on."""
    outcome = "skip" if error.verdict is Verdict.UNEXERCISED else "fail"
    return Check(
        stage=stage, rule=error.rule, outcome=outcome, verdict=error.verdict, message=str(error),
        evidence=error.evidence,
    )  # fmt: skip


def internal_error(stage: str, error: Exception) -> Check:
    """Return the check that stands for a stage in which the suite itself failed."""
    return Check(
        stage=stage,
        rule="",
        outcome="error",
        verdict=Verdict.UNEXERCISED,
        message=f"internal error of the suite: {told(error)}",
        evidence={"traceback": "".join(traceback.format_exception(error))},
    )
