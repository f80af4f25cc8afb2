"""The pipeline of one claim: model → fuse → prepare → convert → lower → run, each stage a check.

Every case of a claim (models.py) is taken through the flow, one after the other; claim_run.py has what is found. The
stages that look at the claim as a whole come before (config) and after (refusal, invariance).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from backends.base import Backend, Representation, UnsupportedPattern
from conformance.claims.build import build_model
from conformance.claims.claim import Claim, enumerate_claims
from conformance.claims.inputs import AIMS, Batch, calibration_inputs, float_inputs, static_inputs
from conformance.claims.plan import plan_cases
from conformance.claims.qconfigs import INTEGERS, Kind, dynamic_range, kind_of
from conformance.claims.quick import Turn, turns
from conformance.oracle.evaluate import Walk
from conformance.oracle.grids import NoOracleError, placeholder_grids
from conformance.pipeline.claim_run import At, CaseRun, ClaimRun, failed, internal_error, passed, skipped
from conformance.pipeline.graph_text import FUSES_NOTHING, graphs_of
from conformance.stages import ranges, structure
from conformance.stages.backend_calls import StageError, backend_error, run_lowered, told_again
from conformance.stages.check import Check, Problem
from conformance.stages.config import lint
from conformance.stages.invariance import check_invariance, judge_invariance
from conformance.stages.nonfinite import nonfinite_rows
from conformance.stages.numerics import Finding, compare_all, failure
from conformance.stages.prepare import keeps_statistics, own_modules, prepare_case
from conformance.stages.refusal import check_refusal
from conformance.stages.reruns import THREADS
from refimpl import (
    BackendConfig,
    ConfigError,
    RefimplError,
    convert_to_reference_decomposed_fx,
    explain,
)
from refimpl.backend_config import as_backend_config
from refimpl.convert import convert_to_bounded_reference_fx
from refimpl.fuse import fused_model
from reports.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a profile tries: cases of each op (None: all variants of each claim), aimed and random inputs of a case.

    ``aims`` are those of the claim's first case; ``further`` those of all others, which are about arguments more than
    about values. ``every``: each so-manieth case is run again under the changes that may make no difference.
    ``graphs``: how many graphs a fuzz job draws; 0: there are no such jobs.
    """

    cases: int | None
    aims: int
    further: int
    random: int
    every: int = 1
    graphs: int = 0


PROFILES: dict[str, Effort] = {
    "quick": Effort(cases=8, aims=3, further=3, random=0, every=3),
    "full": Effort(cases=None, aims=len(AIMS), further=5, random=1, every=3),
    "stress": Effort(cases=None, aims=len(AIMS), further=len(AIMS), random=24, graphs=200),
}


_IN_FLOAT: dict[str, Any] = {
    "float_accumulation": True, "dynamic_states": False, "half_row_qparams": False
}  # fmt: skip


class Workbench:
    """Runs claims for one backend; holds the artefacts of the claim that it works on.

    ``spec``: what the command line calls the backend. ``repro``: the command that runs a claim or job again, by its ID.
    ``waived``: the IDs of claims that waivers cover.
    """

    def __init__(
        self, backend: Backend, *, seed: int, profile: str, max_examples: int | None = None, spec: str = "",
        repro: Callable[[str], str] = str, waived: Collection[str] = (),
    ) -> None:  # fmt: skip
        torch.set_num_threads(1)  # cases are tiny: threads cost more than they give, and workers share the cores
        self.backend = backend
        self.spec = spec or backend.name
        self.repro = repro
        self.waived = frozenset(waived)
        self.seed = seed
        self.profile = profile
        effort = PROFILES[profile]
        if max_examples is not None:
            effort = replace(effort, aims=len(AIMS), further=len(AIMS), random=max_examples, graphs=max_examples)
        self.effort = effort
        self.capabilities = backend.capabilities()
        self.config: BackendConfig = as_backend_config(backend.backend_config())
        self._run: ClaimRun | None = None
        self._stages: dict[str, Callable[[ClaimRun, CaseRun], None]] = {
            "fuse": self._fuse,
            "prepare": self._prepare,
            "convert": self._convert,
            "lower": self._lower,
            "execution": self._execution,
            "numerics": self._numerics,
        }

    @cached_property
    def _turns(self) -> dict[str, Turn]:
        return turns(enumerate_claims(self.config, self.capabilities))

    def run(self, claim: Claim) -> Iterator[Check]:
        """Take a claim through all stages; yield a check for each, in order. Never raises for a backend's fault.

        What fails in the suite itself is a check too (outcome "error", UNEXERCISED), and ends the claim.
        """
        return (step for step in self.steps(claim) if isinstance(step, Check))

    def steps(self, claim: Claim) -> Iterator[Check | At]:
        """Take a claim through all stages: each check, and before it where the backend's code is about to run."""
        run = self._run = ClaimRun(claim=claim, every=self.effort.every)
        yield self._whole(run, "config", self._config)
        for case in run.planned:
            yield from self._take(run, CaseRun(case=case))
            if run.is_over:
                break
        for stage in self._stages:
            yield run.concluded(stage)
        yield At(stage="refusal")
        yield self._whole(run, "refusal", self._refusal)
        yield At(stage="invariance")
        yield self._whole(run, "invariance", self._invariance)

    def decisions(self, claim: Claim) -> list[dict[str, object]]:
        """Return the decision log of the claim's first case, or nothing if it was not prepared."""
        run = self._run
        if run is None or run.claim.id != claim.id or run.prepared is None:
            return []
        return [dict(row) for row in explain(run.prepared).rows()]

    def rebuilt(self, claim: Claim, label: str) -> CaseRun:
        """Take the case whose name a label begins with (else the first) to its reference model and inputs again.

        Raises StageError for what the flow refuses.
        """
        run = ClaimRun(claim=claim, every=1)
        self._config(run)
        named = sorted(run.planned, key=lambda case: len(case.name) if label.startswith(case.name) else 0)
        case_run = CaseRun(case=named[-1] if label.startswith(named[-1].name) else run.planned[0])
        for stage in ("fuse", "prepare", "convert"):
            torch.default_generator.manual_seed(self.seed_for(claim.id, stage, case_run.case.name))
            self._stages[stage](run, case_run)
        return case_run

    def graphs(self, claim: Claim) -> dict[str, str]:
        """Return the graphs of the claim's first faulty case (or first of all) before and after, as far as it came."""
        run = self._run
        if run is None or run.claim.id != claim.id:
            return {}
        shown = run.faulty or next(iter(run.kept), None)
        return {} if shown is None else graphs_of(run.claim, shown)

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
        return (convert_to_bounded_reference_fx if is_quantized else convert_to_reference_decomposed_fx)(prepared)

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

    def _whole(self, run: ClaimRun, stage: str, work: Callable[[ClaimRun], Check]) -> Check:
        """Do a stage that looks at the claim as a whole."""
        started = time.perf_counter()
        if run.ended is not None:
            return skipped(stage, run.ended)
        torch.default_generator.manual_seed(self.seed_for(run.claim.id, stage))
        try:
            check = work(run)
        except StageError as error:
            check = failed(stage, error)
        except Exception as error:
            check = internal_error(stage, error)
        if check.outcome == "error" or not run.planned:
            run.ended = check
        return replace(check, seconds=time.perf_counter() - started)

    def _take(self, run: ClaimRun, case_run: CaseRun) -> Iterator[At]:
        """Take one case through the stages, as far as it goes."""
        for stage, work in self._stages.items():
            yield At(stage=stage, case=case_run.case.name)
            torch.default_generator.manual_seed(self.seed_for(run.claim.id, stage, case_run.case.name))
            if not run.tried(stage, case_run, work):
                return
        run.keep(case_run)

    # -- stages ------------------------------------------------------------------------------------------------------

    def _config(self, run: ClaimRun) -> Check:
        problem = lint(run.claim, self.config)
        if problem is not None:
            raise StageError(problem.rule, problem.verdict, problem.message)
        turn = self._turns.get(run.claim.id, Turn()) if self.effort.cases is not None else Turn()
        cases = plan_cases(
            run.claim, self.capabilities, limit=self.effort.cases, turn=turn, has_prelude=self._has_prelude(run.claim)
        )
        if isinstance(cases, str):
            raise StageError("CFG-09", Verdict.UNEXERCISED, cases)
        run.planned = cases
        return passed("config", len(cases))

    def _has_prelude(self, claim: Claim) -> bool:
        """Tell whether an identity before the pattern is quantized too, and so can widen what the pattern is given."""
        dtypes = [each.input_dtype for entry in self.config.configs if entry.normal_pattern is nn.Identity
                  for each in entry.dtype_configs]  # fmt: skip
        return claim.dtypes.input_dtype in dtypes

    def _fuse(self, run: ClaimRun, case_run: CaseRun) -> None:
        """Build the model. What is fused is tried in each variant; what is not, in one."""
        model = case_run.model = build_model(case_run.case)
        done = ("fuse", case_run.case.variant if run.claim.entry.fuser_method is not None else "")
        if done in run.held:
            return
        fuse = partial(fused_model, model, leaves=own_modules(run.claim))
        fused = self._flow("FUS-02", lambda: fuse(self.config))
        problem = structure.check_fused(run.claim, fused, lambda: fuse(FUSES_NOTHING))
        if problem is None:
            problem = structure.check_fused_meaning(model, fused, calibration_inputs(case_run.case)[0])
        _raise(problem, fused)
        run.held.add(done)

    def _prepare(self, run: ClaimRun, case_run: CaseRun) -> None:
        found: list[Problem | None] = []

        def untrained(prepared: GraphModule) -> None:
            """Of what training changes by statistics alone, only now can anybody tell what it computes."""
            done = ("trained", case_run.case.variant)
            if done not in run.held and keeps_statistics(prepared):
                inputs = calibration_inputs(case_run.case)[0]
                found.append(structure.check_trained_meaning(case_run.model, prepared, inputs))
                run.held |= {done} if found == [None] else set()

        def calibrated(prepared: GraphModule, batches: tuple[Batch, ...]) -> None:
            """Later the ranges are those of the regime."""
            done = ("ranges", case_run.case.variant)
            if run.claim.flow == "ptq" and done not in run.held:
                with contextlib.suppress(RefimplError):  # which the next stage finds as well
                    case_run.misfit = ranges.check_ranges(self.convert(prepared), batches)
                run.held |= set() if case_run.misfit else {done}

        asked = (run.claim, case_run.case, case_run.model, self.config, untrained, calibrated)
        case_run.prepared = self._flow("OBS-15", lambda: prepare_case(*asked))
        for problem in found:
            _raise(problem, case_run.prepared)
        run.prepared = run.prepared or case_run.prepared
        _raise(structure.check_prepared(run.claim, case_run.prepared), case_run.prepared)

    def _convert(self, run: ClaimRun, case_run: CaseRun) -> None:
        reference = case_run.reference = self._flow("CVT-01", lambda: self.convert(case_run.prepared))
        _raise(structure.check_reference(run.claim, reference), reference)
        case_run.grids = placeholder_grids(reference)
        torch.default_generator.manual_seed(self.seed_for(run.claim.id, "inputs", case_run.case.name))
        case_run.drawn = self._draw(run, case_run)
        done = ("meaning", case_run.case.variant)
        if done not in run.held:
            meant = (
                case_run.prepared if run.claim.flow == "qat" and keeps_statistics(case_run.prepared) else case_run.model
            )
            _raise(structure.check_meaning(meant, reference, case_run.drawn[0][1]), reference)
            run.held.add(done)
        _raise(case_run.misfit, reference)

    def _draw(self, run: ClaimRun, case_run: CaseRun) -> list[tuple[str, Batch]]:
        """Inputs of a case, each set with its name; neither the flow nor a backend moves what is drawn."""
        effort = self.effort
        if kind_of(run.claim.dtypes) in INTEGERS:
            aims = effort.aims if case_run.case is run.planned[0] else effort.further
            return static_inputs(case_run.case, case_run.grids, aims=aims, random=effort.random)
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
        floats = list(execution.float_fallbacks)
        case_run.runs_in_float = bool(floats) or not execution.quantized_ops
        if case_run.runs_in_float:
            text = f"runs in float: {'; '.join(floats)}" if floats else "the backend shows no quantized op that ran"
            ran = {"float_ops": floats, "kernels": list(execution.kernels)}
            raise StageError("LOW-04", Verdict.FALLBACK, text, **{name: ops for name, ops in ran.items() if ops})

    def _numerics(self, run: ClaimRun, case_run: CaseRun) -> None:
        """Compare the outputs for all inputs with the oracle; what runs in float, as the reference model says it."""
        capabilities = replace(self.capabilities, **_IN_FLOAT) if case_run.runs_in_float else self.capabilities
        walk = Walk(case_run.reference, capabilities, dynamic_range=dynamic_range(run.claim))
        for name, inputs in case_run.drawn:
            case = f"{case_run.case.name}, {name}"
            try:
                exacts = walk.exact(inputs)
            except NoOracleError as error:
                raise StageError("NUM-03", Verdict.UNEXERCISED, f"no oracle: {error}") from error
            try:
                output = run_lowered(case_run.lowered, case, inputs)
            except StageError as error:
                anew = partial(self.lower, case_run.reference, inputs)
                again = told_again(anew, case, inputs)
                evidence = error.evidence if again == str(error) else {**error.evidence, "nondeterministic": True}
                run.findings.append(failure(case, error.rule, str(error), evidence))
                return  # what raises for one input is not run on the others
            if case_run.exact_of is None:
                case_run.exact_of, case_run.first = walk.exact, output
            run.findings += compare_all(case, exacts, output, tuple(case_run.grids))

    def _refusal(self, run: ClaimRun) -> Check:
        case_run = run.kept[0]
        problem, tried = check_refusal(run.claim, case_run.case, case_run.model, self.config)
        _raise(problem, case_run.prepared)
        return passed("refusal", tried)

    def _invariance(self, run: ClaimRun) -> Check:
        findings: list[Finding] = []
        ran = [each for each in run.kept if each.exact_of is not None]  # of the others, numerics tells
        if not ran:
            raise StageError("NUM-07", Verdict.UNEXERCISED, "no case gave an output that could be compared")
        # A small case is not shared out, and threads cost more than all else where workers share the cores.
        threaded = (*ran[:1], *sorted(ran[1:], key=lambda each: each.size)[-1:])
        for case_run in ran:
            sums_floats = case_run.runs_in_float or kind_of(run.claim.dtypes) is Kind.FLOAT16
            capabilities = replace(self.capabilities, float_accumulation=True) if sums_floats else self.capabilities
            findings += check_invariance(
                case_run.case,
                case_run.drawn,
                case_run.lowered,
                capabilities,
                left_out=() if case_run in threaded and self.profile != "quick" else {THREADS},
                exact_of=case_run.exact_of,
                first=case_run.first,
            )
        if self.profile != "quick" and run.kept:
            first = run.kept[0]
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


def _raise(problem: Problem | None, model: GraphModule) -> None:
    if problem is not None:
        raise StageError(problem.rule, problem.verdict, problem.message, graph=model.code)
