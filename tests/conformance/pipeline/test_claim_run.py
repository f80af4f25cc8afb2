"""The pipeline of a claim: order, skipping, seeds, and what becomes of every way in which a backend can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Execution, Representation, UnsupportedPattern
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.effort import PROFILES
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.machine.messages import Trace
from fx_quant_conformance.conformance.pipeline.claim_run import ENOUGH, ClaimRun, run_claim
from fx_quant_conformance.conformance.stages import fuse
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.config import plan_claim
from fx_quant_conformance.conformance.stages.state import RULES, stages_of
from fx_quant_conformance.refimpl import BackendPatternConfig, ConfigError, RefimplError
from fx_quant_conformance.reports.codec import PlainRow, encode
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.own_entries import claim_of
from tests.conformance.support.small_bench import ADD, CAT, Altered, claim_on, small_bench, small_claims, without_shares
from tests.mutants.integer_kernels import IntegerBackend
from tests.mutants.reference_run_faults import OneForAll

STAGES = stages_of(IntegerBackend())  # it gives no Quantizer


def two_cases(claim: Claim) -> tuple[Case, ...]:
    cases = plan_cases(claim, IntegerBackend().capabilities(), limit=2)
    assert not isinstance(cases, str)
    return cases


def rows(checks: dict[str, Check]) -> list[PlainRow]:
    return [encode(replace(check, seconds=0.0)) for check in checks.values()]


def all_stages(bench: Bench, claim: Claim) -> dict[str, Check]:
    return {check.stage: check for check in run_claim(bench, claim) if isinstance(check, Check)}


def taken(claim_run: ClaimRun) -> ClaimRun:
    """The work on a claim, once it is through all stages."""
    assert tuple(message.stage for message in claim_run.steps() if isinstance(message, Check)) == STAGES
    return claim_run


def run(claim: Claim | None = None, **methods: Callable[..., Any]) -> dict[str, Check]:
    return all_stages(small_bench(Altered(**methods)), claim or claim_on(ADD))


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "flow"), ((CAT, "ptq"), (ADD, "qat"), ("nn.Linear", "qat")))
def test_every_stage_of_an_honest_backend_passes_under_its_own_rule(pattern: str, flow: str) -> None:
    checks = run(claim_on(pattern, flow))
    assert tuple(checks) == STAGES
    assert [(c.outcome, c.verdict) for c in checks.values()] == [("pass", Verdict.VERIFIED)] * len(STAGES)
    assert all(check.rule == RULES[stage] for stage, check in checks.items() if stage != "numerics")
    assert checks["numerics"].rule == ("NUM-05" if pattern == CAT else "NUM-03")
    of_bias = 1 if pattern == "nn.Linear" else 0  # with an input more, at rest
    assert checks["config"].cases == 2 + of_bias and checks["numerics"].cases == 2 * 3 + of_bias * 4


def raises(error: Exception) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise type(error)(*error.args)

    return method


def running(result: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, example: result


REFUTED: dict[str, tuple[dict[str, Callable[..., Any]], str, str]] = {
    "lower raises": (
        {"lower": raises(RuntimeError("no such kernel"))},
        "lower",
        "lower raised RuntimeError: no such kernel",
    ),
    "lower declines": (
        {"lower": raises(UnsupportedPattern("add"))},
        "lower",
        "the backend declines what its config claims: add",
    ),
    "lower returns nothing": ({"lower": lambda *_: None}, "lower", "lower returned NoneType, which cannot be called"),
    "execution raises": ({"execution": raises(KeyError("op"))}, "execution", "execution raised KeyError: 'op'"),
    "running raises": ({"lower": running(raises(ValueError("bad shape")))}, "numerics", "raised ValueError: bad shape"),
    "running returns a list": (
        {"lower": running(lambda *x: list(x))},
        "numerics",
        "the output is a list; expected a tensor",
    ),
}


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("name", REFUTED)
def test_a_backend_that_fails_is_refuted_and_what_needs_its_artefact_is_not_reached(name: str) -> None:
    methods, stage, message = REFUTED[name]
    checks = run(claim_on(ADD), **methods)
    check = checks[stage]
    assert (check.outcome, check.verdict) == ("fail", Verdict.REFUTED)
    assert message in check.message
    assert check.evidence["where"].case
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]
    assert all(checks[each].outcome == "pass" for each in before)
    if stage == "numerics":  # the case can still be refused and repeated
        assert checks["refusal"].outcome == "pass"
        return
    for each in after:
        assert (checks[each].outcome, checks[each].verdict) == ("skip", Verdict.REFUTED)
        assert checks[each].message == f"not reached: {stage} ended the claim"
        assert checks[each].rule == RULES[each]


def test_a_refutation_carries_the_case_the_traceback_and_the_other_cases() -> None:
    evidence: Any = run(lower=raises(RuntimeError("no such kernel")))["lower"].evidence
    first, second = two_cases(claim_on(ADD))
    others = [f"{second.name}: lower raised RuntimeError: no such kernel"]
    assert (evidence["where"].case, evidence["others"]) == (first.name, others)
    assert "no such kernel" in str(evidence["traceback"])


def test_a_case_that_fails_drops_out_and_the_others_go_on() -> None:
    """The second case cannot be lowered: the stage fails, and the first one is judged all the same."""
    calls: list[int] = []
    honest = IntegerBackend()

    def lower(model: GraphModule, example: tuple[Any, ...]) -> Callable[..., Any]:
        calls.append(1)
        if len(calls) == 2:
            raise UnsupportedPattern("this shape")
        return honest.lower(model, example)

    claim = claim_on(ADD)
    checks = run(claim, lower=lower)
    assert [checks[stage].outcome for stage in STAGES] == ["pass"] * 4 + ["fail"] + ["pass"] * 4
    assert checks["lower"].evidence["where"].case == two_cases(claim)[1].name
    assert "others" not in checks["lower"].evidence
    assert (checks["execution"].cases, checks["numerics"].cases) == (1, 3)


def ran(*quantized: str, floats: tuple[str, ...] = ()) -> Callable[..., Any]:
    return lambda lowered: Execution(quantized_ops=quantized, float_fallbacks=floats, kernels=("sgemm",))


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize(
    ("execution", "message"),
    (
        (ran("add", floats=("add_1: no kernel",)), "runs in float: add_1: no kernel"),
        (ran(), "the backend shows no quantized op that ran"),
    ),
)
def test_a_float_fallback_does_not_end_the_claim(execution: Callable[..., Any], message: str) -> None:
    checks = run(execution=execution)
    shown = checks["execution"]
    assert (shown.outcome, shown.verdict, shown.message) == ("fail", Verdict.FALLBACK, message)
    assert shown.evidence["kernels"] == ["sgemm"], "a reviewer sees what ran instead"
    assert (checks["numerics"].verdict, checks["numerics"].cases) == (Verdict.VERIFIED, 6)


class Refusing(IntegerBackend):
    """The honest integer backend, which lowers only the first models that it gets."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self.taken, self.asked = taken, 0

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        self.asked += 1
        if self.asked > self.taken:
            raise RuntimeError("no kernel")
        return super().lower(reference_model, example_inputs)


def cases_of(claim: Claim) -> int:
    cases = plan_cases(claim, IntegerBackend().capabilities())
    assert not isinstance(cases, str) and len(cases) > ENOUGH + 1
    return len(cases)


@pytest.mark.rule("LOW-01")
def test_what_runs_in_no_case_is_not_tried_in_all_of_them() -> None:
    backend = Refusing(taken=0)
    check = all_stages(Bench(backend, seed=0, profile="full"), claim_on(ADD))["lower"]
    assert backend.asked == ENOUGH and check.verdict is Verdict.REFUTED
    assert (check.failing, check.cases) == (ENOUGH, ENOUGH)
    evidence: Any = check.evidence
    assert evidence["cases not tried"] == cases_of(claim_on(ADD)) - ENOUGH


@pytest.mark.slow
@pytest.mark.rule("LOW-01")
def test_what_runs_in_one_case_is_tried_in_all_of_them() -> None:
    backend = Refusing(taken=1)
    check = all_stages(Bench(backend, seed=0, profile="full"), claim_on(ADD))["lower"]
    assert backend.asked == cases_of(claim_on(ADD)), "once for each: invariance runs again what numerics has run"
    assert check.verdict is Verdict.REFUTED and "cases not tried" not in check.evidence


@pytest.mark.slow
@pytest.mark.rule("NUM-07")
def test_some_case_of_each_rank_is_kept_for_other_layouts() -> None:
    claim = claim_on(CAT)
    claim_run = taken(ClaimRun(Bench(Altered(), seed=0, profile="full"), claim))
    cases = plan_cases(claim, IntegerBackend().capabilities())
    assert not isinstance(cases, str)
    kept = [state.case for state in claim_run.state.rerun_cases]
    assert len(kept) < len(cases)
    assert {len(case.inputs[0].shape) for case in kept} == {len(case.inputs[0].shape) for case in cases}


@pytest.mark.rule("NUM-07")
@pytest.mark.parametrize(
    ("pattern", "is_latest"),
    [
        ("nn.Conv2d+nn.BatchNorm2d", False),
        ("nn.Hardswish", True),
        ("torch.cat", False),
        ("torch.cat", True),
        ("nn.LSTMCell", True),
    ],
)
def test_models_of_one_structure_are_kept_apart(pattern: str, is_latest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single case shows a compiler's cache that knows the structure alone, and a kernel that has the latest model."""
    bench = Bench(OneForAll(is_latest=is_latest), seed=0, profile="quick")
    claim = next(each for each in enumerate_claims(bench.config, bench.capabilities) if each.pattern == pattern)
    monkeypatch.setattr(
        "fx_quant_conformance.conformance.stages.config.plan_claim", lambda bench, claim: plan_claim(bench, claim)[:1]
    )
    check = next(each for each in run_claim(bench, claim) if isinstance(each, Check) and each.stage == "invariance")
    assert (check.rule, check.verdict) == ("NUM-07", Verdict.REFUTED)
    assert "two models of one structure are not kept apart" in check.message


@pytest.mark.rule("LOW-01")
@pytest.mark.rule("NUM-07")
def test_a_second_model_that_raises_is_found_also_where_nobody_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, lowered = IntegerBackend(), list[Any]()

    def lower(model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        lowered.append(honest.lower(model, example_inputs))
        return raises(RuntimeError("the cache holds another model")) if len(lowered) > 1 else lowered[0]

    monkeypatch.setattr(
        "fx_quant_conformance.conformance.stages.config.plan_claim", lambda bench, claim: plan_claim(bench, claim)[:1]
    )
    checks = run(lower=lower, execution=lambda lowered: None)
    assert checks["execution"].verdict is Verdict.UNSHOWN
    assert (checks["invariance"].rule, checks["invariance"].verdict) == ("LOW-01", Verdict.REFUTED)
    assert "of another model" in checks["invariance"].message


@pytest.mark.rule("LOW-04")
def test_a_backend_that_shows_what_ran_passes_and_one_that_cannot_tell_does_not() -> None:
    assert run(execution=ran("add (quantized::add)"))["execution"].verdict is Verdict.VERIFIED
    assert run(execution=lambda lowered: None)["execution"].verdict is Verdict.UNSHOWN


class VendorOp(nn.Module):
    """A module of which there are no samples."""


def test_what_cannot_be_built_is_unexercised_with_the_reason_at_every_stage() -> None:
    checks = all_stages(small_bench(), claim_of(BackendPatternConfig((nn.ReLU, VendorOp))))
    assert {(check.outcome, check.verdict) for check in checks.values()} == {("skip", Verdict.UNEXERCISED)}
    assert all("VendorOp after nn.ReLU" in check.message for check in checks.values())


def test_a_fault_of_the_suite_ends_the_claim_once_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "trace_and_fuse", raises(RuntimeError("a bug")))
    bench, claim = small_bench(), claim_on(ADD)
    checks = all_stages(bench, claim)
    assert (checks["config"].outcome, checks["fuse"].outcome) == ("pass", "error")
    assert checks["fuse"].message == "internal error of the suite: RuntimeError: a bug"
    assert "a bug" in str(checks["fuse"].evidence["traceback"])
    for stage in STAGES[2:]:
        check = checks[stage]
        assert (check.outcome, check.verdict) == ("skip", Verdict.UNEXERCISED)
        assert check.message == "not reached: fuse ended the claim"
    monkeypatch.undo()
    assert all_stages(bench, claim)["numerics"].verdict is Verdict.VERIFIED


@pytest.mark.parametrize(
    ("error", "verdict"), ((ConfigError("bad"), Verdict.REFUTED), (RefimplError("open"), Verdict.UNEXERCISED)), ids=str
)
def test_what_blames_the_config_refutes_and_what_blames_the_qconfig_leaves_open(
    error: Exception, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "trace_and_fuse", raises(error))
    check = all_stages(small_bench(), claim_on(ADD))["fuse"]
    assert (check.rule, check.verdict, check.message) == ("FUS-02", verdict, str(error))


@pytest.mark.slow
def test_the_order_of_claims_changes_no_row_and_the_seed_does() -> None:
    chosen = [claim_on(pattern) for pattern in (ADD, "nn.Linear", "torch.conv2d")]
    shuffled = random.Random(1).sample(chosen, len(chosen))

    def rows_by_claim(order: list[Claim], seed: int) -> dict[str, list[PlainRow]]:
        bench = small_bench(seed=seed)
        return {claim.id: rows(all_stages(bench, claim)) for claim in order}

    first = rows_by_claim(chosen, 3)
    assert first == rows_by_claim(shuffled, 3)
    other = rows_by_claim(chosen, 4)
    assert sum(first[claim.id] != other[claim.id] for claim in chosen) >= 2


def test_every_name_has_a_seed_of_its_own_and_every_run_has_others() -> None:
    names = [(claim.id, stage) for claim in small_claims().values() for stage in STAGES]
    seeds = {small_bench().seed_for(*name) for name in names}
    assert len(seeds) == len(names)
    assert not seeds & {small_bench(seed=1).seed_for(*name) for name in names}
    assert small_bench().seed_for(*names[0]) == small_bench().seed_for(*names[0])


@pytest.mark.slow
def test_a_backend_that_draws_random_numbers_does_not_change_its_inputs() -> None:
    class Drawing(IntegerBackend):
        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
            lowered = super().lower(reference_model, example_inputs)

            def call(*inputs: Any) -> Any:
                torch.rand(7)
                return lowered(*inputs)

            return call

    claim = claim_on(ADD)
    assert rows(all_stages(small_bench(Drawing()), claim)) == rows(run(claim))


def test_a_backend_that_writes_to_its_inputs_is_refuted_for_that_alone() -> None:
    class Careless(IntegerBackend):
        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
            lowered = super().lower(reference_model, example_inputs)

            def call(*inputs: Tensor) -> Any:
                result = lowered(*inputs)
                for value in inputs:
                    value.zero_()
                return result

            return call

    checks = all_stages(small_bench(Careless()), claim_on(ADD))
    invariance = checks.pop("invariance")
    assert {check.verdict for check in checks.values()} == {Verdict.VERIFIED}
    assert invariance.verdict is Verdict.REFUTED
    evidence: Any = invariance.evidence
    assert all("the inputs were written to" in each for each in [invariance.message, *evidence.get("others", ())])


@pytest.mark.slow
def test_each_representation_is_lowered_in_its_form() -> None:
    seen = dict[Representation, GraphModule]()

    for representation in (Representation.QUANTIZED, Representation.DECOMPOSED):

        def lower(model: GraphModule, example: tuple[Any, ...], form: Representation = representation) -> GraphModule:
            seen[form] = model
            return model

        backend = Altered(lower=lower)
        backend.representation = representation
        assert all_stages(small_bench(backend), claim_on(CAT))["numerics"].verdict is Verdict.VERIFIED
    assert "torch.quantize_per_tensor" in seen[Representation.QUANTIZED].code
    assert "quantized_decomposed.quantize_per_tensor" in seen[Representation.DECOMPOSED].code


def trace_of(bench: Bench, claim: Claim) -> Trace:
    """What is shown of a claim beside its checks."""
    (trace,) = (message for message in run_claim(bench, claim) if isinstance(message, Trace))
    return trace


@pytest.mark.slow
def test_decisions_are_those_of_the_claim_that_was_prepared() -> None:
    bench = small_bench()
    claim_run = ClaimRun(bench, claim_on(ADD))
    assert claim_run.decisions() == []
    assert [row["pattern"] for row in taken(claim_run).decisions()] == [ADD]
    assert trace_of(bench, claim_on(ADD)).decisions == claim_run.decisions()
    assert ClaimRun(bench, claim_on(CAT)).decisions() == []
    assert trace_of(bench, claim_of(BackendPatternConfig(VendorOp))).decisions == []


@pytest.mark.slow
@pytest.mark.parametrize(("maximum", "inputs"), ((None, 3), (0, 9), (2, 11)))
def test_a_profile_and_an_option_set_how_many_cases_and_inputs_are_tried(maximum: int | None, inputs: int) -> None:
    claim, effort = claim_on(ADD), PROFILES["quick"]
    cases = plan_cases(claim, IntegerBackend().capabilities(), limit=effort.cases)
    assert len(cases) == effort.cases == 9 and not isinstance(cases, str)
    bench = without_shares(Bench(Altered(), seed=0, profile="quick", max_examples=maximum))
    checks = {each.stage: each for each in run_claim(bench, claim) if isinstance(each, Check)}
    assert checks["config"].cases == len(cases)
    tied = sum(case.value_range.has_ties for case in cases)  # these have one more
    assert checks["numerics"].cases == len(cases) * inputs + tied


def test_an_unknown_profile_is_an_error() -> None:
    with pytest.raises(KeyError, match="unknown"):
        Bench(Altered(), seed=0, profile="unknown")
