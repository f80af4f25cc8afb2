"""The QConfig of a claim: its dtypes, its bounds exactly, its scheme, for every kind of dtype config and flow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn import qat as nnqat

from fx_quant_conformance.backends.base import WEIGHT_SCHEMES, Capabilities
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.claims.kinds import Kind, fixed_qparams_of, kind_of
from fx_quant_conformance.conformance.claims.qconfigs import (
    dynamic_range_of,
    fixed_range_of,
    qconfig_for,
    wide_qconfig_for,
)
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

BOUNDED = DTypeWithConstraints(
    dtype=torch.qint8, quant_min_lower_bound=-127, quant_max_upper_bound=127, scale_min_lower_bound=2.0**-12
)
STATIC = DTypeConfig(torch.quint8, torch.quint8, BOUNDED, torch.float)
DYNAMIC = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
HALF = DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16)
WEIGHT_ONLY = DTypeConfig(torch.float32, torch.float32, torch.quint4x2)
SIGMOID = DTypeWithConstraints(
    dtype=torch.quint8,
    quant_min_lower_bound=0,
    quant_max_upper_bound=255,
    scale_exact_match=1 / 256,
    zero_point_exact_match=0,
)
FIXED = DTypeConfig(SIGMOID, SIGMOID)


def claim_of(dtypes: DTypeConfig, *, flow: str = "ptq", scheme: str = "", pattern: Any = nn.Linear) -> Claim:
    entry = BackendPatternConfig(pattern).set_dtype_configs([dtypes])
    if pattern is nn.Linear:
        entry.set_qat_module(nnqat.Linear)
    claims = enumerate_claims(
        BackendConfig("c").set_backend_pattern_config(entry), Capabilities(weight_schemes=WEIGHT_SCHEMES)
    )
    return next(claim for claim in claims if claim.flow == flow and scheme in ("", claim.scheme))


def qconfig(claim: Claim, **how: bool) -> tuple[Any, Any]:
    """The activation's and the weight's observer, or fake quantize, made."""
    found = qconfig_for(claim, **how)
    return found.activation(), found.weight()


def settings(observer: Any) -> tuple[Any, ...]:
    return observer.dtype, observer.qscheme, observer.quant_min, observer.quant_max


@pytest.mark.parametrize(
    ("dtypes", "kind"),
    (
        (STATIC, Kind.STATIC),
        (FIXED, Kind.FIXED),
        (DTypeConfig(SIGMOID, torch.quint8), Kind.FIXED),
        (DTypeConfig(torch.quint8, SIGMOID), Kind.FIXED),
        (DTypeConfig(DTypeWithConstraints(torch.quint8, scale_exact_match=0.5), torch.quint8), Kind.STATIC),
        (DTypeConfig(DTypeWithConstraints(torch.quint8, zero_point_exact_match=0), torch.quint8), Kind.STATIC),
        (DYNAMIC, Kind.DYNAMIC),
        (HALF, Kind.FLOAT16),
        (DTypeConfig(torch.float16, torch.float, torch.float16, torch.float, is_dynamic=True), Kind.FLOAT16),
        (WEIGHT_ONLY, Kind.WEIGHT_ONLY),
        (DTypeConfig(None, None, torch.qint8), Kind.WEIGHT_ONLY),
        (DTypeConfig(torch.float32, torch.float32), Kind.OTHER),
        (DTypeConfig(torch.bfloat16), Kind.OTHER),
    ),
    ids=str,
)
def test_kinds(dtypes: DTypeConfig, kind: Kind) -> None:
    assert kind_of(dtypes) is kind


@pytest.mark.rule("DTY-03")
@pytest.mark.rule("DTY-04")
def test_a_static_qconfig_is_exactly_on_the_bounds() -> None:
    activation, weight = qconfig(claim_of(STATIC, scheme="per_tensor_symmetric"))
    assert type(activation) is type(weight) is MinMaxObserver
    assert settings(activation) == (torch.quint8, torch.per_tensor_affine, 0, 255)
    assert settings(weight) == (torch.qint8, torch.per_tensor_symmetric, -127, 127)
    assert (float(weight.eps), float(activation.eps)) == (2.0**-12, torch.finfo(torch.float32).eps)


@pytest.mark.rule("DTY-03")
def test_an_activation_keeps_the_bounds_of_input_and_output_both() -> None:
    narrow = DTypeWithConstraints(
        dtype=torch.quint8, quant_min_lower_bound=3, quant_max_upper_bound=200, scale_min_lower_bound=2.0**-12
    )
    other = DTypeWithConstraints(
        dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127, scale_min_lower_bound=2.0**-9
    )
    activation, _ = qconfig(claim_of(DTypeConfig(narrow, other), pattern=nn.ReLU))
    assert (activation.quant_min, activation.quant_max, float(activation.eps)) == (3, 127, 2.0**-9)


@pytest.mark.rule("NUM-02")
@pytest.mark.rule("OBS-02")
def test_symmetric_observation_puts_the_zero_point_of_a_relu_inside_its_range() -> None:
    for is_symmetric, expected in ((False, 0), (True, 128)):
        activation, _ = qconfig(claim_of(STATIC, pattern=nn.ReLU), is_symmetric=is_symmetric)
        activation(torch.linspace(0, 3, 9))
        assert int(activation.calculate_qparams()[1]) == expected


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
@pytest.mark.parametrize("flow", ("ptq", "qat"))
def test_every_weight_scheme_has_its_observer(scheme: str, flow: str) -> None:
    _, weight = qconfig(claim_of(STATIC, flow=flow, scheme=scheme))
    observer = weight.activation_post_process if flow == "qat" else weight
    assert isinstance(weight, FakeQuantize) == (flow == "qat")
    assert type(observer) is (PerChannelMinMaxObserver if "channel" in scheme else MinMaxObserver)
    assert settings(observer) == (torch.qint8, getattr(torch, scheme), -127, 127)


@pytest.mark.parametrize(
    ("pattern", "axis"),
    ((nn.Linear, 0), (nn.Conv2d, 0), (nn.ConvTranspose2d, 1), (F.conv_transpose1d, 1), ((nn.Conv2d, nn.ReLU), 0)),
    ids=("linear", "convolution", "transposed", "transposed function", "fused"),
)
def test_the_axis_of_channels_is_that_of_the_weights_layout(pattern: Any, axis: int) -> None:
    claim = claim_of(STATIC, pattern=pattern, scheme="per_channel_symmetric" if pattern is nn.Linear else "")
    assert claim.weight_axis == axis


@pytest.mark.rule("DTY-07")
def test_a_dynamic_qconfig_says_its_range() -> None:
    claim = claim_of(DYNAMIC)
    activation, weight = qconfig(claim)
    assert type(activation) is PlaceholderObserver and activation.is_dynamic
    assert (activation.dtype, activation.quant_min, activation.quant_max) == (torch.quint8, 0, 255)
    assert dynamic_range_of(claim) == (0, 255) and weight.dtype is torch.qint8
    seven = DTypeWithConstraints(dtype=torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127)
    assert dynamic_range_of(claim_of(DTypeConfig(seven, torch.float, torch.qint8, is_dynamic=True))) == (0, 127)
    assert dynamic_range_of(claim_of(STATIC)) is None


@pytest.mark.rule("QAT-01")
def test_a_dynamic_fake_quantize_forgets_earlier_batches() -> None:
    activation, _ = qconfig(claim_of(DYNAMIC, flow="qat"))
    assert isinstance(activation, FakeQuantize) and activation.is_dynamic
    observer: Any = activation.activation_post_process
    assert type(observer) is MovingAverageMinMaxObserver and observer.averaging_constant == 1
    for largest in (8.0, 2.0):
        observer(torch.tensor([0.0, largest]))
    assert float(observer.max_val) == 2.0


@pytest.mark.rule("DTY-08")
@pytest.mark.rule("CVT-04")
def test_half_precision_is_asked_for_and_nothing_is_measured() -> None:
    activation, weight = qconfig(claim_of(HALF))
    assert type(activation) is PlaceholderObserver and isinstance(weight, PlaceholderObserver)
    assert (activation.dtype, weight.dtype, bool(activation.is_dynamic)) == (torch.float16, torch.float16, False)
    dynamic = DTypeConfig(torch.float16, torch.float, torch.float16, torch.float, is_dynamic=True)
    assert qconfig(claim_of(dynamic))[0].is_dynamic


@pytest.mark.rule("CVT-11")
def test_a_weight_that_alone_is_quantized_has_a_row_of_qparams_each() -> None:
    activation, weight = qconfig(claim_of(WEIGHT_ONLY))
    assert type(activation) is PlaceholderObserver and activation.dtype is torch.float32
    assert type(weight) is PerChannelMinMaxObserver
    assert (weight.dtype, weight.qscheme, weight.ch_axis) == (
        torch.quint4x2,
        torch.per_channel_affine_float_qparams,
        0,
    )


@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("flow", ("ptq", "qat"))
def test_fixed_qparams_are_the_ones_that_are_prescribed(flow: str) -> None:
    claim = claim_of(FIXED, flow=flow, pattern=nn.Sigmoid)
    activation, _ = qconfig(claim)
    assert type(activation) is (FixedQParamsFakeQuantize if flow == "qat" else FixedQParamsObserver)
    scale, zero_point = activation.calculate_qparams()
    assert (float(scale), int(zero_point)) == (1 / 256, 0)
    assert (activation.quant_min, activation.quant_max) == (0, 255)


@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("ends", ("input", "output", "both"))
def test_qparams_that_are_fixed_at_one_end_are_those_of_the_one_observer(ends: str) -> None:
    fixed = DTypeWithConstraints(torch.qint8, scale_exact_match=0.7, zero_point_exact_match=-28)
    narrow = DTypeWithConstraints(torch.qint8, quant_min_lower_bound=-100, quant_max_upper_bound=101)
    first, last = (fixed if ends in (end, "both") else narrow for end in ("input", "output"))
    dtypes = DTypeConfig(first, last)
    activation, _ = qconfig(claim_of(dtypes, pattern=nn.Hardswish))
    assert [float(each) for each in activation.calculate_qparams()] == [float(torch.tensor(0.7)), -28]
    low, high = (-128, 127) if ends == "both" else (-100, 101)
    assert (activation.quant_min, activation.quant_max) == (low, high)
    assert fixed_qparams_of(dtypes) == (float(torch.tensor(0.7)), -28)
    assert fixed_range_of(dtypes) == pytest.approx(((low + 28) * 0.7, (high + 28) * 0.7))
    assert fixed_range_of(STATIC) is None


@pytest.mark.rule("DTY-01")
def test_nothing_is_fixed_of_any_dtype_or_of_a_float_result() -> None:
    anything = DTypeWithConstraints(scale_exact_match=0.5, zero_point_exact_match=0)
    assert fixed_qparams_of(DTypeConfig(torch.quint8, anything)) is None
    assert fixed_qparams_of(DTypeConfig(torch.quint8, SIGMOID, torch.qint8, is_dynamic=True)) is None


@pytest.mark.parametrize("flow", ("ptq", "qat"))
def test_what_stands_before_fixed_qparams_is_measured(flow: str) -> None:
    activation = wide_qconfig_for(claim_of(FIXED, flow=flow, pattern=nn.Sigmoid), BackendConfig("c")).activation()
    observer: Any = activation.activation_post_process if flow == "qat" else activation
    assert isinstance(activation, FakeQuantize) == (flow == "qat")
    observer(torch.tensor([-5.1, 20.4]))
    scale, zero_point = observer.calculate_qparams()
    assert float(scale) == pytest.approx(0.1) and int(zero_point) == 51
    assert settings(observer) == (torch.quint8, torch.per_tensor_affine, 0, 255)


@pytest.mark.rule("DTY-04")
@pytest.mark.parametrize("flow", ("ptq", "qat"))
def test_what_stands_before_fixed_qparams_has_the_smallest_scale_of_other_ops(flow: str) -> None:
    """A dtype config of fixed qparams cannot name one, and the machine has one all the same."""
    config = BackendConfig("c")
    for pattern, dtype, floor in ((nn.ReLU, torch.quint8, 2.0**-12), (nn.ReLU6, torch.qint8, 2.0**-6)):
        end = DTypeWithConstraints(dtype, scale_min_lower_bound=floor)
        config.set_backend_pattern_config(BackendPatternConfig(pattern).add_dtype_config(DTypeConfig(end, end)))
    activation = wide_qconfig_for(claim_of(FIXED, flow=flow, pattern=nn.Sigmoid), config).activation()
    observer: Any = activation.activation_post_process if flow == "qat" else activation
    observer(torch.tensor([-(2.0**-9), 2.0**-9]))
    assert float(observer.calculate_qparams()[0]) == 2.0**-12
