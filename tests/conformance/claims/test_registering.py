"""What the suite cannot build says so, and a vendor's op is made buildable by registering it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.bounds.error_bounds import OpCall, U, Value, gamma
from fx_quant_conformance.conformance.claims.plan import BENDS, VALUE_RANGES, plan_cases
from fx_quant_conformance.conformance.claims.registry import register
from fx_quant_conformance.conformance.ops.op_model import Input, OneInput, Step
from fx_quant_conformance.conformance.oracle.table import OP_RULES, rule_of
from fx_quant_conformance.refimpl import BackendPatternConfig, DTypeConfig
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.own_entries import (  # noqa: F401  (one is a fixture)
    U8,
    OwnEntries,
    checks_of,
    claim_of,
    failures,
    no_registrations,
)
from tests.conformance.support.planning import planned

pytestmark = pytest.mark.usefixtures("no_registrations")


def reason_of(entry: BackendPatternConfig, dtypes: DTypeConfig = U8) -> str:
    reason = plan_cases(claim_of(entry, dtypes), Capabilities())
    assert isinstance(reason, str)
    return reason


def test_reasons_name_what_is_missing() -> None:
    hint = "make it buildable with fx_quant_conformance.register("
    unknown = reason_of(BackendPatternConfig(vendor_class()))
    assert unknown.startswith("the suite cannot build ") and unknown.endswith(", build, inputs)") and hint in unknown
    assert hint in reason_of(BackendPatternConfig((nn.Linear, nn.Softsign)))
    tree = BackendPatternConfig()._set_pattern_complex_format((torch.add, nn.ReLU, nn.ReLU))
    assert "a pattern that is not a chain of ops" in reason_of(tree)
    floats = DTypeConfig(torch.float32, torch.float32)
    assert reason_of(BackendPatternConfig(nn.ReLU), floats) == "no QConfig for activations of dtype torch.float32"


def vendor_class() -> type[nn.Module]:
    class Tripled(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * 3

    return Tripled


@pytest.mark.slow
@pytest.mark.rule("NUM-04")
def test_registering_makes_a_vendors_op_buildable() -> None:
    """Without: unexercised, with the hint. With: tried in every value range; judged where its roundings are stated."""
    entry = BackendPatternConfig(torch.special.bessel_j0)
    claim = claim_of(entry)
    before = checks_of(OwnEntries(entry))
    hint = f"make it buildable with fx_quant_conformance.register({claim.pattern}, build, inputs)"
    assert {(check.verdict, check.outcome) for check in before} == {(Verdict.UNEXERCISED, "skip")}
    assert all(check.message == f"the suite cannot build {claim.pattern}; {hint}" for check in before)
    build = partial(OneInput, [Step(op=torch.special.bessel_j0)])
    register(torch.special.bessel_j0, build, [(2, 7)])
    assert {case.inputs for case in planned(claim)} == {(Input(shape=(2, 7)),)}
    without_bias = [value_range for value_range in (*VALUE_RANGES, *BENDS) if value_range.bias <= 1.0]
    assert [case.value_range for case in planned(claim)] == without_bias
    without = {check.stage: check for check in checks_of(OwnEntries(entry))}
    assert without["lower"].verdict is Verdict.VERIFIED and without["numerics"].verdict is Verdict.UNEXERCISED
    assert "no oracle: no bound is known of an op in it: register its pattern" in without["numerics"].message
    register(torch.special.bessel_j0, build, [Input(shape=(65,))], roundings=32)
    assert failures(checks_of(OwnEntries(entry))) == []
    assert planned(claim)[0].inputs == (Input(shape=(65,)),)


@pytest.mark.rule("NUM-04")
def test_a_vendors_op_that_torch_decomposes_needs_no_roundings() -> None:
    entry = BackendPatternConfig(F.softsign)
    claim_of(entry)
    register(F.softsign, partial(OneInput, [Step(op=F.softsign)]), [(2, 7)])
    checks = {check.stage: check for check in checks_of(OwnEntries(entry))}
    assert checks["numerics"].verdict is Verdict.VERIFIED and failures(list(checks.values())) == []


def test_the_last_registration_counts() -> None:
    one = torch.ones(1).double()
    call = OpCall(function=F.softsign, args=(Value(real=one),), kwargs={}, capabilities=Capabilities(), result=one / 2)
    found = []
    for roundings in (2, 32):
        register(F.softsign, partial(OneInput, [Step(op=F.softsign)]), [(2, 7)], roundings=roundings)
        rule = rule_of(F.softsign)
        assert rule is not None
        found.append(float(rule.bound(call)["function"]))
    assert found[1] - found[0] == pytest.approx((gamma(32) - gamma(2)) / 2)
    assert found[0] - gamma(2) / 2 == pytest.approx(2 * U / 4), "dequantizing moves x by 2u·x, and its slope is 1/4"
    before = OP_RULES[torch.relu]
    register(torch.relu, partial(OneInput, [Step(op=torch.relu)]), [(2, 7)], roundings=1)
    assert OP_RULES[torch.relu] is rule_of(torch.relu) is before, "the suite's own rules stay"


@pytest.mark.slow
def test_a_registered_module_is_a_leaf_of_the_model() -> None:
    """Tracing does not go into a class that the config names, though it is none of torch's."""
    kind = vendor_class()
    register(kind, lambda: OneInput([Step(op=kind())]), [(2, 7)], roundings=1)
    assert failures(checks_of(OwnEntries(BackendPatternConfig(kind).add_dtype_config(U8)))) == []
