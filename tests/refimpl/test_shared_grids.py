"""Grids that ops share: fixed ones stay with the op that fixes them (OBS-17), and what is lost is said (OBS-19)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.tracer import trace
from fx_quant_conformance.refimpl.prepare.grid_losses import GridLoss, LinearOp, measure_loss, read_linear_op
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.ratios import make, run, torch_ratios

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.a, self.b, self.body = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), body
        self.sigmoid, self.softmax = nn.Sigmoid(), nn.Softmax(1)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


LEAVING: dict[str, Body] = {
    "sigmoid": lambda net, x: net.sigmoid(net.a(x)) * 2 - 0.5,
    "hardsigmoid": lambda net, x: F.hardsigmoid(net.a(x)) * 3 - 1,
    "tanh": lambda net, x: net.b(torch.tanh(net.a(x)) * 3.0 + 1.0),
    "softmax": lambda net, x: net.softmax(net.a(x)) + 2,
    "negative, number first": lambda net, x: -1 * torch.sigmoid(net.a(x)),
    "relu after": lambda net, x: F.relu(torch.tanh(net.a(x)) * 4),
    "a number of the graph": lambda net, x: torch.sigmoid(net.a(x)) * x.size(1),
    "through reshape": lambda net, x: torch.sigmoid(net.a(x)).reshape(4, -1) * 4,
    "through pool and cat": lambda net, x: torch.cat([F.max_pool2d(net.a(x).sigmoid(), 2)] * 2, 1) + 1,
    "cat, the fixed one first": lambda net, x: torch.cat([net.a(x).sigmoid(), net.a(x)], 1),
    "cat, the fixed one last": lambda net, x: torch.cat([net.a(x), net.a(x).sigmoid()], 1),
    "stack of two fixed ones": lambda net, x: torch.stack([net.a(x).sigmoid(), net.a(x).tanh()], 1) * 2,
}


JOINED = {name for name in LEAVING if "cat" in name or "stack" in name}
"""In training one moving average sees values of several ranges in turn, and is the range of none after one step."""


@pytest.mark.slow
@pytest.mark.rule("OBS-17")
@pytest.mark.parametrize(
    ("name", "is_qat"),
    [*((name, False) for name in LEAVING), *((name, True) for name in LEAVING if name not in JOINED)],
)
def test_what_leaves_a_fixed_grid_is_on_a_grid_of_its_own(name: str, is_qat: bool) -> None:
    made = make(Net(LEAVING[name]), IMAGES, engine="qnnpack" if is_qat else "x86", is_qat=is_qat)
    assert made.worst > 25, made.ratios()


@pytest.mark.rule("OBS-17")
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "softmax", "cat, the fixed one first"])
def test_torchs_reference_model_clips_it(name: str) -> None:
    """The other side of the row of deviations.md; of arithmetic torch's kernels choose another grid."""
    ratios = torch_ratios(Net(LEAVING[name]), IMAGES)
    assert ratios["reference"] < 15, ratios
    assert (ratios["lowered"] > 25) == ("cat" not in name), ratios


@pytest.mark.rule("OBS-17")
@pytest.mark.parametrize("name", ["sigmoid", "relu after"])
def test_native_lowering_stays_as_it_is(name: str) -> None:
    ours, torchs = make(Net(LEAVING[name]), IMAGES).ratios(), torch_ratios(Net(LEAVING[name]), IMAGES)
    assert ours["lowered"] == pytest.approx(torchs["lowered"], abs=0.3)


def own_grid(body: Body, config: Any = None, is_qat: bool = False) -> Any:
    """Return the observer of the last slot."""
    prepare: Any = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    name = f"get_default_{'qat_' if is_qat else ''}qconfig_mapping"
    prepared = prepare(Net(body).train(is_qat), getattr(refimpl, name)("x86"), (IMAGES,), backend_config=config)
    return prepared.get_submodule(refimpl.explain(prepared).plan.slots[-1].name)


@pytest.mark.rule("OBS-17")
def test_its_grid_is_fixed_too_and_a_product_loses_nothing() -> None:
    for is_qat in (False, True):
        observer = own_grid(lambda net, x: torch.tanh(net.a(x)) * -3.0, is_qat=is_qat)
        scale, zero_point = map(float, observer.calculate_qparams())
        assert (scale, zero_point) == (3 * 2 / 256, 255 - 128), "the range of tanh, mirrored, three times as wide"
        assert type(observer).__name__ == ("FixedQParamsFakeQuantize" if is_qat else "FixedQParamsObserver")
    made = make(Net(lambda net, x: torch.tanh(net.a(x)) * -3.0), IMAGES)
    alone = make(Net(lambda net, x: torch.tanh(net.a(x))), IMAGES)
    for form in ("reference", "decomposed"):
        product, tanh = (run(each.forms[form], (IMAGES,)) for each in (made, alone))
        assert torch.allclose(product, tanh * -3.0, atol=1e-6, rtol=0), "derived: every integer of tanh has its own"


@pytest.mark.rule("OBS-17")
def test_its_grid_holds_0_and_all_results() -> None:
    observer = own_grid(lambda net, x: torch.sigmoid(net.a(x)) + 3)
    scale, zero_point = map(float, observer.calculate_qparams())
    assert zero_point == 0 and scale * 255 == pytest.approx(3 + 255 / 256)


@pytest.mark.rule("OBS-17")
def test_where_the_number_is_not_known_or_the_config_forbids_it_the_qconfig_makes_the_observer() -> None:
    assert isinstance(own_grid(lambda net, x: torch.sigmoid(net.a(x)) * x.size(1)), refimpl.HistogramObserver)
    config = refimpl.default_backend_config()
    bound = refimpl.DTypeWithConstraints(torch.quint8, quant_min_lower_bound=0, quant_max_upper_bound=127)
    for entry in config.configs:
        if entry._num_tensor_args_to_observation_type:
            entry.set_dtype_configs([refimpl.DTypeConfig(bound, bound)])
    assert isinstance(own_grid(lambda net, x: torch.sigmoid(net.a(x)) * 2, config), refimpl.HistogramObserver)


STAYING: dict[str, Body] = {
    "minus a half": lambda net, x: torch.tanh(net.a(x)) * -0.5,
    "zero": lambda net, x: torch.sigmoid(net.a(x)) + 0,
    "cat of two": lambda net, x: torch.cat([net.a(x).sigmoid(), net.b(net.a(x)).sigmoid()], 1),
}


@pytest.mark.rule("OBS-17")
@pytest.mark.parametrize("name", STAYING)
def test_what_cannot_leave_it_shares_it_as_the_config_says(name: str) -> None:
    slots = refimpl.explain(make(Net(STAYING[name]), IMAGES).prepared).plan.slots
    assert not [slot for slot in slots if slot.rule == "OBS-17"]
    assert [slot for slot in slots if slot.rule in ("OBS-02", "OBS-12")]


# -- what is lost on shared grids -------------------------------------------------------------------------------------


PIXELS = torch.randint(0, 256, (4, 3, 6, 6), generator=torch.Generator().manual_seed(0)).float()
LOSING: dict[str, tuple[Body, Tensor, float]] = {
    "normalized": (lambda net, x: net.a(x * (1 / 255)), PIXELS, 20 * math.log10(255)),
    "widened": (lambda net, x: net.b(net.a(x) * 10), IMAGES, 20.0),
    "shifted": (lambda net, x: net.a(x) + 100, IMAGES, 30.0),
}


def losses_of(model: Any) -> tuple[GridLoss, ...]:
    return refimpl.explain(model).grid_losses


@pytest.mark.rule("OBS-19")
@pytest.mark.parametrize("name", LOSING)
def test_convert_warns_once_for_each_node_that_loses_more_than_two_bits(name: str) -> None:
    body, x, expected = LOSING[name]
    prepared = make(Net(body), x).prepared
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx):
        with pytest.warns(UserWarning) as caught:
            model = convert(prepared)
        (message,) = [str(each.message) for each in caught if "loses" in str(each.message)]
        (loss,) = losses_of(model)
        assert loss.decibels == pytest.approx(expected, abs=4.0 if name == "shifted" else 1e-6)
        assert f"{loss.node} (operator." in message and f"loses {loss.decibels:.0f} dB" in message
        assert "{1: OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT" in message
        (row,) = [row for row in refimpl.explain(model).rows() if row["node"] == loss.node]
        assert row["reason"] == f"OBS-19: it loses {loss.decibels:.0f} dB on the grid of its input"
        assert refimpl.explain(model).to_dict()["grid_losses"][0]["node"] == loss.node


@pytest.mark.rule("OBS-19")
def test_torch_says_nothing_of_a_loss() -> None:
    """The other side of the row of deviations.md."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ratios = torch_ratios(Net(LOSING["normalized"][0]), PIXELS)
    assert ratios["reference"] < 10
    assert not [each for each in caught if "mul" in str(each.message)]


@pytest.mark.rule("OBS-19")
def test_the_number_is_what_a_grid_of_its_own_would_win() -> None:
    """Derived, not tuned: a uniform value with the step s loses s²/12, so that a step c times as wide loses 20·lg c."""
    shared = make(Net(lambda net, x: x * (1 / 16)), torch.rand(4, 3, 32, 32), engine="qnnpack")
    config = flows.our_config("qnnpack").to_dict()
    for entry in config["configs"]:
        if entry["pattern"] is not None and "num_tensor_args_to_observation_type" in entry:
            entry["num_tensor_args_to_observation_type"] = {1: refimpl.ObservationType(0)}
    own_config = refimpl.BackendConfig.from_dict(config)
    mapping = refimpl.get_default_qconfig_mapping("qnnpack")
    prepared = refimpl.prepare_fx(
        Net(lambda net, x: x * (1 / 16)).eval(), mapping, shared.inputs, backend_config=own_config
    )
    prepared(*shared.inputs)
    own = refimpl.convert_to_reference_fx(prepared)
    x = shared.inputs[0]
    errors = [float((model(x) - x / 16).square().mean()) for model in (shared.forms["reference"], own)]
    (loss,) = losses_of(shared.forms["reference"])
    won = 10 * math.log10(errors[0] / errors[1])
    assert won == pytest.approx(loss.decibels, abs=3.5), "the input's own rounding is in both"
    assert losses_of(own) == ()


@pytest.mark.rule("OBS-19")
def test_lowered_kernels_with_a_grid_of_their_own_lose_only_on_the_input() -> None:
    for name, warns in (("normalized", False), ("widened", True), ("shifted", True)):
        body, x, _ = LOSING[name]
        prepared = make(Net(body), x).prepared
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            refimpl.convert_fx(prepared)
        assert any("loses" in str(each.message) for each in caught) == warns, name


@pytest.mark.rule("OBS-19")
@pytest.mark.parametrize("body", [lambda net, x: x * 0.3, lambda net, x: x + x])
def test_little_losses_are_in_the_log_only(body: Body) -> None:
    made = make(Net(body), IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = refimpl.convert_to_reference_fx(made.prepared)
    assert all(0 <= loss.decibels <= 12 for loss in losses_of(model))
    assert not [row for row in refimpl.explain(model).rows() if "OBS-19" in row["reason"]]


@pytest.mark.rule("OBS-19")
def test_the_report_of_sample_inputs_has_the_number_too() -> None:
    made = make(Net(LOSING["normalized"][0]), PIXELS)
    (loss,) = refimpl.explain(made.prepared, (PIXELS,)).log.grid_losses
    assert loss.of_result == pytest.approx(20 * math.log10(255)) and loss.of_input == 0.0


class Ops(nn.Module):
    def forward(self, x: Tensor, n: Any) -> Any:
        return (
            2 + x,
            torch.add(x, other=2),
            x - 2,
            2 - x,
            x * 3,
            x / 4,
            x + x,
            4 / x,
            torch.add(x, 2, alpha=3),
            x + n,
            x * True,
            x**2,
        )


@pytest.mark.rule("OBS-19")
def test_which_ops_compute_a_line() -> None:
    nodes = [node for node in trace(Ops()).graph.nodes if node.op.startswith("call")]
    plus, times = LinearOp(1.0, 2.0, 2.0), LinearOp(3.0, 0.0, 3.0)
    minus, from_number, over = LinearOp(1.0, -2.0, 2.0), LinearOp(-1.0, 2.0, 2.0), LinearOp(0.25, 0.0, 4.0)
    expected = [plus, plus, minus, from_number, times, over]
    assert [read_linear_op(node) for node in nodes] == [*expected, *[None] * 6]
    assert times.map_range(-1.0, 2.0) == (-3.0, 6.0) and LinearOp(-1.0, 1.0, 1.0).map_range(0.0, 0.5) == (0.5, 1.0)


@pytest.mark.rule("OBS-19")
def test_what_is_lost_by_a_factor_and_by_a_shift() -> None:
    wide, narrow = (measure_loss("y", "mul", LinearOp(c, 0.0, c), 8.0) for c in (10.0, 0.1))
    assert (wide.of_input, wide.of_result) == pytest.approx((20.0, 0.0))
    assert (narrow.of_input, narrow.of_result) == pytest.approx((0.0, 20.0))
    shift = measure_loss("y", "add", LinearOp(1.0, -4.0, 4.0), 8.0)
    assert (shift.of_input, shift.of_result) == pytest.approx((20 * math.log10(2),) * 2)
    assert measure_loss("y", "add", LinearOp(1.0, 8.0, 8.0), 8.0).decibels == math.inf, "nothing of the value is left"
    assert measure_loss("y", "mul", LinearOp(0.0, 0.0, 0.0), 8.0).decibels == 0.0, "a result that is 0 has no precision"
