"""Preparing: the grids that the value ranges lead to, as the reference model has them; QAT models are trained."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.torch_engines.tables import native_config
from fx_quant_conformance.conformance.claims.build import build_model
from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.inputs import draw_static_inputs
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES, plan_cases
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.grids import Grid, grid_of, placeholder_grids
from fx_quant_conformance.conformance.stages.calibration import prepare_case
from fx_quant_conformance.refimpl import convert_to_reference_decomposed_fx
from fx_quant_conformance.refimpl.graph.tracing import OBSERVER_PREFIX
from tests.conformance.support.flows import input_grids

CONFIG = native_config("qnnpack")


class Grids(NamedTuple):
    """Where a case's grids lie: of its inputs and its output; s_x·s_w, of its first channel."""

    inputs: list[Grid]
    output: Grid
    accumulator: float


@cache
def claims() -> tuple[Claim, ...]:
    return enumerate_claims(CONFIG, Capabilities())


def claim_on(pattern: str, *, dtype: str = "static:in=quint8", flow: str = "ptq", kind: Kind = Kind.STATIC) -> Claim:
    named = (claim for claim in claims() if (claim.pattern, claim.flow) == (pattern, flow))
    return next(each for each in named if each.kind is kind and each.dtype_config.startswith(dtype))


def base_case(claim: Claim, *, has_prelude: bool = False) -> Case:
    cases = plan_cases(claim, Capabilities(), has_prelude=has_prelude)
    assert not isinstance(cases, str)
    return cases[0]


def prepared(claim: Claim, case: Case | None = None) -> GraphModule:
    case = case or base_case(claim)
    torch.manual_seed(0)
    return prepare_case(claim, case, build_model(case), CONFIG)


def grids_of(claim: Claim, value_range: str) -> Grids:
    """The grids of the base case in a value range."""
    case = replace(base_case(claim), value_range=next(each for each in VALUE_RANGES if each.name == value_range))
    reference = convert_to_reference_decomposed_fx(prepared(claim, case))
    (output,) = reference.graph.output_node().all_input_nodes
    inputs, last = input_grids(reference), grid_of(reference, output.all_input_nodes[0])
    weights: list[Any] = [m for m in reference.modules() if hasattr(m, "get_quantized_weight")]
    scale = float(weights[0].weight_scale.flatten()[0]) if weights else 1.0
    return Grids(inputs, last, inputs[0].scale * scale)


@pytest.mark.rule("NUM-02")
def test_zero_points_are_in_the_middle_and_at_both_ends() -> None:
    claim = claim_on("operator.add")
    zeros = {
        name: [grid.zero_point for grid in grids_of(claim, name).inputs]
        for name in ("signed", "positive", "negative", "skewed", "symmetric")
    }
    # −1 … 1: 127.5 steps below zero, and a little less by the scale in float32; −0.5 … 4: 28⅓ steps.
    assert zeros == {
        "signed": [127, 255],
        "positive": [0, 28],
        "negative": [255, 127],
        "skewed": [28, 0],
        "symmetric": [128, 128],
    }


@pytest.mark.rule("NUM-02")
def test_scales_reach_from_2_to_the_minus_12_to_2_to_the_4() -> None:
    narrow, wide = (grids_of(claim_on("nn.ReLU"), name).inputs[0].scale for name in ("narrow", "wide"))
    assert narrow == pytest.approx(2.0**-5 / 255) and narrow < 2.0**-12
    assert wide == pytest.approx(16, rel=1e-6)


@pytest.mark.rule("NUM-06")
@pytest.mark.parametrize(
    ("pattern", "dtype"),
    (
        ("nn.Linear", "static:in=quint8"),
        ("nn.ConvTranspose2d", "static:in=quint8"),
        ("nni.ConvReLU2d", "static:in=qint8"),
        ("operator.add", "static:in=quint8"),
        ("operator.mul", "static:in=qint8"),
    ),
)
def test_where_all_scales_are_powers_of_two_exact_results_are_at_ties(pattern: str, dtype: str) -> None:
    claim = claim_on(pattern, dtype=dtype)
    grids = grids_of(claim, "ties")
    scales = [*(grid.scale for grid in grids.inputs), grids.accumulator, grids.output.scale]
    assert [math.frexp(scale)[0] for scale in scales] == [0.5] * len(scales)
    case = replace(base_case(claim), value_range=next(each for each in VALUE_RANGES if each.name == "ties"))
    reference = convert_to_reference_decomposed_fx(prepared(claim, case))
    drawn = draw_static_inputs(case, placeholder_grids(reference), directed=4, random=2)
    values = torch.cat([Walk(reference, Capabilities()).exact(batch)[0].integers.flatten() for _, batch in drawn])
    assert bool(((values - values.floor()) == 0.5).any())


@pytest.mark.slow
def test_weights_that_stay_in_float_are_left_alone_in_a_value_range_of_ties() -> None:
    config = native_config("onednn")
    named = (claim for claim in enumerate_claims(config, Capabilities()) if claim.pattern == "nn.LayerNorm")
    claim = next(each for each in named if each.dtypes.weight_dtype == torch.float32)
    cases = plan_cases(claim, Capabilities())
    assert not isinstance(cases, str)
    tied = [replace(case, value_range=next(each for each in VALUE_RANGES if each.has_ties)) for case in cases]
    models = [build_model(case) for case in tied]
    assert any(parameter.dim() > 1 for model in models for parameter in model.parameters())
    for case, model in zip(tied, models, strict=True):
        before = {name: value.clone() for name, value in model.named_parameters() if "weight" in name}
        prepare_case(claim, case, model, config)
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters() if name in before)


@pytest.mark.rule("DTY-04")
def test_a_smallest_scale_is_kept() -> None:
    claim = claim_on("nn.ReLU", dtype="static:in=qint8[s>=2^-12]")
    case = replace(base_case(claim), value_range=ValueRange(name="narrower", ranges=((-(2.0**-6), 2.0**-6),)))
    reference = convert_to_reference_decomposed_fx(prepared(claim, case))
    assert [grid.scale for grid in input_grids(reference)] == [2.0**-12]
    grids = grids_of(claim, "narrow")
    assert grids.inputs[0].scale == grids.output.scale == 2.0**-12


def test_the_output_is_scaled_and_the_inputs_are_not() -> None:
    for name, factor in (("coarse_output", 64.0), ("fine_output", 2.0**-6)):
        grids = grids_of(claim_on("operator.mul"), name)
        ranges = next(value_range for value_range in VALUE_RANGES if value_range.name == name).ranges
        widths = [high - low for low, high in ranges]
        assert [grid.scale for grid in grids.inputs] == pytest.approx([width / 255 for width in widths])
        # The ends of the output are among the products of the inputs' ends, both of which calibration meets.
        products = [a * b for a in ranges[0] for b in ranges[1]]
        assert 0.4 * factor < grids.output.scale * 255 / (max(products) - min(products)) <= 1.001 * factor


@pytest.mark.rule("QAT-02")
@pytest.mark.rule("FUS-06")
def test_a_trained_batch_norm_has_seen_both_batches_and_is_in_eval_mode() -> None:
    claim = claim_on("nni.ConvBn2d", flow="qat")
    model = build_model(base_case(claim))
    before = {name: value.clone() for name, value in model.named_buffers() if "running_mean" in name}
    trained = prepare_case(claim, base_case(claim), model, CONFIG)
    (norm,) = (module for module in trained.modules() if isinstance(module, nn.BatchNorm2d))
    assert int(norm.num_batches_tracked or 0) == 1 and not trained.training and not norm.training
    assert norm.running_mean is not None and before
    assert not any(torch.equal(norm.running_mean, value) for value in before.values())
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers() if name in before)


@pytest.mark.rule("QAT-01")
def test_a_model_in_qat_has_fake_quantizes_that_have_measured_both_batches() -> None:
    model = prepared(claim_on("nn.ReLU", flow="qat"))
    fakes: list[Any] = [module for name, module in model.named_modules() if name.startswith(OBSERVER_PREFIX)]
    ends = {
        (float(each.activation_post_process.min_val), float(each.activation_post_process.max_val))
        for each in fakes
        if hasattr(each, "activation_post_process")
    }
    assert ends == {(-1.0, 1.0)}


@pytest.mark.rule("QAT-02")
def test_a_trained_weight_fills_its_range() -> None:
    """What the weight was before training moved the norm's statistics, with which it is folded, is forgotten."""
    claim = claim_on("nni.ConvBn2d", flow="qat")
    torch.manual_seed(0)
    model = build_model(base_case(claim))
    for name, statistic in model.named_buffers():
        if name.endswith("running_var"):
            statistic.fill_(2.0**-12)  # far below what training finds: the folded weight becomes smaller by much
    reference = convert_to_reference_decomposed_fx(prepare_case(claim, base_case(claim), model, CONFIG))
    (layer,) = (module for module in reference.modules() if hasattr(module, "get_quantized_weight"))
    steps: Any = layer
    largest = float((steps.weight.detach().abs().max() / steps.weight_scale.max()).round())
    assert largest in (127, 128)  # symmetric: half of the 255 steps on either side
