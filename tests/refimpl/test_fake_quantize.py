"""Fake quantizes beside torch's own, bit for bit: values, gradients, switches, state (rules QAT-01, NUM-01)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's fake quantizes need it loaded before them
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.observers import fake_quantize, histogram, observers
from fx_quant_conformance.refimpl.observers.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
)
from tests.refimpl.support.both_flows import torch_fakes, torchs

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")  # torch's

SIGNED = {"dtype": torch.qint8, "quant_min": -128, "quant_max": 127}
TENSOR = SIGNED | {"qscheme": torch.per_tensor_symmetric}
CHANNEL = SIGNED | {"qscheme": torch.per_channel_symmetric}
ROWS = {"qscheme": torch.per_channel_affine_float_qparams, "averaging_constant": 1}
# fake quantize, its observer, and the arguments of both
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "default": ("FakeQuantize", "MovingAverageMinMaxObserver", {}),
    "reduced": (
        "FakeQuantize",
        "MovingAverageMinMaxObserver",
        {"quant_min": 0, "quant_max": 255, "reduce_range": True},
    ),
    "minmax": ("FakeQuantize", "MinMaxObserver", TENSOR | {"eps": 2**-12}),
    "histogram": ("FakeQuantize", "HistogramObserver", {"bins": 64}),
    "dynamic": ("FakeQuantize", "MovingAverageMinMaxObserver", {"is_dynamic": True, "averaging_constant": 1}),
    "per channel": ("FakeQuantize", "MovingAveragePerChannelMinMaxObserver", CHANNEL | {"ch_axis": 0}),
    "per channel 1": ("FakeQuantize", "PerChannelMinMaxObserver", SIGNED | {"ch_axis": 1}),
    "embedding": ("FakeQuantize", "MovingAveragePerChannelMinMaxObserver", ROWS | {"dtype": torch.quint8}),
    "embedding 4 bits": ("FakeQuantize", "MovingAveragePerChannelMinMaxObserver", ROWS | {"dtype": torch.quint4x2}),
    "fused": ("FusedMovingAvgObsFakeQuantize", "MovingAverageMinMaxObserver", {}),
    "fused reduced": ("FusedMovingAvgObsFakeQuantize", "MovingAverageMinMaxObserver", {"reduce_range": True}),
    "fused weight": ("FusedMovingAvgObsFakeQuantize", "MovingAverageMinMaxObserver", TENSOR),
    "fused per channel": ("FusedMovingAvgObsFakeQuantize", "MovingAveragePerChannelMinMaxObserver", CHANNEL),
}


def both(kind: str) -> tuple[Any, Any]:
    """Make our fake quantize and torch's of one kind, each with its own observer."""
    name, observer, made = KINDS[kind]
    ours = histogram.HistogramObserver if observer == "HistogramObserver" else getattr(observers, observer)
    return (
        getattr(fake_quantize, name)(observer=ours, **made),
        getattr(torch_fakes, name)(observer=getattr(torchs, observer), **made),
    )


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) * scale


def run(fake: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the weighted sum of it."""
    leaf = x.clone().requires_grad_()
    out = fake(leaf)
    (out * torch.arange(1.0, x.numel() + 1).reshape(x.shape)).sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def assert_same_state(ours: Any, theirs: Any, what: str) -> None:
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys(), f"{what}: keys of the state dict differ"
    for name in expected:
        assert found[name].dtype == expected[name].dtype, f"{what}: {name} is {found[name].dtype}"
        assert torch.equal(found[name], expected[name]), f"{what}: {name} is {found[name]}, torch's {expected[name]}"


@pytest.mark.slow
@pytest.mark.rule("QAT-01", "NUM-01")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 1e4]),
    later=st.sampled_from([0.1, 3.0]),
)
def test_values_gradients_and_state_are_torchs(kind: str, seeds: list[int], scale: float, later: float) -> None:
    ours, theirs = both(kind)
    for step, seed in enumerate(seeds):
        x = drawn(seed, scale * later**step)
        for found, expected in zip(run(ours, x), run(theirs, x), strict=True):
            assert torch.equal(found, expected), f"{kind}, batch {step}: {found}, torch's {expected}"
        assert_same_state(ours, theirs, f"{kind}, batch {step}")
    for found, expected in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), f"{kind}: qparams"


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize("kind", KINDS)
def test_the_switches_do_what_torchs_do(kind: str) -> None:
    ours, theirs = both(kind)
    both_are = nn.ModuleList([ours]), nn.ModuleList([theirs])
    for step, (name, on) in enumerate(
        [
            ("enable_observer", True),
            ("disable_fake_quant", False),
            ("disable_observer", False),
            ("enable_fake_quant", True),
            ("enable_observer", True),
        ]
    ):
        both_are[0].apply(getattr(fake_quantize, name))
        both_are[1].apply(getattr(torch_fakes, name))
        x = drawn(step, 1.0 + step)
        found, expected = ours(x), theirs(x)
        assert torch.equal(found, expected), f"{kind} after {name}"
        assert_same_state(ours, theirs, f"{kind} after {name}")
        flag = ours.fake_quant_enabled if "fake" in name else ours.observer_enabled
        assert bool(flag) is on


@pytest.mark.rule("CFG-14")
def test_the_switches_reach_torchs_fake_quantizes_and_leave_other_modules_alone() -> None:
    fakes: list[Any] = [torch_fakes.FakeQuantize(), FakeQuantize()]
    model = nn.Sequential(nn.Linear(2, 2), *fakes)
    model.apply(fake_quantize.disable_observer)
    model.apply(fake_quantize.disable_fake_quant)
    assert [int(each.observer_enabled) for each in fakes] == [0, 0]
    assert [int(each.fake_quant_enabled) for each in fakes] == [0, 0]


@pytest.mark.rule("DTY-05")
def test_fixed_qparams_stay_as_they_are() -> None:
    made = {"scale": 2 / 256, "zero_point": 128}
    ours = FixedQParamsFakeQuantize(observers.FixedQParamsObserver.with_args(**made))
    theirs = torch_fakes.FixedQParamsFakeQuantize(torchs.FixedQParamsObserver.with_args(**made))
    for seed in range(3):
        x = drawn(seed, 2.0)
        for found, expected in zip(run(ours, x), run(theirs, x), strict=True):
            assert torch.equal(found, expected), f"batch {seed}"
    assert_same_state(ours, theirs, "fixed")
    assert [float(part) for part in ours.calculate_qparams()] == [2 / 256, 128]
    copied = copy.deepcopy(ours)
    assert copied.scale is copied.activation_post_process.scale, "a copy's qparams are its observer's"


@pytest.mark.slow
@pytest.mark.rule("CVT-12")
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_load_either_way(kind: str) -> None:
    (ours, theirs), (fresh, foreign) = both(kind), both(kind)
    ours(drawn(0)), theirs(drawn(1))
    foreign.load_state_dict(ours.state_dict())
    assert_same_state(ours, foreign, f"{kind}: torch's, loaded from ours")
    fresh.load_state_dict(theirs.state_dict())
    assert_same_state(fresh, theirs, f"{kind}: ours, loaded from torch's")
    assert torch.equal(fresh(drawn(2)), theirs(drawn(2)))


@pytest.mark.rule("CFG-14")
def test_torchs_observer_does_inside_ours() -> None:
    ours = FakeQuantize(observer=torchs.MinMaxObserver.with_args(dtype=torch.qint8), quant_min=-64, quant_max=63)
    theirs = torch_fakes.FakeQuantize(
        observer=torchs.MinMaxObserver.with_args(dtype=torch.qint8), quant_min=-64, quant_max=63
    )
    assert torch.equal(ours(drawn(0)), theirs(drawn(0)))
    assert_same_state(ours, theirs, "torch's observer")


@pytest.mark.rule("QAT-01")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: FakeQuantize(observers.PlaceholderObserver), "PlaceholderObserver has no range of integers"),
        (lambda: FakeQuantize(quant_min=0, quant_max=256), r"range 0\.\.256 is empty or outside 0\.\.255"),
        (lambda: FusedMovingAvgObsFakeQuantize(observers.MinMaxObserver), "moving-average observer, found MinMaxObs"),
        (lambda: FixedQParamsFakeQuantize(observers.MinMaxObserver), "MinMaxObserver has no fixed scale"),
    ],
)
def test_observers_that_do_not_fit_are_refused(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(QConfigError, match=why):
        make()
