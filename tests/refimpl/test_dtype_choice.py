"""Choosing a dtype config, and saying why one does not fit (rules DTY-01 to DTY-09)."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
from torch import nn
from torch.ao.quantization import backend_config as torch_backend_config

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    FixedQParamsObserver,
    MinMaxObserver,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
)
from fx_quant_conformance.refimpl.prepare.dtype_choice import ObserverFacts, QConfigFacts, choose_dtype_config
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.qconfigs import minmax_qconfig

U8, S8 = torch.quint8, torch.qint8
OURS = minmax_qconfig(U8, S8, per_channel=False)
INPUT = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


def limited(**bounds: Any) -> list[DTypeConfig]:
    activation = DTypeWithConstraints(dtype=U8, **bounds)
    return [DTypeConfig(input_dtype=activation, output_dtype=activation, weight_dtype=S8, bias_dtype=torch.float)]


def facts_of(qconfig: QConfig) -> QConfigFacts:
    return QConfigFacts(activation=ObserverFacts.of(qconfig.activation()), weight=ObserverFacts.of(qconfig.weight()))


def activation(**arguments: Any) -> QConfig:
    return QConfig(MinMaxObserver.with_args(dtype=U8, **arguments), OURS.weight)


FIXED = QConfig(FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0, dtype=U8), OURS.weight)
DYNAMIC = QConfig(PlaceholderObserver.with_args(dtype=U8, is_dynamic=True), OURS.weight)
REFUSALS: list[tuple[QConfig, list[DTypeConfig], str]] = [
    (activation(), [DTypeConfig(S8, S8, S8)], "DTY-01: input dtype is torch.quint8, must be torch.qint8"),
    (activation(), [DTypeConfig(U8, torch.float, S8)], "DTY-01: output dtype is torch.quint8, must be torch.float32"),
    (activation(), [DTypeConfig(U8, U8, U8)], "DTY-01: weight dtype is torch.qint8, must be torch.quint8"),
    (
        activation(),
        limited(quant_min_lower_bound=1, quant_max_upper_bound=255),
        "DTY-03: input quant_min is 0, must be >= 1",
    ),
    (
        activation(),
        limited(quant_min_lower_bound=0, quant_max_upper_bound=127),
        "DTY-03: input quant_max is 255, must be <= 127",
    ),
    (
        activation(eps=2**-13),
        limited(scale_min_lower_bound=2**-12),
        f"DTY-04: input eps (smallest scale) is {2**-13}, must be >= {2**-12}",
    ),
    (
        activation(),
        limited(scale_exact_match=1 / 256, zero_point_exact_match=0),
        "DTY-05: input fixed (scale, zero point) is None, must be (0.00390625, 0)",
    ),
    (
        FIXED,
        limited(scale_exact_match=1 / 128, zero_point_exact_match=0),
        "DTY-05: input fixed (scale, zero point) is (0.00390625, 0), must be (0.0078125, 0)",
    ),
    (DYNAMIC, [DTypeConfig(U8, U8, S8)], "DTY-07: activation.is_dynamic is True, must be False"),
    (
        activation(),
        [DTypeConfig(U8, torch.float, S8, is_dynamic=True)],
        "DTY-07: activation.is_dynamic is False, must be True",
    ),
]


@pytest.mark.rule("DTY-06")
@pytest.mark.rule("DTY-09")
@pytest.mark.parametrize(("qconfig", "dtype_configs", "reason"), REFUSALS, ids=[reason[:6] for *_, reason in REFUSALS])
def test_a_refusal_names_rule_value_and_bound_and_the_pattern_stays_float(
    qconfig: QConfig, dtype_configs: list[DTypeConfig], reason: str
) -> None:
    config = BackendConfig().set_backend_pattern_config(
        BackendPatternConfig(nn.Linear).set_dtype_configs(dtype_configs)
    )
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    found = refimpl.prepare_fx(model, QConfigMapping().set_global(qconfig), backend_config=config)
    (decision,) = refimpl.explain(found).plan.decisions
    assert decision.dtype_config is None
    assert decision.reason == f"dtype config 0: {reason}"
    assert decision.refusals[0].rule == reason[:6]
    assert decision.pattern == "nn.Linear"
    assert torch.equal(found(INPUT), model(INPUT))


@pytest.mark.rule("DTY-09")
@pytest.mark.parametrize(
    ("constraints", "told"),
    [
        ({"dtype": S8}, []),
        (
            {"dtype": U8, "quant_min_lower_bound": 0, "quant_max_upper_bound": 127},
            ["quantization range must fall within"],
        ),
    ],
    ids=["dtype", "bound"],
)
def test_torch_says_nothing_of_a_dtype_and_of_a_bound_not_where(constraints: dict[str, Any], told: list[str]) -> None:
    """The layer stays float in both cases."""
    activation = torch_backend_config.DTypeWithConstraints(**constraints)
    dtypes = torch_backend_config.DTypeConfig(activation, activation, S8)
    entry = torch_backend_config.BackendPatternConfig(nn.Linear).add_dtype_config(dtypes)
    config = torch_backend_config.BackendConfig("test").set_backend_pattern_config(entry)
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = torch_fx.prepare_fx(model, flows.global_mapping(), (INPUT,), backend_config=config)
    assert [node.op for node in theirs.graph.nodes] == ["placeholder", "call_module", "output"], "nothing is observed"
    messages = [str(each.message) for each in caught if each.category is UserWarning]
    assert len(messages) == len(told) and all(what in messages[0] for what in told), messages
    assert not any("Linear" in message or "'0'" in message for message in messages)
    found = refimpl.prepare_fx(model, flows.global_mapping(), backend_config=config)
    (decision,) = refimpl.explain(found).plan.decisions
    assert (decision.node, decision.pattern, len(decision.refusals)) == ("_0", "nn.Linear", 1)


@pytest.mark.rule("DTY-01")
@pytest.mark.rule("DTY-02")
def test_the_first_match_in_list_order_is_used_and_none_is_a_wildcard() -> None:
    exact, wild = DTypeConfig(U8, U8, S8), DTypeConfig()
    facts = facts_of(OURS)
    assert choose_dtype_config(facts, [DTypeConfig(S8, S8, S8), exact, wild])[0] is exact
    assert choose_dtype_config(facts, [wild, exact])[0] is wild
    assert choose_dtype_config(facts, []) == (None, ())


@pytest.mark.rule("DTY-03")
@pytest.mark.rule("DTY-04")
@pytest.mark.parametrize("bound", ["quant_min_lower_bound", "quant_max_upper_bound", "scale_max_upper_bound"])
def test_one_bound_of_the_range_alone_and_a_largest_scale_are_not_enforced(bound: str) -> None:
    assert choose_dtype_config(facts_of(OURS), limited(**{bound: 1e-30}))[0] is not None


@pytest.mark.rule("DTY-05")
@pytest.mark.parametrize("made", ["ours", "torch's observer", "torch's fake quantize"])
@pytest.mark.parametrize("scale", [1 / 3, 1 / 256])
def test_only_these_very_fixed_qparams_as_float32_satisfy_an_exact_match(made: str, scale: float) -> None:
    ours, theirs = (
        module.FixedQParamsObserver.with_args(scale=scale, zero_point=0, dtype=U8) for module in (refimpl, flows.torchs)
    )
    fake = flows.torch_fakes.FixedQParamsFakeQuantize.with_args(observer=theirs)
    make = {"ours": ours, "torch's observer": theirs, "torch's fake quantize": fake}[made]
    facts = facts_of(QConfig(make, OURS.weight))
    for wanted, zero_point, fits in ((scale, 0, True), (scale, 1, False), (scale * (1 + 2**-20), 0, False)):
        exact = limited(scale_exact_match=wanted, zero_point_exact_match=zero_point)
        assert (choose_dtype_config(facts, exact)[0] is not None) is fits


HALF = {"dtype": torch.float16}


@pytest.mark.rule("DTY-08")
@pytest.mark.parametrize(
    ("activation_observer", "weight_dtype", "bias"),
    [
        (PlaceholderObserver.with_args(**HALF), torch.float16, torch.float16),
        (PlaceholderObserver.with_args(**HALF, is_dynamic=True), torch.float16, torch.float),
        (PlaceholderObserver.with_args(**HALF), torch.qint8, torch.float),
        (MinMaxObserver.with_args(dtype=U8), torch.float16, torch.float),
        (MinMaxObserver.with_args(dtype=U8), torch.qint8, torch.float),
    ],
)
def test_a_bias_is_float_but_half_beside_static_halves(activation_observer: Any, weight_dtype: Any, bias: Any) -> None:
    qconfig = QConfig(activation_observer, PlaceholderObserver.with_args(dtype=weight_dtype))
    facts = facts_of(qconfig)
    wanted = DTypeConfig(None, None, None, bias, is_dynamic=facts.activation.is_dynamic)
    other = DTypeConfig(
        None, None, None, torch.float16 if bias == torch.float else torch.float, is_dynamic=facts.activation.is_dynamic
    )
    chosen, refusals = choose_dtype_config(facts, [other, wanted])
    assert chosen is wanted
    assert [(refusal.rule, refusal.where, refusal.found) for refusal in refusals] == [
        ("DTY-08", "bias dtype", str(bias))
    ]


@pytest.mark.rule("DTY-08")
@pytest.mark.rule("DTY-01")
def test_what_is_said_of_weight_and_bias_does_not_matter_to_a_pattern_without_weight() -> None:
    weighted = [DTypeConfig(U8, U8, S8, torch.float16)]
    facts = facts_of(activation())
    assert choose_dtype_config(facts, weighted)[0] is None
    assert choose_dtype_config(facts, weighted, has_weight=False)[0] is weighted[0]
