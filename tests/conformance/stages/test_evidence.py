"""Evidence of execution: reported, shown by numbers, or none; and reports that the numbers contradict. (LOW-04)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities, Execution, UnsupportedPattern
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.machine.messages import Begin, Trace
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.evidence import PROBE, format_blindness, gather_evidence, needs_probe
from fx_quant_conformance.conformance.stages.execution import Reports
from fx_quant_conformance.conformance.stages.long_sums import WIDTH
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.small_bench import Altered, claim_on, small_bench, small_claims, without_shares
from tests.mutants.evidence_faults import Liar
from tests.mutants.honest import in_double
from tests.mutants.integer_kernels import IntegerBackend, SilentIntegers
from tests.mutants.reference_kernels import Edited, SmallReference

WEIGHTED = [
    claim for claim in small_claims().values() if claim.scheme != "no_weight" and "static" in claim.dtype_config
]
OF_EACH_PATTERN = list({claim.pattern: claim for claim in reversed(WEIGHTED)}.values())
NOT_TOLD, TOLD = Reports(told=0, of=8), Reports(told=8, of=8)


class SilentFloats(SmallReference):
    """The reference model in float, of a backend that declares nothing and does not say what runs."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), float_accumulation=False)


class InDouble(Edited):
    """Sums in float64, which numbers cannot tell from integers."""

    def __init__(self) -> None:
        super().__init__(in_double)

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), float_accumulation=False)


def bench_of(backend: Any) -> Bench:
    return Bench(backend, seed=0, profile="quick")


def reference_claim(pattern: str, kind: str = "static:in=quint8") -> Claim:
    backend = SmallReference()
    claims = enumerate_claims(backend.backend_config(), backend.capabilities())
    return next(c for c in claims if c.pattern == pattern and c.dtype_config.startswith(kind) and c.flow == "ptq")


def outcome(bench: Bench, claim: Claim) -> tuple[dict[str, Check], Trace]:
    messages = list(run_claim(bench, claim))
    (trace,) = (message for message in messages if isinstance(message, Trace))
    return {message.stage: message for message in messages if isinstance(message, Check)}, trace


# -- what numbers show ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("claim", OF_EACH_PATTERN, ids=lambda claim: claim.id)
def test_integer_kernels_that_report_nothing_are_shown_by_their_long_sums(claim: Claim) -> None:
    evidence = gather_evidence(bench_of(SilentIntegers()), claim, NOT_TOLD)
    assert evidence.kind == "numbers" and evidence.fault is None, evidence.text
    assert "exact" in evidence.text and "int32 or float64" in evidence.text


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("pattern", ["F.linear", "nn.Conv2d+nn.BatchNorm2d+nn.ReLU", "nn.ConvTranspose2d"])
def test_float_kernels_are_a_fallback_whatever_the_pattern(pattern: str) -> None:
    """It was UNSHOWN, which ``--without-execution-evidence`` accepts."""
    evidence = gather_evidence(bench_of(SilentFloats()), reference_claim(pattern), NOT_TOLD)
    assert evidence.kind == "none" and evidence.fault is not None
    assert evidence.fault.verdict is Verdict.FALLBACK and "float_accumulation" in evidence.fault.message
    assert "come back wrong, as in float32" in evidence.text, evidence.text


@pytest.mark.slow
def test_patterns_of_training_keep_their_long_sums() -> None:
    """The step of training changes neither weights nor a norm's statistics: in float64 the sums are still exact."""
    backend = SilentFloats()
    claims = enumerate_claims(backend.backend_config(), backend.capabilities())
    trained = [c for c in claims if (c.pattern, c.flow) == ("nniqat.ConvBnReLU2d", "qat")]
    claim = next(c for c in trained if "static" in c.dtype_config)
    assert "as in float32" in gather_evidence(bench_of(backend), claim, NOT_TOLD).text
    assert gather_evidence(bench_of(InDouble()), claim, NOT_TOLD).kind == "numbers"


BLIND = {
    "nn.ReLU": "moves or selects",
    "torch.cat": "moves or selects",
    "torch.flatten": "moves or selects",
    "operator.add": "no long sums",
    "operator.mul": "no long sums",
    "nn.AvgPool2d": "no long sums",
    "nn.Hardswish": "no long sums",
    "F.layer_norm": "no long sums",
    "nn.Softmax": "'fixed qparams'",
}


@pytest.mark.parametrize("pattern", BLIND)
def test_where_numbers_cannot_tell_the_reason_is_said_and_nothing_is_run(pattern: str) -> None:
    bench, claim = bench_of(SilentFloats()), reference_claim(pattern)
    assert BLIND[pattern] in format_blindness(bench, claim)
    assert not needs_probe(bench, claim, NOT_TOLD)
    evidence = gather_evidence(bench, claim, NOT_TOLD)
    assert evidence.kind == "none" and BLIND[pattern] in evidence.text


@pytest.mark.parametrize("kind", ["dynamic:in=quint8", "dynamic:in=float16"])
def test_numbers_cannot_tell_of_claims_with_float_results(kind: str) -> None:
    assert "rounding of float32 is right" in format_blindness(
        bench_of(SilentFloats()), reference_claim("nn.Linear", kind)
    )


def test_who_declares_sums_in_float_is_neither_shown_nor_contradicted_by_numbers() -> None:
    bench, claim = bench_of(SmallReference()), reference_claim("nn.Linear")
    assert not needs_probe(bench, claim, NOT_TOLD) and not needs_probe(bench, claim, TOLD)
    assert gather_evidence(bench, claim, NOT_TOLD).kind == "none"
    assert gather_evidence(bench, claim, TOLD).kind == "reported"


class Short(SilentIntegers):
    """Takes only so many features."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), limits={"nn.Linear": {"shape": lambda shape: shape.c_in <= 4096}})


class Declines(SilentIntegers):
    """Cannot compile a sum as long as the probe's."""

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        if example_inputs[0].numel() >= WIDTH:
            raise UnsupportedPattern("more features than a tile has")
        return super().lower(reference_model, example_inputs)


@pytest.mark.parametrize(
    ("backend", "why"), [(Short(), "limits exclude a sum of"), (Declines(), "more features than a tile has")]
)
def test_what_cannot_be_probed_is_left_open(backend: SilentIntegers, why: str) -> None:
    evidence = gather_evidence(bench_of(backend), claim_on("nn.Linear"), NOT_TOLD)
    assert evidence.kind == "none" and evidence.fault is None and why in evidence.text


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_claim_that_nothing_shows_is_unshown_though_every_other_stage_holds() -> None:
    checks, trace = outcome(small_bench(SilentIntegers()), claim_on("nn.ReLU"))
    assert {stage for stage, check in checks.items() if check.verdict is not Verdict.VERIFIED} == {"execution"}
    check = checks["execution"]
    assert (check.verdict, check.outcome, check.rule) == (Verdict.UNSHOWN, "fail", "LOW-04")
    assert check.message.startswith("execution not shown: the backend does not say what ran; numbers cannot tell")
    assert (trace.execution, trace.graphs) == ("none", {})


def test_a_claim_that_fails_otherwise_is_not_probed() -> None:
    backend = Altered(lower=lambda model, example: lambda *inputs: model(*inputs) + 1.0, execution=lambda lowered: None)
    messages = list(run_claim(small_bench(backend), claim_on("nn.Linear")))
    assert not [message for message in messages if isinstance(message, Begin) and message.case == PROBE.case]
    worst = Verdict.worst(message.verdict for message in messages if isinstance(message, Check))
    assert worst is Verdict.REFUTED


def last_of(*patterns: str) -> Claim:
    """The last claim of those that share the cases of these patterns."""
    return [claim for claim in WEIGHTED if claim.pattern in patterns][-1]


@pytest.mark.parametrize(
    ("claim", "told", "is_probed"),
    [
        (last_of("nn.Linear", "nnqat.Linear"), 8, True),
        (claim_on("nn.Linear"), 8, False),
        (claim_on("nn.Linear"), 7, True),
        (claim_on("nn.Linear"), 0, True),
        (last_of("nn.Linear+nn.ReLU", "nni.LinearReLU", "nniqat.LinearReLU"), 8, False),
    ],
    ids=["last of an op", "another", "told of some", "told of none", "with a epilogue"],
)
def test_quick_contradicts_complete_reports_once_for_an_op_and_full_always(
    claim: Claim, told: int, is_probed: bool
) -> None:
    assert needs_probe(bench_of(IntegerBackend()), claim, Reports(told=told, of=8)) is is_probed
    assert needs_probe(Bench(IntegerBackend(), seed=0, profile="full"), claim, Reports(told=told, of=8))


# -- reports that are not true ----------------------------------------------------------------------------------------


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("reports", [Reports(told=told, of=8) for told in (1, 8)], ids=str)
def test_a_report_of_integers_with_sums_of_float32_is_refuted(reports: Reports) -> None:
    evidence = gather_evidence(without_shares(bench_of(Liar())), reference_claim("nn.Linear"), reports)
    fault = evidence.fault
    assert fault is not None and (fault.rule, fault.verdict) == ("LOW-04", Verdict.REFUTED) and evidence.kind == "none"
    assert "float_accumulation" in fault.message and "as in float32" in fault.message


def test_the_backend_may_say_itself_that_so_long_a_sum_runs_in_float() -> None:
    class Honest(Liar):
        def execution(self, lowered: Callable[..., Any]) -> Execution:
            return Execution(quantized_ops=(), float_fallbacks=("a sum too long for the machine",))

    evidence = gather_evidence(without_shares(bench_of(Honest())), reference_claim("nn.Linear"), TOLD)
    assert evidence.fault is None and "itself reports that it runs in float" in evidence.text


def test_a_backend_whose_report_raises_on_the_probe_is_not_judged_by_it() -> None:
    class Raises(IntegerBackend):
        def execution(self, lowered: Callable[..., Any]) -> Execution:
            raise RuntimeError("too large to inspect")

    evidence = gather_evidence(bench_of(Raises()), claim_on("nn.Linear"), Reports(told=4, of=8))
    assert evidence.fault is None and "too large to inspect" in evidence.text


def test_the_probe_leaves_the_model_under_test_as_it_was() -> None:
    """The operands are shared by all probes of a process: what a backend does to its copies does not reach them."""

    def spoil(model: GraphModule, example: tuple[Any, ...]) -> Callable[..., Any]:
        with torch.no_grad():
            for value in (*example, *(p for m in model.modules() if isinstance(m, nn.Module) for p in m.parameters())):
                value.zero_()
        return lambda *inputs: torch.zeros(1)

    spoiled = Altered(lower=spoil, execution=lambda lowered: None)
    assert gather_evidence(bench_of(spoiled), claim_on("nn.Linear"), NOT_TOLD).kind == "none"
    assert gather_evidence(bench_of(SilentIntegers()), claim_on("nn.Linear"), NOT_TOLD).kind == "numbers"
