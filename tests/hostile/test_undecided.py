"""Vendors who declare so much that a wrong backend is within its bounds: their claims are not VERIFIED. (NUM-03)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.registry import register
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, ConfigError, DTypeConfig
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference
from tests.conformance.support.suite_runs import run
from tests.hostile.test_registered_patterns import no_registrations as no_registrations
from tests.mutants.reference_kernels import SmallReference

pytestmark = pytest.mark.rule("NUM-03")

Change = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes another lowered model of one."""


def negated(lowered: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: -lowered(*inputs)


def without_inputs(lowered: Callable[..., Any]) -> Callable[..., Any]:
    """What the model gives for zeros, whatever it is given."""
    return lambda *inputs: lowered(*map(torch.zeros_like, inputs))


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x * x


class OwnOp(ReportingReference):
    """Claims the cube."""

    name = "own op"

    def __init__(self, change: Change) -> None:
        self._change = change

    def backend_config(self) -> BackendConfig:
        dtypes = DTypeConfig(torch.quint8, torch.quint8)
        return BackendConfig("own").set_backend_pattern_config(BackendPatternConfig(Cube).set_dtype_configs([dtypes]))

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return self._change(super().lower(reference_model, example_inputs))


class Coarse(SmallReference):
    """Declares that no scale of a dynamic input is smaller than 1e30, and looks at no input."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), dynamic_scale_floor=1e30)

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        return without_inputs(super().lower(reference_model, example_inputs))


def numbers_of(backend: Any, glob: str = "") -> list[Check]:
    """Return the check of the numbers of each claim whose ID begins so."""
    bench = Bench(backend, seed=0, profile="quick")
    claims = [each for each in enumerate_claims(bench.config, bench.capabilities) if each.id.startswith(glob)]
    messages = [message for claim in claims for message in run_claim(bench, claim)]
    return [each for each in messages if isinstance(each, Check) and each.stage == "numerics"]


def register_cube(roundings: int) -> None:
    register(Cube, build=lambda: nn.Sequential(Cube()).eval(), inputs=[(4, 17)], roundings=roundings)


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("change", [negated, without_inputs])
def test_roundings_that_allow_another_function_decide_nothing(change: Change) -> None:
    register_cube(16_000_000)
    checks = numbers_of(OwnOp(change))
    assert [check.verdict for check in checks] == [Verdict.UNEXERCISED] * 2
    assert all("decide nothing" in check.message and "roundings=16000000" in check.message for check in checks)


@pytest.mark.usefixtures("no_registrations")
def test_fewer_roundings_decide(no_registrations: None) -> None:
    register_cube(2)
    assert {check.verdict for check in numbers_of(OwnOp(negated))} == {Verdict.REFUTED}
    assert {check.verdict for check in numbers_of(OwnOp(lambda lowered: lowered))} == {Verdict.VERIFIED}


@pytest.mark.parametrize("pattern", ["nn.Linear", "F.linear"])
def test_a_floor_of_the_scale_that_leaves_no_integers_decides_nothing(pattern: str) -> None:
    checks = numbers_of(Coarse(), f"{pattern}/dynamic:in=quint8")
    assert checks and {check.verdict for check in checks} == {Verdict.UNEXERCISED}
    assert all("decide nothing" in each.message and "dynamic_scale_floor=1e+30" in each.message for each in checks)


class Native(ReportingReference):
    """Claims all that the native config has."""

    config = "native"


def test_where_the_result_is_one_for_all_inputs_nothing_is_hidden() -> None:
    """In quick the claim has a single case: a relu of negative numbers. Its bound lets nothing but 0 pass."""
    [check] = numbers_of(Native(), "operator.mul+F.relu/static:in=quint8,w=*,b=*,out=quint8/qat")
    assert check.verdict is Verdict.VERIFIED
    assert check.statistics is not None and check.slack_lsb is not None and float(check.slack_lsb) < 0.01


@pytest.mark.usefixtures("no_registrations")
@pytest.mark.parametrize("roundings", [-1, 2**24, 2.5, True, float("nan"), "2"])
def test_roundings_are_a_number_that_has_a_bound(roundings: Any) -> None:
    with pytest.raises(ConfigError, match=r"register\(.*\): found roundings="):
        register_cube(roundings)


@pytest.mark.slow
def test_the_report_shows_what_is_registered(tmp_path: Path) -> None:
    ran = run(tmp_path, "own_modules:Zeros")
    assert ran.results.header.registered == {
        "own_modules.Gain": "1 model, roundings=1",
        "own_modules.Shift": "1 model, roundings=1",
    }
    page = (ran.folder / "report.html").read_text()
    assert "<dt>Registered</dt>" in page and "1 model, roundings=1" in page
