"""The pipeline of one claim: model → fuse → prepare → convert → lower → execution → numbers, each stage a check.

Every case of a claim (models.py) is taken through the flow once; the stages look at the artefacts. A stage that finds a
fault ends the claim: later stages are skipped and carry the cause's verdict.
"""

from __future__ import annotations

import copy
import hashlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from backends.base import Backend, Representation, UnsupportedPattern
from conformance import structure
from conformance.checks import Check
from conformance.claims import Claim
from conformance.models import (
    Case,
    PatternModel,
    build_model,
    calibration_inputs,
    integer_inputs,
    plan_cases,
    qconfig_for,
)
from conformance.numerics import Comparison, Finding, compare, compare_repeated, judge
from conformance.oracle import Grid, NoOracleError, Walk, input_grids
from refimpl import (
    BackendConfig,
    ConfigError,
    QConfigMapping,
    convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
    explain,
    fuse_fx,
    prepare_fx,
)
from refimpl.backend_config import as_backend_config
from reports.results import Verdict

STAGES: tuple[str, ...] = ("config", "fuse", "prepare", "convert", "lower", "execution", "numerics")
RULES = dict(zip(STAGES, ("CFG-09", "FUS-03", "OBS-01", "CVT-01", "LOW-01", "LOW-04", "NUM-03"), strict=True))
RANDOM_INPUTS = {"quick": 1, "full": 4}


class StageError(Exception):
    """A stage found a fault (or could not go on): the rule, the verdict and the evidence."""

    def __init__(self, rule: str, verdict: Verdict, message: str, **evidence: object) -> None:
        super().__init__(message)
        self.rule = rule
        self.verdict = verdict
        self.evidence = evidence


@dataclass(slots=True)
class CaseRun:
    """The artefacts of one case, made stage by stage."""

    case: Case
    model: PatternModel | None = None
    fused: GraphModule | None = None
    prepared: GraphModule | None = None
    reference: GraphModule | None = None
    lowered: Callable[..., Any] | None = None


@dataclass(slots=True)
class ClaimRun:
    """One claim on its way through the stages: its cases, a check for each stage done, and the one that ended it."""

    claim: Claim
    cases: list[CaseRun] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    ended: Check | None = None


class Workbench:
    """Runs the stages of claims for one backend; holds the artefacts of the claim that it works on."""

    def __init__(self, backend: Backend, *, seed: int, profile: str, max_examples: int | None) -> None:
        torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and workers share the cores
        self.backend = backend
        self.seed = seed
        self.random_inputs = RANDOM_INPUTS.get(profile, RANDOM_INPUTS["full"]) if max_examples is None else max_examples
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
        }

    def check(self, claim: Claim, stage: str) -> Check:
        """Run one stage of a claim, and those before it that have not run yet. Never raises for a backend's fault.

        A stage that has run already is run again with the whole claim.
        """
        run = self._run
        if run is None or run.claim.id != claim.id or stage in run.checks:
            run = self._run = ClaimRun(claim)
        for name in STAGES[: STAGES.index(stage) + 1]:
            if name not in run.checks:
                run.checks[name] = self._check(run, name)
        return run.checks[stage]

    def _check(self, run: ClaimRun, stage: str) -> Check:
        """Run a stage whose predecessors have run; what it finds may end the claim. Raises the suite's own faults."""
        if run.ended is not None:
            return _skipped(stage, run.ended)
        torch.manual_seed(self._seed(run.claim, stage))
        try:
            check = self._stages[stage](run)
        except StageError as error:
            check = _failed(stage, error)
        except Exception as error:
            text = f"internal error of the suite: {type(error).__name__}: {error}"
            run.ended = run.checks[stage] = Check(
                stage=stage, rule="", outcome="error", verdict=Verdict.UNEXERCISED, message=text
            )
            raise
        if check.outcome != "pass" and check.verdict is not Verdict.FALLBACK:
            run.ended = check
        return check

    def decisions(self, claim: Claim) -> list[dict[str, object]]:
        """Return the decision log of the claim's first case, or nothing if it was not prepared."""
        run = self._run
        if run is None or run.claim.id != claim.id or not run.cases or run.cases[0].prepared is None:
            return []
        return [dict(row) for row in explain(run.cases[0].prepared).rows()]

    def _seed(self, claim: Claim, stage: str) -> int:
        """One seed per claim and stage, the same whatever ran before it and in whichever process."""
        digest = hashlib.sha256(f"{self.seed}/{claim.id}/{stage}".encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def _each(self, stage: Callable[[ClaimRun, CaseRun], None]) -> Callable[[ClaimRun], Check]:
        name = stage.__name__.removeprefix("_")

        def run_all(run: ClaimRun) -> Check:
            for case_run in run.cases:
                try:
                    stage(run, case_run)
                except StageError as error:
                    error.evidence.setdefault("case", case_run.case.name)
                    raise
            return Check(stage=name, rule=RULES[name], outcome="pass", verdict=Verdict.VERIFIED, cases=len(run.cases))

        return run_all

    # -- stages ------------------------------------------------------------------------------------------------------

    def _config(self, run: ClaimRun) -> Check:
        problem = structure.lint(run.claim)
        if problem is not None:
            raise StageError(problem.rule, Verdict.REFUTED, problem.message)
        cases = plan_cases(run.claim)
        if isinstance(cases, str):
            raise StageError("CFG-09", Verdict.UNEXERCISED, cases)
        run.cases = [CaseRun(case) for case in cases]
        for case_run in run.cases:
            case_run.model = build_model(case_run.case)
        return Check(stage="config", rule="CFG-09", outcome="pass", verdict=Verdict.VERIFIED, cases=len(cases))

    def _fuse(self, run: ClaimRun, case_run: CaseRun) -> None:
        case_run.fused = self._flow("FUS-02", lambda: fuse_fx(_given(case_run.model), backend_config=self.config))
        problem = structure.check_fused(run.claim, case_run.fused)
        if problem is None:
            inputs = calibration_inputs(case_run.case)[0]
            problem = structure.check_fused_meaning(_given(case_run.model), case_run.fused, inputs)
        if problem is not None:
            raise StageError(problem.rule, Verdict.REFUTED, problem.message, graph=case_run.fused.code)

    def _prepare(self, run: ClaimRun, case_run: CaseRun) -> None:
        qconfig = qconfig_for(run.claim, is_symmetric=case_run.case.is_symmetric)
        mapping = QConfigMapping().set_global(qconfig)
        prepared = self._flow(
            "OBS-15", lambda: prepare_fx(_given(case_run.model), mapping, None, backend_config=self.config)
        )
        case_run.prepared = prepared
        problem = structure.check_prepared(run.claim, prepared)
        if problem is not None:
            raise StageError(problem.rule, problem.verdict, problem.message, graph=prepared.code)
        with torch.no_grad():
            for inputs in calibration_inputs(case_run.case):
                prepared(*inputs)

    def _convert(self, run: ClaimRun, case_run: CaseRun) -> None:
        convert = (
            convert_to_reference_fx
            if self.backend.representation is Representation.QUANTIZED
            else convert_to_reference_decomposed_fx
        )
        reference = self._flow("CVT-01", lambda: convert(_given(case_run.prepared)))
        case_run.reference = reference
        problem = structure.check_reference(run.claim, reference)
        if problem is None:
            inputs = calibration_inputs(case_run.case)[0]
            problem = structure.check_meaning(_given(case_run.model), reference, inputs)
        if problem is not None:
            raise StageError(problem.rule, problem.verdict, problem.message, graph=reference.code)

    def _lower(self, run: ClaimRun, case_run: CaseRun) -> None:
        reference = copy.deepcopy(_given(case_run.reference))
        example = tuple(grid.values(torch.full(shape, grid.zero_point)) for grid, shape in self._inputs(case_run))
        try:
            lowered = self.backend.lower(reference, example)
        except UnsupportedPattern as error:
            text = f"the backend declines what its config claims: {error}"
            raise StageError("LOW-01", Verdict.REFUTED, text) from error
        except Exception as error:
            raise _backend_error("lower", error) from error
        if not callable(lowered):
            text = f"lower returned {type(lowered).__name__}, which cannot be called"
            raise StageError("LOW-01", Verdict.REFUTED, text)
        case_run.lowered = lowered

    def _execution(self, run: ClaimRun, case_run: CaseRun) -> None:
        lowered = _given(case_run.lowered)
        try:
            execution = self.backend.execution(lowered)
        except Exception as error:
            raise _backend_error("execution", error) from error
        if execution is None:
            return
        if execution.float_fallbacks:
            floats = list(execution.float_fallbacks)
            raise StageError("LOW-04", Verdict.FALLBACK, f"runs in float: {'; '.join(floats)}", float_ops=floats)
        if not execution.quantized_ops:
            raise StageError("LOW-04", Verdict.FALLBACK, "the backend shows no quantized op that ran")

    def _numerics(self, run: ClaimRun) -> Check:
        drawn = [(case_run, self._drawn(case_run)) for case_run in run.cases]  # before a backend can use the generator
        findings = [finding for case_run, inputs in drawn for finding in self._compare_all(case_run, inputs)]
        return judge(findings, moves_only=structure.moves_only(run.claim))

    def _drawn(self, case_run: CaseRun) -> list[tuple[str, tuple[Tensor, ...]]]:
        """Inputs on the grids of a case, each set with its name."""
        grids = [grid for grid, _ in self._inputs(case_run)]
        bounds = [(grid.low, grid.high, grid.zero_point) for grid in grids]
        drawn = integer_inputs(case_run.case.shapes, bounds, self.random_inputs)
        return [(name, tuple(g.values(q) for g, q in zip(grids, integers, strict=True))) for name, integers in drawn]

    def _compare_all(self, case_run: CaseRun, drawn: list[tuple[str, tuple[Tensor, ...]]]) -> Iterator[Finding]:
        """Compare the outputs for all inputs with the oracle, and that for the first one with a second run's."""
        walk = Walk(_given(case_run.reference))
        grids = tuple(grid for grid, _ in self._inputs(case_run))
        outputs = []
        for name, inputs in drawn:
            case = f"{case_run.case.name}, {name}"
            try:
                exact = walk.exact(inputs)
            except NoOracleError as error:
                raise StageError("NUM-03", Verdict.UNEXERCISED, f"no oracle: {error}") from error
            outputs.append(self._output(case_run, case, inputs))
            yield compare(
                Comparison(
                    case=case,
                    exact=exact,
                    output=outputs[-1],
                    int32_bias=self.capabilities.int32_bias,
                    float_accumulation=self.capabilities.float_accumulation,
                    input_grids=grids,
                )
            )
        name, inputs = drawn[0]
        again = compare_repeated(f"{case_run.case.name}, {name}", outputs[0], self._output(case_run, name, inputs))
        yield from [] if again is None else [again]

    def _output(self, case_run: CaseRun, case: str, inputs: tuple[Tensor, ...]) -> Any:
        """Run the lowered model on copies of the inputs; what it returns is copied, for it may be its own buffer."""
        lowered = _given(case_run.lowered)
        try:
            output = lowered(*(value.clone() for value in inputs))
        except Exception as error:
            raise _backend_error(f"running {case},", error) from error
        return output.detach().cpu().clone() if isinstance(output, Tensor) else output

    def _inputs(self, case_run: CaseRun) -> list[tuple[Grid, tuple[int, ...]]]:
        return list(zip(input_grids(_given(case_run.reference)), case_run.case.shapes, strict=True))

    def _flow(self, rule: str, step: Callable[[], GraphModule]) -> GraphModule:
        """Run a step of refimpl: what blames the config refutes the claim."""
        try:
            return step()
        except ConfigError as error:
            raise StageError(rule, Verdict.REFUTED, str(error)) from error


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


def _given(artefact: Any) -> Any:
    """Return an artefact that an earlier stage made."""
    assert artefact is not None, "a stage ran before the one that makes its input"
    return artefact


def _backend_error(where: str, error: Exception) -> StageError:
    """A fault in the backend's code refutes the claim: what the config claims, the backend must do."""
    text = "".join(traceback.format_exception(error)[-6:])
    return StageError("LOW-01", Verdict.REFUTED, f"{where} raised {type(error).__name__}: {error}", traceback=text)
