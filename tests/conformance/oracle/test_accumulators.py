"""What the oracle knows of the integers that a value is made of, and how a declared machine's slack follows from it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.backends.base import Capabilities, Requantize, RoundingMode
from fx_quant_conformance.conformance.oracle.evaluate import Walk
from fx_quant_conformance.conformance.oracle.exact import Exact
from fx_quant_conformance.conformance.oracle.grids import grid_of, is_constant
from fx_quant_conformance.refimpl.graph.invariants import is_quantize
from tests.conformance.support.by_hand import SX, SY, X, Y, quantized, weighted
from tests.conformance.support.flows import One, Two, drawn_integers, on_grid

U = 2.0**-24
TWICE = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)


def images(seed: int = 1) -> Tensor:
    return on_grid(drawn_integers(2, 3, 4, 4, seed=seed), **X)  # type: ignore[arg-type]


def exact(model: nn.Module, *inputs: Tensor, **capabilities: Any) -> Exact:
    (found,) = Walk(quantized(model, *inputs), Capabilities(**capabilities)).exact(inputs)
    return found


def step_of(found: Exact) -> float | None:
    assert found.accumulator is not None
    return None if found.accumulator.step is None else float(found.accumulator.step.flatten()[0])


@pytest.mark.rule("NUM-04")
def test_the_step_of_an_accumulator_is_that_of_its_products() -> None:
    layer = nn.Conv2d(3, 4, 3)
    _, scales = weighted(layer, False)
    assert step_of(exact(nn.Sequential(layer), images())) == float(SX * scales[0])
    relu = exact(nn.Sequential(layer, nn.ReLU()), images())
    assert step_of(relu) == float(SX * scales[0])


@pytest.mark.rule("NUM-04")
@pytest.mark.parametrize(
    ("function", "step"),
    [
        (torch.mul, float(SX * SY)),
        (torch.add, 0.0),
        (lambda x, y: torch.mean(x, (2, 3)), float(SX / 16)),
        (lambda x, y: F.avg_pool2d(x, 2), None),
        (lambda x, y: torch.flatten(x, 1), float(SX)),
        (lambda x, y: torch.cat([x, x]), float(SX)),
    ],
    ids=("mul", "add", "mean", "avg_pool", "flatten", "cat"),
)
def test_ops_without_a_weight_have_accumulators_too(function: Callable[..., Any], step: float | None) -> None:
    second = on_grid(drawn_integers(2, 3, 4, 4, seed=2), **Y)  # type: ignore[arg-type]
    model = Two(function) if function in (torch.mul, torch.add) else One(lambda x: function(x, x))
    found = exact(model, images(), second) if isinstance(model, Two) else exact(model, images())
    assert step_of(found) == step


@pytest.mark.rule("NUM-04")
def test_a_leaky_relu_has_one_factor_for_each_sign() -> None:
    found = exact(nn.Sequential(nn.LeakyReLU(0.125)), images())
    assert found.accumulator is not None and found.accumulator.step is not None
    assert torch.equal(found.accumulator.step, torch.where(found.real < 0, float(SX) / 8, float(SX)).double())
    flat = exact(nn.Sequential(nn.LeakyReLU(0.0)), images())
    assert flat.accumulator is not None and flat.accumulator.step is None


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("layer", (nn.Hardswish(), nn.ELU()), ids=str)
def test_a_function_is_none_of_integers_and_is_rounded_to_nearest(layer: nn.Module) -> None:
    found = exact(nn.Sequential(layer), images(), requantize=Requantize(rounding=RoundingMode.DOWN))
    assert found.accumulator is None
    assert found.requantize == Requantize() and found.target.half == 0.5


@pytest.mark.rule("NUM-03")
def test_an_end_of_a_clamp_is_marked() -> None:
    found = exact(nn.Sequential(nn.Hardtanh(-0.4, 0.4)), images(), requantize=Requantize(rounding=RoundingMode.DOWN))
    assert found.accumulator is not None and found.accumulator.ends is not None
    at_end = (found.real.abs() - torch.tensor(0.4).double()).abs() < 1e-7
    assert torch.equal(found.accumulator.ends, at_end) and bool(at_end.any()) and not bool(at_end.all())


@pytest.mark.rule("NUM-04")
def test_the_slack_of_a_declared_multiplier_is_that_of_its_bits() -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    weighted(layer, False)
    found = exact(nn.Sequential(layer), images(), requantize=Requantize(multiplier_bits=9))
    assert found.grid is not None
    r = (found.integers - found.grid.zero_point).abs()
    assert set(found.slack_by_cause) == {"final"}
    assert torch.allclose(found.slack, r * (2.0**-9 + 2 * U), rtol=1e-12, atol=0)


@pytest.mark.rule("NUM-03", "NUM-04")
@pytest.mark.parametrize(
    ("model", "name"),
    (
        (nn.Sequential(nn.Conv2d(3, 4, 3)), "nn.Conv2d"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "nn.Conv*"),
        (One(lambda x: F.avg_pool2d(x, 2)), "F.avg_pool2d"),
        (One(lambda x: x.mean(-1)), ".mean"),
        (One(lambda x: operator.add(x, x)), "operator.*"),
    ),
    ids=("conv", "conv and relu", "pool", "mean", "sum"),
)
def test_an_op_may_round_in_its_own_way(model: nn.Module, name: str) -> None:
    down = Requantize(multiplier_bits=12, rounding=RoundingMode.DOWN)
    found = exact(model, images(), requantize_of={name: down, "*": TWICE})
    assert found.requantize == down
    everywhere = exact(model, images(), requantize=down)
    assert torch.equal(found.slack, everywhere.slack) and torch.equal(found.target.centre, everywhere.target.centre)
    assert exact(model, images(), requantize_of={"nn.Linear": down}).requantize == Requantize()


@pytest.mark.rule("NUM-04")
def test_the_slack_of_two_roundings_follows_from_the_ratio_of_the_steps() -> None:
    layer = nn.Conv2d(3, 4, 3, bias=False)
    _, scales = weighted(layer, False)
    found = exact(nn.Sequential(layer), images(), requantize=TWICE)
    assert found.grid is not None
    ratio, shift = float(SX * scales[0]) / found.grid.scale, 0
    while ratio * 2.0 ** (shift + 1) < 1:
        shift += 1
    assert shift >= 1
    assert set(found.slack_by_cause["first rounding"].flatten().tolist()) == {0.5 * 2.0**-shift}
    assert "first rounding" not in exact(nn.Sequential(layer), images()).slack_by_cause


@pytest.mark.rule("NUM-04")
def test_summands_that_are_rescaled_by_a_multiplier_are_off_by_its_bits_each() -> None:
    second = on_grid(drawn_integers(2, 3, 4, 4, seed=2), **Y)  # type: ignore[arg-type]
    plain, coarse = (
        exact(Two(torch.add), images(), second, requantize=each)
        for each in (Requantize(), Requantize(multiplier_bits=10))
    )
    more = coarse.errors["rescale"] - plain.errors["rescale"]
    expected = 2.0**-10 * (images().double().abs() + second.double().abs())
    assert torch.allclose(more, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.rule("NUM-04")
def test_a_step_of_doubt_goes_on_where_a_declared_floor_may_fall_either_way() -> None:
    """What is rounded down between two layers is a step lower at most, and the second layer makes no more of it."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    model, x = Chain(), on_grid(drawn_integers(5, 4, seed=4), **X)  # type: ignore[arg-type]
    for layer in (model.first, model.second):
        weighted(layer, False)
    near, down = (
        exact(model, x, requantize=Requantize(rounding=mode)) for mode in (RoundingMode.NEAREST, RoundingMode.DOWN)
    )
    weight, scales = weighted(model.second, False)
    most = weight.double().abs().sum(1) * float(scales[0]) * _step_between(model, x)
    assert not torch.equal(near.real, down.real)
    assert bool(((near.real - down.real).abs() <= most).all())


def _step_between(model: nn.Module, x: Tensor) -> float:
    """The scale of the value between the two layers."""
    reference = quantized(model, x)
    quantizes = [node for node in reference.graph.nodes if is_quantize(node) and not is_constant(node)]
    return grid_of(reference, quantizes[1]).scale
