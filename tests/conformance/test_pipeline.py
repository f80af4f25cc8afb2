"""The pipeline of a claim: order, skipping, seeds, and what becomes of every way in which a backend can fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from integer_kernels import IntegerBackend
from torch import nn
from torch.fx import GraphModule

from backends.base import Capabilities, Execution, Representation, UnsupportedPattern
from conformance import pipeline
from conformance.checks import Check
from conformance.claims import Claim, enumerate_claims
from conformance.pipeline import RULES, STAGES, Workbench
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from reports.results import Verdict

U8 = DTypeConfig(torch.quint8, torch.quint8)
Row = dict[str, object]


class Altered(IntegerBackend):
    """The honest integer backend, with single methods replaced."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        super().__init__()
        for name, method in methods.items():
            setattr(self, name, method)


def bench(backend: IntegerBackend | None = None, seed: int = 0) -> Workbench:
    return Workbench(backend or Altered(), seed=seed, profile="quick", max_examples=None)


@cache
def small_claims() -> dict[str, Claim]:
    backend = IntegerBackend()
    return {claim.id: claim for claim in enumerate_claims(backend.backend_config(), backend.capabilities())}


def claim_on(pattern: str, flow: str = "ptq", dtype: str = "static:in=quint8") -> Claim:
    found = small_claims().values()
    return next(c for c in found if c.pattern == pattern and c.flow == flow and c.dtype_config.startswith(dtype))


ADD, CAT = "operator.add", "torch.cat"


def rows(checks: dict[str, Check]) -> list[Row]:
    return [check.row("claim", 0) for check in checks.values()]


def all_stages(workbench: Workbench, claim: Claim) -> dict[str, Check]:
    return {stage: workbench.check(claim, stage) for stage in STAGES}


def run(claim: Claim | None = None, **methods: Callable[..., Any]) -> dict[str, Check]:
    return all_stages(bench(Altered(**methods)), claim or claim_on(ADD))


def test_every_stage_of_an_honest_backend_passes_under_its_own_rule() -> None:
    checks = run()
    assert tuple(checks) == STAGES == tuple(RULES)
    assert all((c.stage, c.rule, c.outcome, c.verdict) == (stage, RULES[stage], "pass", Verdict.VERIFIED)
               for stage, c in checks.items())  # fmt: skip
    assert (checks["config"].cases, checks["numerics"].cases) == (5, 25)


def raises(error: Exception) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise type(error)(*error.args)

    return method


def running(result: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, example: result


REFUTED: dict[str, tuple[dict[str, Callable[..., Any]], str, str]] = {
    "lower raises": ({"lower": raises(RuntimeError("no such kernel"))}, "lower",
                     "lower raised RuntimeError: no such kernel"),
    "lower declines": ({"lower": raises(UnsupportedPattern("add"))}, "lower",
                       "the backend declines what its config claims: add"),
    "lower returns nothing": ({"lower": lambda *_: None}, "lower",
                              "lower returned NoneType, which cannot be called"),
    "lower gives an assertion": ({"lower": raises(AssertionError("x"))}, "lower", "lower raised AssertionError: x"),
    "execution raises": ({"execution": raises(KeyError("op"))}, "execution", "execution raised KeyError: 'op'"),
    "running raises": ({"lower": running(raises(ValueError("bad shape")))}, "numerics",
                       "raised ValueError: bad shape"),
    "running returns a list": ({"lower": running(lambda *x: list(x))}, "numerics", "the output is a list"),
    "running returns nothing": ({"lower": running(lambda *x: None)}, "numerics", "the output is a NoneType"),
}  # fmt: skip


@pytest.mark.rule("LOW-01")
@pytest.mark.parametrize("name", REFUTED)
def test_a_backend_that_fails_is_refuted_and_nothing_after_it_is_reached(name: str) -> None:
    methods, stage, message = REFUTED[name]
    checks = run(claim_on(ADD), **methods)
    check = checks[stage]
    assert (check.outcome, check.verdict) == ("fail", Verdict.REFUTED)
    assert message in check.message
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]
    assert all(checks[each].outcome == "pass" for each in before)
    for each in after:
        assert (checks[each].outcome, checks[each].verdict) == ("skip", Verdict.REFUTED)
        assert checks[each].message == f"not reached: {stage} ended the claim"
        assert checks[each].rule == RULES[each]


def test_a_refutation_carries_the_case_and_the_traceback() -> None:
    evidence = run(lower=raises(RuntimeError("no such kernel")))["lower"].evidence
    assert evidence["case"] == "65"
    assert "no such kernel" in str(evidence["traceback"])


def ran(*quantized: str, floats: tuple[str, ...] = ()) -> Callable[..., Any]:
    return lambda lowered: Execution(quantized_ops=quantized, float_fallbacks=floats)


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize(
    ("execution", "message"),
    ((ran("add", floats=("add_1: no kernel",)), "runs in float: add_1: no kernel"),
     (ran(), "the backend shows no quantized op that ran")),
)  # fmt: skip
def test_a_float_fallback_does_not_end_the_claim(execution: Callable[..., Any], message: str) -> None:
    checks = run(execution=execution)
    shown = checks["execution"]
    assert (shown.outcome, shown.verdict, shown.message) == ("fail", Verdict.FALLBACK, message)
    assert checks["numerics"].verdict is Verdict.VERIFIED


@pytest.mark.rule("LOW-04")
def test_a_backend_that_shows_what_ran_or_cannot_tell_passes() -> None:
    for execution in (ran("quantized::add"), lambda lowered: None):
        assert run(execution=execution)["execution"].verdict is Verdict.VERIFIED


def unexercised(claim: Claim, workbench: Workbench | None = None) -> list[tuple[str, str]]:
    checks = all_stages(workbench or bench(), claim)
    skipped = [check for check in checks.values() if check.outcome == "skip"]
    assert {check.verdict for check in skipped} == {Verdict.UNEXERCISED}
    assert checks["numerics"] in skipped
    return [(check.stage, check.message) for check in skipped]


def custom(entry: BackendPatternConfig) -> Claim:
    config = BackendConfig("vendor").set_backend_pattern_config(entry.set_dtype_configs([U8]))
    return enumerate_claims(config, Capabilities())[0]


class VendorOp(nn.Module):
    """A module that no recipe knows."""


@pytest.mark.parametrize(
    ("claim", "reason"),
    (
        (custom(BackendPatternConfig(VendorOp)), "no recipe for "),
        (custom(BackendPatternConfig((nn.ReLU, VendorOp))), "VendorOp after nn.ReLU"),
        (custom(BackendPatternConfig()._set_pattern_complex_format((torch.add, nn.ReLU, nn.ReLU))), "not a chain"),
        (claim_on("nn.Linear", flow="qat"), "quantization-aware training is not exercised yet"),
        (claim_on("nn.Linear", dtype="dynamic:in=quint8"), "dynamic quantization is not exercised yet"),
    ),
    ids=lambda value: getattr(value, "id", None),
)
def test_what_cannot_be_built_is_unexercised_with_the_reason_at_every_stage(claim: Claim, reason: str) -> None:
    told = unexercised(claim)
    assert [stage for stage, _ in told] == list(STAGES)
    assert all(reason in message for _, message in told)


def test_a_fault_of_the_suite_is_raised_once_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "fuse_fx", raises(RuntimeError("a bug")))
    workbench, claim = bench(), claim_on(ADD)
    assert workbench.check(claim, "config").outcome == "pass"
    with pytest.raises(RuntimeError, match="a bug"):
        workbench.check(claim, "fuse")
    for stage in STAGES[2:]:
        check = workbench.check(claim, stage)
        assert (check.outcome, check.verdict) == ("skip", Verdict.UNEXERCISED)
        assert check.message == "not reached: fuse ended the claim"
    monkeypatch.undo()
    assert all_stages(workbench, claim)["numerics"].verdict is Verdict.VERIFIED


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_alone_says_what_it_says_in_a_whole_run(stage: str) -> None:
    for pattern, backend in ((ADD, Altered()), (CAT, Altered(lower=raises(RuntimeError("x"))))):
        claim = claim_on(pattern)
        together = all_stages(bench(backend), claim)
        assert rows({stage: bench(backend).check(claim, stage)}) == rows({stage: together[stage]})


def test_stages_may_be_left_out_and_run_again() -> None:
    claim, workbench = claim_on(ADD), bench()
    whole = all_stages(bench(), claim)
    for stage in ("config", "numerics", "fuse", "fuse", "lower", "numerics"):
        assert rows({stage: workbench.check(claim, stage)}) == rows({stage: whole[stage]})


def test_the_order_of_claims_changes_no_row_and_the_seed_does() -> None:
    chosen = [claim_on(pattern) for pattern in (ADD, CAT, "nn.Linear", "torch.conv2d", "nn.Linear+nn.ReLU")]
    shuffled = random.Random(1).sample(chosen, len(chosen))

    def taken(order: list[Claim], seed: int) -> dict[str, list[Row]]:
        workbench = bench(seed=seed)
        return {claim.id: rows(all_stages(workbench, claim)) for claim in order}

    first = taken(chosen, 3)
    assert first == taken(shuffled, 3)
    other = taken(chosen, 4)
    assert sum(first[claim.id] != other[claim.id] for claim in chosen) >= 3


def test_every_claim_and_stage_has_a_seed_of_its_own() -> None:
    workbench = bench()
    seeds = {workbench._seed(claim, stage) for claim in small_claims().values() for stage in STAGES}
    assert len(seeds) == len(small_claims()) * len(STAGES)


def test_a_backend_that_draws_random_numbers_does_not_change_its_inputs() -> None:
    class Drawing(IntegerBackend):
        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
            lowered = super().lower(reference_model, example_inputs)

            def call(*inputs: Any) -> Any:
                torch.rand(7)
                return lowered(*inputs)

            return call

    claim = claim_on(ADD)
    assert rows(all_stages(bench(Drawing()), claim)) == rows(run(claim))


def test_a_backend_that_changes_its_arguments_or_returns_its_own_buffer_is_taken_as_it_is() -> None:
    class Careless(IntegerBackend):
        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
            lowered = super().lower(reference_model, example_inputs)
            buffer: list[torch.Tensor] = []

            def call(*inputs: torch.Tensor) -> torch.Tensor:
                result = lowered(*inputs)
                buffer[:] = buffer or [result.clone()]
                buffer[0].copy_(result)
                for value in inputs:
                    value.zero_()
                return buffer[0]

            return call

    assert all_stages(bench(Careless()), claim_on(ADD))["numerics"].verdict is Verdict.VERIFIED


def test_both_representations_are_lowered_in_their_form() -> None:
    seen: list[str] = []

    def lower(model: GraphModule, example: tuple[Any, ...]) -> GraphModule:
        seen.append(model.code)
        return model

    for representation in Representation:
        backend = Altered(lower=lower)
        backend.representation = representation
        assert bench(backend).check(claim_on(CAT), "numerics").verdict is Verdict.VERIFIED
    assert "torch.quantize_per_tensor" in seen[0]
    assert "quantized_decomposed.quantize_per_tensor" in seen[-1]


def test_decisions_are_those_of_the_claim_that_was_prepared() -> None:
    workbench, claim = bench(), claim_on(ADD)
    assert workbench.decisions(claim) == []
    workbench.check(claim, "prepare")
    assert [row["pattern"] for row in workbench.decisions(claim)] == [ADD]
    assert workbench.decisions(claim_on(CAT)) == []
    workbench.check(custom(BackendPatternConfig(VendorOp)), "prepare")
    assert workbench.decisions(claim) == []


@pytest.mark.parametrize(("profile", "count"), (("quick", 1), ("full", 4), ("unknown", 4)))
def test_profiles_set_how_many_inputs_are_drawn(profile: str, count: int) -> None:
    for maximum, expected in ((None, count), (0, 0), (2, 2)):
        workbench = Workbench(Altered(), seed=0, profile=profile, max_examples=maximum)
        assert workbench.check(claim_on(ADD), "numerics").cases == 5 * (4 + expected)
