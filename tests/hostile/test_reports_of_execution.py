"""Backends whose report of the execution names no op of the model: it counts as no report. (LOW-04)"""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.backends.base import Execution
from fx_quant_conformance.conformance.machine.messages import Trace
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.small_bench import Altered, claim_on, small_bench

NAMES_OF_NOTHING = {
    "a kernel": ("gemm_u8s8",),
    "nothing": ("",),
    "all of it": ("all of it",),
    "an op that begins alike": ("op00 (kernel)",),
    "what quantizes": ("quantize_per_tensor_default", "dequantize_per_tensor_default (kernel)"),
    "ends of the model": ("x", "input_1", "output"),
}
NO_NAMES: dict[str, Any] = {"a bare text": "op0", "no texts": (1, None), "no sequence": 3}


def run(bench: Bench, pattern: str) -> tuple[Check, str]:
    """Return the check of the execution, and what shows it."""
    messages = list(run_claim(bench, claim_on(pattern)))
    (check,) = (each for each in messages if isinstance(each, Check) and each.stage == "execution")
    (trace,) = (each for each in messages if isinstance(each, Trace))
    return check, trace.execution


def reporting(*quantized: str) -> Bench:
    """A bench of honest integer kernels that report these texts."""
    return small_bench(Altered(execution=lambda lowered: Execution(quantized_ops=quantized, float_fallbacks=())))


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("names", NAMES_OF_NOTHING.values(), ids=NAMES_OF_NOTHING)
def test_a_report_that_names_no_op_of_the_model_shows_nothing(names: tuple[str, ...]) -> None:
    check, evidence = run(reporting(*names), "nn.ReLU")
    assert (check.verdict, check.rule, evidence) == (Verdict.UNSHOWN, "LOW-04", "none"), check.message
    assert f"found {names[0]!r}" in check.message and "such as 'op0'" in check.message


@pytest.mark.rule("LOW-04")
def test_numbers_may_show_what_such_a_report_does_not() -> None:
    check, evidence = run(reporting("gemm_u8s8"), "nn.Linear")
    assert (check.verdict, evidence) == (Verdict.VERIFIED, "numbers")


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("name", ["op0", "op0 (a kernel)", "op0: by the accelerator", "op0, in two parts"])
def test_a_report_that_begins_with_the_name_of_an_op_is_one(name: str) -> None:
    check, evidence = run(reporting("dequantize", name), "nn.ReLU")
    assert (check.verdict, evidence) == (Verdict.VERIFIED, "reported")


@pytest.mark.rule("LOW-04")
@pytest.mark.parametrize("texts", NO_NAMES.values(), ids=NO_NAMES)
def test_what_is_no_sequence_of_texts_is_refuted(texts: Any) -> None:
    backend = Altered(execution=lambda lowered: Execution(quantized_ops=texts, float_fallbacks=()))
    check, _ = run(small_bench(backend), "nn.ReLU")
    assert check.verdict is Verdict.REFUTED
    assert f"Execution.quantized_ops: found {texts!r}; give a tuple of texts" in check.message
