"""The pipeline of one claim: model → fuse → prepare → convert → lower → run, each stage a check.

Every case of a claim (models.py) is taken through the flow once; the stages look at the artefacts. A case in
which a stage finds a fault goes no further; when none is left, the later stages are skipped and carry the cause's
verdict.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.base import Backend, Representation, UnsupportedPattern
from conformance import structure
from conformance.cases import Case
from conformance.checks import Check
from conformance.claims import Claim
from conformance.draws import Batch, calibration_inputs, float_inputs, static_inputs
from conformance.grids import Grid, output_step, placeholder_grids
from conformance.invariance import check_invariance, judge_invariance, left_out
from conformance.lint import lint
from conformance.models import build_model, plan_cases
from conformance.nonfinite import nonfinite_rows
from conformance.numerics import Finding, compare_all, failure, judge
from conformance.oracle import NoOracleError, Walk
from conformance.preparing import prepare_case
from conformance.quantizers import INTEGERS, dynamic_range, kind_of
from conformance.refusal import check_refusal
from conformance.running import StageError, backend_error, run_lowered, told_again
from refimpl import (
    BackendConfig,
    ConfigError,
    RefimplError,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
    explain,
    fuse_fx,
)
from refimpl.backend_config import as_backend_config
from reports.results import Verdict

STAGES: tuple[str, ...] = (
    "config", "fuse", "prepare", "convert", "lower", "execution", "numerics", "refusal", "invariance",
)  # fmt: skip
_RULES = ("CFG-09", "FUS-03", "OBS-01", "CVT-01", "LOW-01", "LOW-04", "NUM-03", "DTY-06", "NUM-07")
RULES = dict(zip(STAGES, _RULES, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of a claim a profile tries: cases (None: all variants), aimed and random inputs of each case.

    ``every``: each so-manieth case is run again under the changes that may make no difference.
    """

    cases: int | None
    aims: int
    random: int
    every: int = 1


PROFILES: dict[str, Effort] = {
    "quick": Effort(cases=1, aims=3, random=0),
    "full": Effort(cases=None, aims=8, random=1, every=3),
    "stress": Effort(cases=None, aims=8, random=24),
}


_FUSES_NOTHING = BackendConfig("fuses nothing")


@dataclass(slots=True, kw_only=True)
class CaseRun:
    """The artefacts of one case, made stage by stage; an attribute is read only after the stage that sets it."""

    case: Case
    model: nn.Module
    fused: GraphModule = field(init=False)
    prepared: GraphModule = field(init=False)
    reference: GraphModule = field(init=False)
    grids: list[Grid | None] = field(init=False)
    drawn: list[tuple[str, Batch]] = field(init=False)
    lowered: Callable[..., Any] = field(init=False)
    runs_in_float: bool = False


@dataclass(slots=True, kw_only=True)
class ClaimRun:
    """One claim on its way through the stages: the cases that go on, and the check that ended the last of them."""

    claim: Claim
    cases: list[CaseRun] = field(default_factory=list)
    ended: Check | None = None
    facts: list[dict[str, object]] = field(default_factory=list)


class Workbench:
    """Runs claims for one backend; holds the artefacts of the claim that it works on."""

    def __init__(self, backend: Backend, *, seed: int, profile: str, max_examples: int | None = None) -> None:
        torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and workers share the cores
        self.backend = backend
        self.seed = seed
        self.profile = profile
        effort = PROFILES[profile]
        self.effort = effort if max_examples is None else replace(effort, aims=8, random=max_examples)
        self.capabilities = backend.capabilities()
        self.config: BackendConfig = as_backend_config(backend.backend_config())
        self._run: ClaimRun | None = None
        self._stages: dict[str, Callable[[ClaimRun], Check]] = {
            "config": self._config,
            "fuse": self._each(self._fuse),
            "prepare": self._each(self._prepare),
            "convert": self._each(self._convert),
            "lower": self._each(self._lower),
            "execution": self._each(self._execution),
            "numerics": self._numerics,
            "refusal": self._refusal,
            "invariance": self._invariance,
        }

    def run(self, claim: Claim) -> Iterator[Check]:
        """Take a claim through all stages; yield a check for each, in order. Never raises for a backend's fault.

        What fails in the suite itself is a check too (outcome "error", UNEXERCISED), and ends the claim.
        """
        run = self._run = ClaimRun(claim=claim)
        for stage in STAGES:
            check = self._check(run, stage)
            if run.ended is None and (check.outcome == "error" or not run.cases):
                run.ended = check
            yield check

    def decisions(self, claim: Claim) -> list[dict[str, object]]:
        """Return the decision log of the claim's first case, or nothing if it was not prepared."""
        run = self._run
        if run is None or run.claim.id != claim.id or not run.cases or not hasattr(run.cases[0], "prepared"):
            return []
        return [dict(row) for row in explain(run.cases[0].prepared).rows()]

    def facts(self, claim: Claim) -> list[dict[str, object]]:
        """Return what was measured on the way and is not judged: rows of the results file."""
        run = self._run
        return run.facts if run is not None and run.claim.id == claim.id else []

    def seed_for(self, *parts: str) -> int:
        """Return a seed for these names, the same whatever ran before and in whichever process."""
        digest = hashlib.sha256("/".join([str(self.seed), *parts]).encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def convert(self, prepared: GraphModule) -> GraphModule:
        """Return the reference model in the backend's representation."""
        is_quantized = self.backend.representation is Representation.QUANTIZED
        return (convert_to_reference_fx if is_quantized else convert_to_reference_decomposed_fx)(prepared)

    def lower(self, reference: GraphModule, example_inputs: Batch) -> Callable[..., Any]:
        """Return what the backend makes of a copy of the reference model. Raises StageError for what it does wrong."""
        try:
            lowered = self.backend.lower(copy.deepcopy(reference), example_inputs)
        except UnsupportedPattern as error:
            text = f"the backend declines what its config claims: {error}"
            raise StageError("LOW-01", Verdict.REFUTED, text) from error
        except Exception as error:
            raise backend_error("lower", error) from error
        if not callable(lowered):
            text = f"lower returned {type(lowered).__name__}, which cannot be called"
            raise StageError("LOW-01", Verdict.REFUTED, text)
        return lowered

    def _check(self, run: ClaimRun, stage: str) -> Check:
        if run.ended is not None:
            return _skipped(stage, run.ended)
        torch.manual_seed(self.seed_for(run.claim.id, stage))
        try:
            return self._stages[stage](run)
        except StageError as error:
            return _failed(stage, error)
        except Exception as error:
            return internal_error(stage, error)

    def _each(self, stage: Callable[[ClaimRun, CaseRun], None]) -> Callable[[ClaimRun], Check]:
        name = stage.__name__.removeprefix("_")

        def run_all(run: ClaimRun) -> Check:
            count, going, errors = len(run.cases), [], []
            for case_run in run.cases:
                try:
                    stage(run, case_run)
                except StageError as error:
                    error.evidence.setdefault("case", case_run.case.name)
                    errors.append(error)
                    if error.verdict is not Verdict.FALLBACK:
                        continue
                going.append(case_run)
            run.cases = going
            if errors:
                raise _worst(errors)
            return _passed(name, count)

        return run_all

    # -- stages ------------------------------------------------------------------------------------------------------

    def _config(self, run: ClaimRun) -> Check:
        problem = lint(run.claim, self.config)
        if problem is not None:
            raise StageError(problem.rule, problem.verdict, problem.message)
        cases = plan_cases(
            run.claim, self.capabilities, limit=self.effort.cases, has_prelude=self._has_prelude(run.claim)
        )
        if isinstance(cases, str):
            raise StageError("CFG-09", Verdict.UNEXERCISED, cases)
        run.cases = [CaseRun(case=case, model=build_model(case)) for case in cases]
        return _passed("config", len(cases))

    def _has_prelude(self, claim: Claim) -> bool:
        """Tell whether an identity before the pattern is quantized too, and so can widen what the pattern is given."""
        dtypes = [each.input_dtype for entry in self.config.configs if entry.normal_pattern is nn.Identity
                  for each in entry.dtype_configs]  # fmt: skip
        return claim.dtypes.input_dtype in dtypes

    def _fuse(self, run: ClaimRun, case_run: CaseRun) -> None:
        model = case_run.model
        case_run.fused = self._flow("FUS-02", lambda: fuse_fx(model, backend_config=self.config))
        problem = structure.check_fused(
            run.claim, case_run.fused, lambda: fuse_fx(model, backend_config=_FUSES_NOTHING)
        )
        if problem is None:
            problem = structure.check_fused_meaning(model, case_run.fused, calibration_inputs(case_run.case)[0])
        _raise(problem, case_run.fused)

    def _prepare(self, run: ClaimRun, case_run: CaseRun) -> None:
        case_run.prepared = self._flow(
            "OBS-15", lambda: prepare_case(run.claim, case_run.case, case_run.model, self.config)
        )
        _raise(structure.check_prepared(run.claim, case_run.prepared), case_run.prepared)

    def _convert(self, run: ClaimRun, case_run: CaseRun) -> None:
        reference = case_run.reference = self._flow("CVT-01", lambda: self.convert(case_run.prepared))
        _raise(structure.check_reference(run.claim, reference), reference)
        case_run.grids = placeholder_grids(reference)
        case_run.drawn = self._draw(run.claim, case_run)
        meant = case_run.prepared if run.claim.flow == "qat" else case_run.model  # training has changed the model
        _raise(structure.check_meaning(meant, reference, case_run.drawn[0][1]), reference)

    def _draw(self, claim: Claim, case_run: CaseRun) -> list[tuple[str, Batch]]:
        """Inputs of a case, each set with its name; drawn before a backend can use the generator."""
        effort = self.effort
        if kind_of(claim.dtypes) in INTEGERS:
            return static_inputs(case_run.case, case_run.grids, aims=effort.aims, random=effort.random)
        return float_inputs(case_run.case, random=max(1, effort.random))

    def _lower(self, run: ClaimRun, case_run: CaseRun) -> None:
        example = tuple(value.clone() for value in case_run.drawn[0][1])
        case_run.lowered = self.lower(case_run.reference, example)

    def _execution(self, run: ClaimRun, case_run: CaseRun) -> None:
        try:
            execution = self.backend.execution(case_run.lowered)
        except Exception as error:
            raise backend_error("execution", error) from error
        if execution is None:
            return
        if execution.float_fallbacks:
            case_run.runs_in_float = True
            floats = list(execution.float_fallbacks)
            raise StageError("LOW-04", Verdict.FALLBACK, f"runs in float: {'; '.join(floats)}", float_ops=floats)
        if not execution.quantized_ops:
            case_run.runs_in_float = True
            raise StageError("LOW-04", Verdict.FALLBACK, "the backend shows no quantized op that ran")

    def _numerics(self, run: ClaimRun) -> Check:
        findings: list[Finding] = []
        open_questions: list[StageError] = []
        for case_run in run.cases:
            try:
                findings += self._compare_all(run.claim, case_run)
            except StageError as error:
                open_questions.append(error)
        check = judge(findings, moves_only=structure.moves_only(run.claim)) if findings else None
        if open_questions and (check is None or check.verdict in (Verdict.VERIFIED, Verdict.QUALITY)):
            raise _worst(open_questions)
        assert check is not None
        return check

    def _compare_all(self, claim: Claim, case_run: CaseRun) -> Iterator[Finding]:
        """Compare the outputs for all inputs with the oracle."""
        in_float = self.capabilities.float_accumulation or case_run.runs_in_float
        capabilities = replace(self.capabilities, float_accumulation=in_float)
        walk = Walk(case_run.reference, capabilities, dynamic_range=dynamic_range(claim))
        for name, inputs in case_run.drawn:
            case = f"{case_run.case.name}, {name}"
            try:
                exacts = walk.exact(inputs)
            except NoOracleError as error:
                raise StageError("NUM-03", Verdict.UNEXERCISED, f"no oracle: {error}") from error
            try:
                output = run_lowered(case_run.lowered, case, inputs)
            except StageError as error:
                again = told_again(case_run.lowered, case, inputs)
                evidence = error.evidence if again == str(error) else {**error.evidence, "nondeterministic": True}
                yield failure(case, error.rule, str(error), evidence)
                continue
            yield from compare_all(case, exacts, output, tuple(case_run.grids))

    def _refusal(self, run: ClaimRun) -> Check:
        case_run = run.cases[0]
        problem, tried = check_refusal(run.claim, case_run.case, case_run.model, self.config)
        _raise(problem, case_run.prepared)
        return _passed("refusal", tried)

    def _invariance(self, run: ClaimRun) -> Check:
        findings: list[Finding] = []
        for case_run in run.cases[:: self.effort.every]:
            lowered = self.lower(case_run.reference, case_run.drawn[0][1])  # afresh: it has not run yet
            out = left_out(run.claim, self.profile, runs_in_float=case_run.runs_in_float)
            findings += check_invariance(
                case_run.case,
                case_run.drawn,
                lowered,
                self.capabilities,
                left_out=out,
                step=output_step(case_run.reference),
            )
        if self.profile != "quick" and run.cases:
            first = run.cases[0]
            run.facts = list(nonfinite_rows(run.claim, first.case, first.drawn, first.lowered))
        return judge_invariance(findings)

    def _flow(self, rule: str, step: Callable[[], GraphModule]) -> GraphModule:
        """Run a step of refimpl: what blames the config refutes the claim, what blames the QConfig leaves it open."""
        try:
            return step()
        except ConfigError as error:
            raise StageError(rule, Verdict.REFUTED, str(error)) from error
        except RefimplError as error:
            raise StageError(rule, Verdict.UNEXERCISED, str(error)) from error


def _worst(errors: Sequence[StageError]) -> StageError:
    """Return the first of the worst, with what the others say in its evidence."""
    worst = next(error for error in errors if error.verdict is Verdict.worst(each.verdict for each in errors))
    others = [f"{error.evidence.get('case', '')}: {error}" for error in errors if error is not worst]
    if others:
        worst.evidence["others"] = others[:20]
    return worst


def _raise(problem: structure.Problem | None, model: GraphModule) -> None:
    if problem is not None:
        raise StageError(problem.rule, problem.verdict, problem.message, graph=model.code)


def _passed(stage: str, cases: int) -> Check:
    return Check(stage=stage, rule=RULES[stage], outcome="pass", verdict=Verdict.VERIFIED, cases=cases)


def _skipped(stage: str, ended: Check) -> Check:
    """The check of a stage that is not reached; it carries the verdict of the one that ended the claim."""
    message = ended.message if ended.outcome == "skip" else f"not reached: {ended.stage} ended the claim"
    return Check(stage=stage, rule=RULES[stage], outcome="skip", verdict=ended.verdict, message=message)


def _failed(stage: str, error: StageError) -> Check:
    outcome = "skip" if error.verdict is Verdict.UNEXERCISED else "fail"
    return Check(
        stage=stage, rule=error.rule, outcome=outcome, verdict=error.verdict, message=str(error),
        evidence=error.evidence,
    )  # fmt: skip


def internal_error(stage: str, error: Exception) -> Check:
    """Return the check that stands for a stage in which the suite itself failed."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Check(
        stage=stage,
        rule="",
        outcome="error",
        verdict=Verdict.UNEXERCISED,
        message=f"internal error of the suite: {told}",
        evidence={"traceback": "".join(traceback.format_exception(error))},
    )
