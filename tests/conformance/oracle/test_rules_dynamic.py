"""The oracle of values quantized while the model runs, and in half precision."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.backends.quantized_form import to_quantized_form
from fx_quant_conformance.backends.torch_engines.engine import engine
from fx_quant_conformance.conformance.bounds.dynamic import (
    bound_linear_products,
    dynamic_quantize,
    half_steps_of,
    halve,
)
from fx_quant_conformance.conformance.bounds.error_bounds import OpCall, U, Value, find_accumulator_step
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.refimpl import lower
from tests.conformance.support.dynamic_flows import (
    FLOAT16,
    IN_FLOAT,
    NATIVE,
    dynamic,
    excess,
    reference_of,
)

OPS: Any = torch.ops.quantized
ENGINES = [
    name for name in ("fbgemm", "x86", "qnnpack", "onednn") if name in torch.backends.quantized.supported_engines
]
FULL, REDUCED = (0, 255), (0, 127)


def on_grid(*shape: int, step: float = 2.0**-6, zero: int = 96) -> Tensor:
    """Values of 255 steps, both ends among them."""
    drawn = torch.randint(0, 256, shape)
    drawn.view(-1)[0], drawn.view(-1)[-1] = 0, 255
    return (drawn - zero) * step


# -- dynamic quantization ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-03")
def test_an_input_on_a_grid_of_255_steps_is_exactly_itself() -> None:
    torch.manual_seed(0)
    x = on_grid(4, 33)
    found = dynamic_quantize(Value(real=x.double()), *FULL)
    assert torch.equal(found.real, x.double())
    assert not found.errors
    assert found.step is not None
    assert float(found.step) == 2.0**-6
    assert 0 < found.scale_error < 4 * U


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 127), (-128, 127), (-64, 63)])
def test_integers_are_those_of_fractions(low: int, high: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(50) * 3 + 1
    found = dynamic_quantize(Value(real=x.double()), low, high)
    exact = [Fraction(float(each)) for each in x]
    top, bottom = (max(Fraction(0), *(sign * each for each in exact)) for sign in (1, -1))
    scale = (top + bottom) / (high - low)
    zero = low + round(bottom / scale)
    wanted = [float(scale * min(high - zero, max(low - zero, round(each / scale)))) for each in exact]
    assert not found.errors
    assert torch.allclose(found.real, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.rule("NUM-06")
def test_only_what_may_fall_to_either_side_of_a_tie_is_in_doubt() -> None:
    x = torch.tensor([-1.0, 1.0, 0.3, 0.0], dtype=torch.float64)  # the zero point is at a tie, and so are both ends
    found = dynamic_quantize(Value(real=x), *FULL)
    step = 2 / 255
    assert torch.allclose(found.errors["upstream"], torch.tensor([0.5, 0.5, 0, 0]).double() * step, rtol=1e-6)
    assert torch.allclose(found.real[:2], torch.tensor([-127.5, 127.5]).double() * step)
    assert float(found.real[2]) == pytest.approx(38 * step, abs=1e-12)


@pytest.mark.rule("NUM-02")
def test_a_range_of_one_sign_still_holds_zero_and_small_ranges_get_the_smallest_scale() -> None:
    x = torch.tensor([2.0, 5.1], dtype=torch.float64)
    assert float(_step(dynamic_quantize(Value(real=x), *FULL))) == pytest.approx(5.1 / 255)
    small = dynamic_quantize(Value(real=x * 2.0**-20), 0, 255, eps=2.0**-12)
    assert float(_step(small)) == 2.0**-12
    assert torch.equal(small.real, torch.zeros(2).double())


def _step(value: Value) -> Tensor:
    assert value.step is not None
    return value.step


def test_zeros_have_no_step_and_stay_zeros() -> None:
    found = dynamic_quantize(Value(real=torch.zeros(3).double()), *FULL)
    assert found.step is None
    assert torch.equal(found.real, torch.zeros(3).double())


def test_an_empty_input_is_quantized_to_nothing() -> None:
    assert dynamic_quantize(Value(real=torch.zeros(0, 4).double()), *FULL).real.shape == (0, 4)


@pytest.mark.slow
@pytest.mark.rule("CVT-03")
@pytest.mark.parametrize("is_reduced", [False, True])
def test_torch_quantizes_within_the_bounds(is_reduced: bool) -> None:
    for seed in range(40):
        torch.manual_seed(seed)
        x = torch.randn(2, 1 + seed % 40) * (1 + seed % 7) + seed % 5 - 2
        found = torch.quantize_per_tensor_dynamic(x, torch.quint8, is_reduced).dequantize().double()
        bound = dynamic_quantize(Value(real=x.double()), *(REDUCED if is_reduced else FULL))
        allowed = bound.error() + (bound.scale_error + 2 * U) * (bound.real.abs() + bound.error())
        assert bool(((found - bound.real).abs() <= allowed).all()), seed


@pytest.mark.slow
def test_every_input_within_its_error_is_quantized_within_the_bounds() -> None:
    for seed in range(24):
        torch.manual_seed(seed)
        x = torch.randn(30).double()
        error = torch.rand(30).double() * 10.0 ** -(1 + seed % 6)
        bound = dynamic_quantize(Value(real=x, errors={"upstream": error}), *FULL)
        for _ in range(5):
            found = dynamic_quantize(Value(real=x + error * (2 * torch.rand(30).double() - 1)), *FULL)
            allowed = bound.error() + bound.scale_error * bound.real.abs()
            assert bool(((found.real - bound.real).abs() <= allowed + found.error()).all()), seed


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None, bounds: tuple[int, int], **declared: Any) -> Any:
    """A dynamic linear layer's exact result, its slack and its step."""
    scale = weight.q_scale() if weight.qscheme() is torch.per_tensor_affine else weight.q_per_channel_scales()[:, None]
    step = torch.as_tensor(scale, dtype=torch.float64)
    given = dynamic_quantize(Value(real=x.double()), *bounds)
    w = Value(real=weight.int_repr().double() * step, step=step)
    result = F.linear(given.real, w.real, None if bias is None else bias.double())
    arguments = (given, w, bias)
    errors = bound_linear_products(
        OpCall(function=F.linear, args=arguments, kwargs={}, capabilities=Capabilities(**declared), result=result)
    )
    unit = find_accumulator_step(F.linear, given, w, result)
    assert unit is not None
    slack = sum(each.expand_as(result) for each in errors.values()) + 2 * U * result.abs()
    return result, slack / unit, unit


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_linear_layers_are_within_the_slack_and_other_ranges_are_not(name: str) -> None:
    """Seven bits: eight overflow 16 bits on CPUs without VNNI. Qnnpack takes eight, whatever it is asked for."""
    own, other = (FULL, REDUCED) if name == "qnnpack" else (REDUCED, FULL)
    for seed in range(12):
        torch.manual_seed(seed)
        x, features = on_grid(3, (1, 7, 64, 257)[seed % 4]) + (seed % 3) * 0.3, (1, 8, 65)[seed % 3]
        weight = torch.randn(features, x.shape[1])
        scales = weight.abs().amax(1) / 127
        quantized = (
            torch.quantize_per_channel(weight, scales, torch.zeros(features, dtype=torch.int64), 0, torch.qint8)
            if seed % 2
            else torch.quantize_per_tensor(weight, float(scales.max()), 0, torch.qint8)
        )
        bias = torch.randn(features) if seed % 5 else None
        with engine(name):
            found = OPS.linear_dynamic(x, OPS.linear_prepack(quantized, bias), own is REDUCED)
        exact, slack, step = linear_exact(x, quantized, bias, own)
        distance = (found.double() - exact).abs() / step
        assert bool((distance <= slack).all())
        assert float(slack.max()) < 0.5
        if x.shape[1] > 7:
            exact, slack, step = linear_exact(x, quantized, bias, other)
            assert float(((found.double() - exact).abs() / step - slack).max()) > 1


def test_a_bias_is_not_rounded_to_integers_where_the_scale_is_known_only_at_run_time() -> None:
    torch.manual_seed(0)
    x, bias = on_grid(2, 8), torch.randn(3)
    weight = torch.quantize_per_tensor(torch.randn(3, 8), 0.02, 0, torch.qint8)
    _, with_int32, _ = linear_exact(x, weight, bias, FULL, int32_bias=True)
    assert float(with_int32.max()) < 0.01


@pytest.mark.rule("NUM-04")
def test_products_that_cancel_to_zero_are_right_though_the_oracle_sums_in_float64() -> None:
    """Integers that add up to 0: every kernel with an integer accumulator returns 0."""
    torch.manual_seed(0)
    half, k, ends = torch.randint(-127, 128, (64, 32)), torch.randint(-96, 97, (5, 32)), torch.tensor([[-96, 159]] * 5)
    integers = torch.cat([half, half.flip(1), torch.zeros(64, 2)], 1).char()
    weight = torch._make_per_tensor_quantized_tensor(integers, 0.000972821435, 0)
    x = torch.cat([k, -k.flip(1), ends], 1) * 0.0371
    exact, slack, _ = linear_exact(x, weight, None, FULL)
    assert bool((exact != 0).any()), "else float64 rounds nothing here"
    assert bool((exact.abs() <= slack * 0.000972821435 * 0.0371).all())
    assert 0 < float(slack.max()) < 1e-7


@pytest.mark.rule("CVT-03")
def test_the_range_is_the_graphs_and_a_floor_wins_over_the_observers_eps() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(9, 5)).eval(), torch.randn(4, 9)
    reference, reduced = (reference_of(model, dynamic(*bounds)) for bounds in (FULL, REDUCED))
    assert excess(Walk(reference, IN_FLOAT).exact((x,)), reference(x)) <= 0
    assert excess(Walk(reduced, IN_FLOAT).exact((x,)), reference(x)) > 1
    floor = replace(IN_FLOAT, dynamic_scale_floor=1.0)
    (coarse,) = Walk(reference, floor).exact((x,))
    weight_scale: Any = reference.get_submodule("0").weight_scale
    assert float(coarse.step) == float(weight_scale)


# -- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("CVT-04")
def test_what_half_precision_holds_is_exact_and_else_both_readings_are_right() -> None:
    x = torch.tensor([1.5, 1 + 2.0**-12, -(2.0**-26), 3.14159274101257324], dtype=torch.float64)
    found = halve(Value(real=x))
    halved = x.half().double()
    for reading in (x, halved):
        assert bool(((reading - found.real).abs() <= found.error()).all())
    assert torch.allclose(found.error(), (x - halved).abs() / 2, rtol=1e-12)
    assert not halve(Value(real=halved)).errors
    assert torch.equal(halve(x.float()).real, halved)


def test_an_uncertain_input_is_halved_within_the_bounds() -> None:
    torch.manual_seed(0)
    x, error = torch.randn(200).double(), torch.rand(200).double() * 2.0**-9
    bound = halve(Value(real=x, errors={"upstream": error}))
    for _ in range(20):
        near = x + error * (2 * torch.rand(200).double() - 1)
        for reading in (near, near.half().double()):
            assert bool(((reading - bound.real).abs() <= bound.error()).all())


def test_half_steps_are_the_distances_of_neighbours() -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.rand(100).half() * 8, torch.tensor([1.0, 0.75, 2.0**-24, 2.0**-14, 32768.0]).half()])
    above = (values.view(torch.int16) + 1).view(torch.float16).double()
    assert torch.equal(half_steps_of(values.double()), above - values.double())
    assert torch.equal(half_steps_of(-values.double()), above - values.double())
    assert float(half_steps_of(torch.zeros(()).double())) == 2.0**-24


@pytest.mark.rule("CVT-04")
@pytest.mark.skipif("fbgemm" not in ENGINES, reason="this build of torch has no fbgemm")
def test_fbgemms_half_precision_layer_is_within_the_slack_and_sums_in_half_precision_are_not() -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        model, x = nn.Sequential(nn.Linear(64, 9)).eval(), torch.randn(3, 64).half().float()
        reference = reference_of(model, FLOAT16)
        (exact,) = Walk(reference, NATIVE).exact((x,))
        with engine("fbgemm"):
            found = lower(to_quantized_form(reference))(x)
        assert excess([exact], found) <= 0
        weight, bias = (each.detach().half() for each in model[0].parameters())
        halves = sum((x.half()[:, k, None] * weight[None, :, k] for k in range(64)), bias.expand(3, 9).clone())
        assert excess([exact], halves.float()) > 0


class Linear(nn.Module):
    """A linear layer by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 9)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return F.linear(x, self.weight, self.bias)


@pytest.mark.rule("CVT-02")
@pytest.mark.parametrize("qconfig", [dynamic(), FLOAT16], ids=["dynamic", "float16"])
def test_comparing_with_the_float_model_counts_what_quantization_changes(qconfig: Any) -> None:
    torch.manual_seed(0)
    model, x = Linear().eval(), torch.randn(4, 9)
    walk = Walk(reference_of(model, qconfig), Capabilities(), counts_weights=True)
    (exact,) = walk.exact((x,))
    with torch.no_grad():
        wanted = model.double()(x.double())
    bound = exact.slack * exact.step
    assert bool(((exact.real - wanted).abs() <= bound).all())
    assert 0 < float(bound.max()) < 0.5
