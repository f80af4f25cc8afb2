"""qparams read off any observer, ours or torch's (rules NUM-02, CFG-14)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.observers import observers
from fx_quant_conformance.refimpl.observers.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
)
from fx_quant_conformance.refimpl.observers.histogram import HistogramObserver
from fx_quant_conformance.refimpl.observers.observers import (
    FixedQParamsObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    ReuseInputObserver,
)
from fx_quant_conformance.refimpl.observers.qparams import read_plain_observers, read_qparams
from tests.refimpl.support.both_flows import torch_fakes, torchs


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    "observer",
    [
        MinMaxObserver(),
        PerChannelMinMaxObserver(),
        HistogramObserver(),
        FakeQuantize(),
        torchs.MinMaxObserver(),
        torchs.PerChannelMinMaxObserver(),
        torch_fakes.FusedMovingAvgObsFakeQuantize(),
    ],
    ids=lambda observer: f"{type(observer).__module__}.{type(observer).__name__}",
)
def test_without_data_the_scale_is_1_and_a_warning_says_so(observer: Any) -> None:
    name = type(getattr(observer, "activation_post_process", observer)).__name__
    with pytest.warns(UserWarning, match=f"{name} has seen no data: run the prepared model on calibration inputs"):
        found = read_qparams(observer)
    assert (found.scale.tolist(), found.zero_point.tolist()) == ([1.0], [0])


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize(
    ("observer", "expected"),
    [
        (torchs.MinMaxObserver(dtype=torch.qint8), (torch.qint8, -128, 127, None)),
        (torchs.MinMaxObserver(quant_min=0, quant_max=127), (torch.quint8, 0, 127, None)),
        (torchs.HistogramObserver(), (torch.quint8, 0, 255, None)),
        (torchs.PerChannelMinMaxObserver(ch_axis=1, dtype=torch.qint8), (torch.qint8, -128, 127, 1)),
        (torch_fakes.FakeQuantize(quant_min=0, quant_max=127), (torch.quint8, 0, 127, None)),
        (FakeQuantize(quant_min=0, quant_max=127), (torch.quint8, 0, 127, None)),
        (FakeQuantize(PerChannelMinMaxObserver, dtype=torch.qint8, ch_axis=1), (torch.qint8, -128, 127, 1)),
        (FusedMovingAvgObsFakeQuantize(reduce_range=True), (torch.quint8, 0, 127, None)),
        (
            FixedQParamsFakeQuantize(FixedQParamsObserver.with_args(scale=0.5, zero_point=3)),
            (torch.quint8, 0, 255, None),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_observers_and_fake_quantizes_are_read_by_protocol(observer: Any, expected: tuple[Any, ...]) -> None:
    observer(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    found = read_qparams(observer)
    assert (found.dtype, found.quant_min, found.quant_max, found.axis) == expected
    assert torch.equal(found.scale, observer.calculate_qparams()[0])


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    "observer", [PlaceholderObserver(dtype=torch.quint8), ReuseInputObserver(), torchs.ReuseInputObserver()], ids=repr
)
def test_observers_without_qparams_are_named(observer: Any) -> None:
    with pytest.raises(QConfigError, match=type(observer).__name__):
        read_qparams(observer)


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("module", (observers, torchs), ids=("ours", "torch's"))
def test_plain_observers_are_read_together_as_they_are_one_by_one(module: Any) -> None:
    made = []
    for seed, (dtype, scheme) in enumerate(
        ((torch.quint8, torch.per_tensor_affine), (torch.qint8, torch.per_tensor_symmetric)) * 4
    ):
        observer = (module.MinMaxObserver, module.MovingAverageMinMaxObserver)[seed % 3 == 0](
            dtype=dtype, qscheme=scheme, eps=2**-12 if seed > 5 else 2**-23
        )
        observer(torch.randn(9, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed - 5))
        made.append(observer)
    unseen, per_channel = module.MinMaxObserver(dtype=torch.quint8), module.PerChannelMinMaxObserver(dtype=torch.qint8)
    found = read_plain_observers([*made, unseen, per_channel])
    assert set(found) == {id(observer) for observer in made}
    for observer in made:
        alone, together = read_qparams(observer), found[id(observer)]
        assert torch.equal(alone.scale, together.scale) and torch.equal(alone.zero_point, together.zero_point)
        ends = (together.dtype, together.quant_min, together.quant_max, together.axis)
        assert (alone.dtype, alone.quant_min, alone.quant_max, alone.axis) == ends


@pytest.mark.rule("NUM-02")
def test_a_real_zero_point_is_that_of_the_dtypes_own_range_where_torch_takes_0_for_its_start() -> None:
    """Rows from 0 to 1 take the whole of −128 … 127; torch's zero point puts half of them beyond the end."""
    rows = torch.linspace(0, 1, 256).repeat(2, 1)
    largest = []
    for module in (observers, torchs):
        observer = module.PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_affine_float_qparams)
        observer(rows)
        scale, zero_point = observer.calculate_qparams()
        back = torch.quantize_per_channel(rows, scale, zero_point, 0, torch.qint8).dequantize()
        largest.append(float((back - rows).abs().max()))
    assert largest[0] <= 0.51 / 255  # half a step, and float32's rounding
    assert largest[1] > 0.49
