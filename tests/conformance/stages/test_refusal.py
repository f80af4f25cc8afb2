"""Refusal: which QConfigs are just outside of a claim, and what a wrong choice of dtype configs looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.qat as nniqat
import torch.ao.nn.qat as nnqat
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.edges import EdgeQConfig, edges_inside, edges_outside
from fx_quant_conformance.conformance.claims.plan import plan_cases
from fx_quant_conformance.conformance.claims.qconfigs import qconfig_for
from fx_quant_conformance.conformance.machine.fault import Fault
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.conformance.stages.refusal import try_edges
from fx_quant_conformance.conformance.stages.state import CaseState, ClaimState
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, DTypeWithConstraints
from fx_quant_conformance.refimpl.config.fusers import fuse_bn
from fx_quant_conformance.refimpl.prepare import dtype_choice
from fx_quant_conformance.refimpl.prepare.dtype_choice import (
    Misfit,
    ObserverFacts,
    QConfigFacts,
    Violation,
    choose_dtype_config,
)
from fx_quant_conformance.refimpl.prepare.placing import Placer
from fx_quant_conformance.refimpl.prepare.plan import Slot
from tests.conformance.support.own_entries import OwnEntries

SCALE = 2.0**-12
ACTIVATION = DTypeWithConstraints(
    dtype=torch.quint8, quant_min_lower_bound=10, quant_max_upper_bound=250, scale_min_lower_bound=SCALE
)
WEIGHT = DTypeWithConstraints(
    dtype=torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=SCALE
)
BOUNDED = DTypeConfig(ACTIVATION, ACTIVATION, WEIGHT, torch.float)
STATIC = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
DYNAMIC = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
STATIC_HALF = DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16)
LOOKUP = DTypeConfig(torch.float, torch.float, torch.quint8)
PRESCRIBED = DTypeWithConstraints(dtype=torch.quint8, scale_exact_match=1 / 256, zero_point_exact_match=0)
FIXED = DTypeConfig(PRESCRIBED, PRESCRIBED)
DECIMAL = DTypeWithConstraints(torch.quint8, 10, 250, scale_exact_match=0.7, zero_point_exact_match=128)
SEVEN_TENTHS = DTypeConfig(torch.quint8, DECIMAL, torch.qint8)
"""No float32 number is 0.7, and the log names the scale that observers hold."""
HALF_FIXED = DTypeConfig(DTypeWithConstraints(torch.quint8, scale_exact_match=0.5), torch.quint8, torch.qint8)
"""A scale without a zero point requires nothing."""


def config_of(*dtypes: DTypeConfig) -> BackendConfig:
    """Convolutions with all that fuses to them and trains for them, and others; each with these dtype configs."""
    conv_bn_relu = BackendPatternConfig((nn.Conv2d, nn.BatchNorm2d, nn.ReLU)).set_fuser_method(fuse_bn)
    entries = [
        BackendPatternConfig(nn.Conv2d)
        .set_root_module(nn.Conv2d)
        .set_reference_quantized_module(nnqr.Conv2d)
        .set_qat_module(nnqat.Conv2d),
        BackendPatternConfig(nnqat.Conv2d).set_root_module(nn.Conv2d).set_reference_quantized_module(nnqr.Conv2d),
        conv_bn_relu.set_fused_module(nni.ConvBnReLU2d),
        BackendPatternConfig(nni.ConvBnReLU2d).set_qat_module(nniqat.ConvBnReLU2d),
        BackendPatternConfig(nni.ConvReLU2d).set_qat_module(nniqat.ConvReLU2d),
        BackendPatternConfig(nniqat.ConvBnReLU2d),
        BackendPatternConfig(nn.Linear).set_root_module(nn.Linear).set_reference_quantized_module(nnqr.Linear),
        BackendPatternConfig(F.linear)._set_input_type_to_index({"weight": 1, "bias": 2}),
        BackendPatternConfig((F.linear, nn.ReLU)),
        BackendPatternConfig((torch.conv2d, nn.ReLU)),
        BackendPatternConfig(nn.Sigmoid),
        BackendPatternConfig(nn.ReLU),
        BackendPatternConfig("tanh_"),
        BackendPatternConfig(nn.Embedding).set_root_module(nn.Embedding).set_reference_quantized_module(nnqr.Embedding),
    ]
    return BackendConfig("c").set_backend_pattern_configs(each.set_dtype_configs(list(dtypes)) for each in entries)


def claim_of(pattern: str, *dtypes: DTypeConfig, flow: str = "ptq") -> tuple[Claim, BackendConfig]:
    """The claim on a pattern that its first dtype config makes."""
    config = config_of(*dtypes)
    claims = enumerate_claims(config, Capabilities())
    return next(claim for claim in claims if (claim.pattern, claim.flow) == (pattern, flow)), config


def state_of(claim: Claim, config: BackendConfig) -> ClaimState:
    """A claim as the stage finds it, with a case whose prepared model is a stand-in."""
    cases = plan_cases(claim, Capabilities(), limit=1)
    assert not isinstance(cases, str), cases
    torch.manual_seed(0)
    state = CaseState(case=cases[0])
    state.model, state.prepared = build_model(cases[0]), symbolic_trace(nn.Identity())
    bench = Bench(OwnEntries(*config.configs), seed=0, profile="quick")
    return ClaimState(bench=bench, claim=claim, rerun_cases=[state])


def checked(claim: Claim, config: BackendConfig) -> Iterator[Fault]:
    return try_edges(state_of(claim, config))


CLAIMS = (
    ("nn.Conv2d", BOUNDED, "ptq", {"DTY-01": 2, "DTY-03": 3, "DTY-04": 2, "DTY-07": 1}),
    ("nn.Conv2d+nn.BatchNorm2d+nn.ReLU", STATIC, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("nni.ConvBnReLU2d", STATIC, "qat", {"DTY-01": 2, "DTY-07": 1}),
    ("nn.Linear", DYNAMIC, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("F.linear", STATIC_HALF, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("F.linear+nn.ReLU", STATIC, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("nn.Embedding", LOOKUP, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("nn.Sigmoid", FIXED, "qat", {"DTY-01": 1, "DTY-05": 3, "DTY-07": 1}),
    ("nn.Linear", SEVEN_TENTHS, "ptq", {"DTY-01": 2, "DTY-03": 2, "DTY-05": 3, "DTY-07": 1}),
    ("nn.Linear", HALF_FIXED, "ptq", {"DTY-01": 2, "DTY-07": 1}),
    ("nn.ReLU", BOUNDED, "qat", {"DTY-01": 1, "DTY-03": 2, "DTY-04": 1, "DTY-07": 1}),
    (".tanh_", STATIC, "ptq", {"DTY-01": 1, "DTY-07": 1}),  # in place: no copy may read what another wrote
)


@pytest.mark.rule("DTY-06")
@pytest.mark.parametrize(("pattern", "dtypes", "flow", "counts"), CLAIMS)
def test_all_that_is_just_outside_is_refused(
    pattern: str, dtypes: DTypeConfig, flow: str, counts: dict[str, int]
) -> None:
    claim, config = claim_of(pattern, dtypes, flow=flow)
    outside = list(edges_outside(claim))
    rules = [edge.rule for edge in outside]
    assert {rule: rules.count(rule) for rule in rules} == counts
    run = state_of(claim, config)
    assert list(try_edges(run)) == []
    assert run.counted["refusal"] == len(outside) + len(list(edges_inside(claim)))


@pytest.mark.rule("DTY-01")
@pytest.mark.rule("OBS-06")
def test_a_weight_of_which_no_entry_says_where_it_is_is_not_compared_and_that_is_found() -> None:
    fault = next(checked(*claim_of("torch.conv2d+nn.ReLU", STATIC)))
    assert fault.rule == "DTY-01"
    assert fault.message == "a QConfig with another weight dtype is taken; the pattern must stay float"


def facts(edge: EdgeQConfig) -> tuple[ObserverFacts, ObserverFacts]:
    return ObserverFacts.of(edge.qconfig.activation()), ObserverFacts.of(edge.qconfig.weight())


@pytest.mark.rule("DTY-03")
def test_bounds_are_broken_by_as_little_as_can_be() -> None:
    facts_by_edge = {edge.name: facts(edge) for edge in edges_outside(claim_of("nn.Conv2d", BOUNDED)[0])}
    activation, weight = (ObserverFacts.of(make()) for make in qconfig_for(claim_of("nn.Conv2d", BOUNDED)[0]))
    below = float(torch.nextafter(torch.tensor(SCALE), torch.tensor(0.0)))
    assert below < SCALE
    assert facts_by_edge["the activation's quant_min one lower"] == (replace(activation, quant_min=9), weight)
    assert facts_by_edge["the activation's quant_max one higher"] == (replace(activation, quant_max=251), weight)
    assert facts_by_edge["the weight's quant_min one lower"] == (activation, replace(weight, quant_min=-128))
    assert "the weight's quant_max one higher" not in facts_by_edge, "127 is where qint8 ends"
    assert facts_by_edge["the activation's smallest scale just below"] == (replace(activation, eps=below), weight)
    assert facts_by_edge["the weight's smallest scale just below"] == (activation, replace(weight, eps=below))
    other, _ = facts_by_edge["another activation dtype"]
    assert (other.dtype, other.quant_min, other.quant_max) == (torch.qint8, -128, 127)


@pytest.mark.rule("DTY-03")
def test_half_a_bound_and_a_wildcards_bounds_are_none() -> None:
    half = DTypeWithConstraints(dtype=torch.quint8, quant_min_lower_bound=10)
    wild = DTypeWithConstraints(quant_min_lower_bound=1, quant_max_upper_bound=2, scale_min_lower_bound=1.0)
    for ends in ((half, half), (torch.quint8, wild)):
        claim, config = claim_of("nn.ReLU", DTypeConfig(*ends))
        assert {edge.rule for edge in edges_outside(claim)} == {"DTY-01", "DTY-07"}
        assert list(checked(claim, config)) == []


@pytest.mark.rule("DTY-05")
def test_fixed_qparams_are_missed_by_the_next_number() -> None:
    fixed_by_edge = {edge.name: facts(edge)[0].fixed for edge in edges_outside(claim_of("nn.Sigmoid", FIXED)[0])}
    scale, zero_point = fixed_by_edge["another fixed scale"]  # type: ignore[misc]
    same, other = fixed_by_edge["another fixed zero point"]  # type: ignore[misc]
    assert (zero_point, same, other) == (0, 1 / 256, 1)
    assert 1 / 256 < scale < 1 / 256 * (1 + 2.0**-20)
    assert fixed_by_edge["measured qparams for fixed ones"] is None


@pytest.mark.rule("DTY-02")
def test_another_dtype_config_may_take_what_this_one_refuses() -> None:
    claim, config = claim_of("nn.Conv2d", BOUNDED, STATIC, DYNAMIC)
    wider = next(edge for edge in edges_outside(claim) if edge.rule == "DTY-03")
    activation, weight = facts(wider)
    chosen, _ = choose_dtype_config(QConfigFacts(activation=activation, weight=weight), claim.entry.dtype_configs)
    assert chosen == STATIC
    assert list(checked(claim, config)) == []


@pytest.mark.rule("DTY-04")
def test_what_the_claims_own_qconfig_does_not_ask_is_tried_on_the_bound() -> None:
    tiny = DTypeWithConstraints(dtype=torch.quint8, scale_min_lower_bound=2.0**-30)
    claim, config = claim_of("nn.ReLU", DTypeConfig(tiny, tiny))
    (edge,) = edges_inside(claim)
    assert facts(edge)[0].eps == 2.0**-30
    assert list(checked(claim, config)) == []
    assert list(edges_inside(claim_of("nn.Conv2d", BOUNDED)[0])) == [], "prepare has taken that one already"


# -- wrong choices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "pattern", "dtypes"),
    (
        ("DTY-01", "nn.Conv2d", STATIC),
        ("DTY-03", "nn.Conv2d", BOUNDED),
        ("DTY-04", "nn.ReLU", BOUNDED),
        ("DTY-05", "nn.Sigmoid", FIXED),
        ("DTY-07", "nn.Linear", DYNAMIC),
    ),
)
def test_a_rule_that_is_not_kept_is_named(
    rule: str, pattern: str, dtypes: DTypeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, config = claim_of(pattern, dtypes)
    right = dtype_choice._find_misfits

    def lenient(*arguments: Any) -> Iterator[Misfit]:
        return (misfit for misfit in right(*arguments) if misfit[0] != rule)

    monkeypatch.setattr(dtype_choice, "_find_misfits", lenient)
    assert len([*edges_inside(claim), *edges_outside(claim)]) > 1
    fault = next(checked(claim, config))
    assert fault.rule == rule
    assert "is taken; the pattern must stay float" in fault.message


@pytest.mark.rule("DTY-02")
def test_a_bound_must_be_taken_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = DTypeWithConstraints(dtype=torch.quint8, scale_min_lower_bound=2.0**-30)
    claim, config = claim_of("nn.ReLU", DTypeConfig(tiny, tiny))
    right = dtype_choice.find_violations

    def strict(found: ObserverFacts, wanted: DTypeWithConstraints) -> Iterator[Violation]:
        yield from right(found, wanted)
        if found.eps == wanted.scale_min_lower_bound:
            yield "DTY-04", "eps", found.eps, "more"

    monkeypatch.setattr(dtype_choice, "find_violations", strict)
    fault = next(checked(claim, config))
    assert fault.rule == "DTY-02"
    assert "a QConfig with exactly the bounds is not taken: dtype config 0: DTY-04" in fault.message


@pytest.mark.rule("DTY-09")
@pytest.mark.parametrize("field", ("rule", "found", "bound"))
def test_the_log_must_say_what_was_found_and_why(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, config = claim_of("nn.Conv2d", BOUNDED)
    right = dtype_choice.Refusal
    monkeypatch.setattr(dtype_choice, "Refusal", lambda **fields: right(**{**fields, field: ""}))
    fault = next(checked(claim, config))
    assert (fault.rule, "the log does not name DTY-01" in fault.message) == ("DTY-09", True)


@pytest.mark.rule("DTY-06")
def test_a_refused_pattern_has_no_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, config = claim_of("nn.ReLU", STATIC)
    slot = Slot(
        name="activation_post_process_0",
        value="edge0_x0",
        consumers=None,
        role="input",
        group=0,
        rule="OBS-01",
        scope="",
        make=qconfig_for(claim).activation,
    )
    monkeypatch.setattr(Placer, "freeze_slots", lambda *_: (slot,))
    assert next(checked(claim, config)).rule == "DTY-06"
