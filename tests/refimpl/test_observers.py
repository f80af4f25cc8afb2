"""Observers beside torch's own, bit for bit (rules NUM-01, NUM-02, DTY-05, QCM-01)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's observers need it loaded before them
from both_flows import torch_fakes, torchs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from refimpl import FixedQParamsObserver, MinMaxObserver, PerChannelMinMaxObserver, PlaceholderObserver, QConfigError
from refimpl.observers import Constructor, QParams, dtype_range, read_qparams

RANGES: dict[torch.dtype, list[tuple[int, int] | None]] = {
    torch.quint8: [None, (0, 127), (0, 255), (0, 15)],
    torch.qint8: [None, (-127, 127), (-64, 63), (-128, 127)],
}
BOUNDS = st.one_of(
    *(st.floats(-limit, limit, allow_subnormal=False) for limit in (1e4, 1e-30, 1e37)),
    st.just(0.0),
)
PAIRS = st.one_of(
    st.tuples(BOUNDS, BOUNDS),
    st.tuples(BOUNDS, BOUNDS).map(lambda pair: (abs(pair[0]), abs(pair[1]))),
    st.tuples(BOUNDS, BOUNDS).map(lambda pair: (-abs(pair[0]), -abs(pair[1]))),
)
SCHEMES = st.sampled_from(
    [(dtype, bounds, symmetric) for dtype, choices in RANGES.items() for bounds in choices for symmetric in (0, 1)]
)


def arguments(dtype: torch.dtype, bounds: tuple[int, int] | None) -> dict[str, Any]:
    return {"dtype": dtype} | ({} if bounds is None else {"quant_min": bounds[0], "quant_max": bounds[1]})


def assert_same_qparams(ours: Any, theirs: Any, what: str) -> None:
    """The scales agree bit for bit, the zero points exactly; torch's shapes of one element count as ours of none."""
    (scale, zero_point), (their_scale, their_zero_point) = ours.calculate_qparams(), theirs.calculate_qparams()
    assert torch.equal(scale.reshape(-1), their_scale.reshape(-1)), f"{what}: scales {scale} and torch's {their_scale}"
    assert zero_point.reshape(-1).tolist() == their_zero_point.reshape(-1).tolist(), f"{what}: zero points differ"


@pytest.mark.rule("NUM-02")
@settings(max_examples=300, derandomize=True, deadline=None)
@given(pair=PAIRS, scheme=SCHEMES, eps=st.sampled_from([torch.finfo(torch.float32).eps, 2**-12, 1e-9]))
def test_min_max_qparams_are_torchs(pair: tuple[float, float], scheme: tuple[Any, Any, int], eps: float) -> None:
    dtype, bounds, symmetric = scheme
    qscheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    made = arguments(dtype, bounds) | {"qscheme": qscheme, "eps": eps}
    ours, theirs = MinMaxObserver(**made), torchs.MinMaxObserver(**made)
    for value in pair:
        x = torch.tensor([value])
        ours(x), theirs(x)
    assert_same_qparams(ours, theirs, f"range {pair} with {made}")


@pytest.mark.rule("NUM-02")
@settings(max_examples=100, derandomize=True, deadline=None)
@given(pairs=st.lists(PAIRS, min_size=1, max_size=4), scheme=SCHEMES, axis=st.integers(0, 2))
def test_per_channel_qparams_are_torchs(
    pairs: list[tuple[float, float]], scheme: tuple[Any, Any, int], axis: int
) -> None:
    dtype, bounds, symmetric = scheme
    qscheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    made = arguments(dtype, bounds) | {"qscheme": qscheme, "ch_axis": axis}
    ours, theirs = PerChannelMinMaxObserver(**made), torchs.PerChannelMinMaxObserver(**made)
    x = torch.tensor(pairs).reshape(len(pairs), 2, 1).movedim(0, axis)
    for batch in (x, x * 0.5):
        ours(batch), theirs(batch)
    assert_same_qparams(ours, theirs, f"channels {pairs} with {made}")
    assert read_qparams(ours).axis == axis


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    ("bounds", "middle"), [(None, 128), ((0, 127), 63), ((0, 255), 127), ((0, 15), 7), ((10, 20), 15)]
)
def test_the_middle_of_a_given_unsigned_range_is_rounded_down(bounds: tuple[int, int] | None, middle: int) -> None:
    observer = MinMaxObserver(qscheme=torch.per_tensor_symmetric, **arguments(torch.quint8, bounds))
    observer(torch.tensor([-1.0, 2.0]))
    assert int(observer.calculate_qparams()[1]) == middle


@pytest.mark.rule("NUM-02")
def test_zero_is_always_representable() -> None:
    for low, high, zero_point in ((3.0, 5.0, 0), (-5.0, -3.0, 255), (0.0, 0.0, 0)):
        observer = MinMaxObserver()
        observer(torch.tensor([low, high]))
        assert int(observer.calculate_qparams()[1]) == zero_point, f"of the range {low}..{high}"


def quantized(x: Tensor, qparams: QParams) -> Tensor:
    """NUM-01 as it is written, in float64 but for the division."""
    steps = torch.round(x / qparams.scale).double() + qparams.zero_point
    return steps.clamp(qparams.quant_min, qparams.quant_max)


@pytest.mark.rule("NUM-01")
@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8])
def test_torchs_quantize_is_the_rule_ties_included(dtype: torch.dtype) -> None:
    observer = MinMaxObserver(dtype=dtype)
    observer(torch.tensor([-16.0, 15.875]))
    qparams = read_qparams(observer)
    assert float(qparams.scale) == 0.125
    x = torch.arange(-300, 300) * 0.0625  # every second one is a tie, and both ends saturate
    theirs = torch.quantize_per_tensor(x, float(qparams.scale), int(qparams.zero_point), dtype)
    assert torch.equal(quantized(x, qparams), theirs.int_repr().double())
    back = (theirs.int_repr().float() - qparams.zero_point) * qparams.scale
    assert torch.equal(back, theirs.dequantize())


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    "observer",
    [
        MinMaxObserver(), PerChannelMinMaxObserver(), torchs.MinMaxObserver(), torchs.PerChannelMinMaxObserver(),
        torchs.HistogramObserver(), torchs.MovingAverageMinMaxObserver(), torch_fakes.FakeQuantize(),
    ],
    ids=lambda observer: f"{type(observer).__module__}.{type(observer).__name__}",
)  # fmt: skip
def test_without_data_there_are_no_qparams(observer: Any) -> None:
    with pytest.raises(QConfigError, match="has seen no data: run the prepared model on calibration inputs"):
        read_qparams(observer)


@pytest.mark.rule("NUM-02")
def test_an_empty_batch_is_no_data() -> None:
    observer = MinMaxObserver()
    observer(torch.empty(0, 3))
    with pytest.raises(QConfigError, match="no data"):
        observer.calculate_qparams()


@pytest.mark.rule("DTY-05")
def test_fixed_qparams_do_not_depend_on_data() -> None:
    observer = FixedQParamsObserver(scale=1 / 256, zero_point=7)
    observer(torch.tensor([-100.0, 100.0]))
    found = read_qparams(observer)
    assert (float(found.scale), int(found.zero_point), found.quant_min, found.quant_max) == (1 / 256, 7, 0, 255)
    theirs = read_qparams(torchs.FixedQParamsObserver(scale=1 / 256, zero_point=7))
    assert (float(theirs.scale), int(theirs.zero_point)) == (1 / 256, 7)


@pytest.mark.rule("CFG-14")
@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (torchs.MinMaxObserver(dtype=torch.qint8), (torch.qint8, -128, 127, None)),
        (torchs.MinMaxObserver(quant_min=0, quant_max=127), (torch.quint8, 0, 127, None)),
        (torchs.HistogramObserver(), (torch.quint8, 0, 255, None)),
        (torchs.PerChannelMinMaxObserver(ch_axis=1, dtype=torch.qint8), (torch.qint8, -128, 127, 1)),
        (torch_fakes.FakeQuantize(quant_min=0, quant_max=127), (torch.quint8, 0, 127, None)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_torchs_observers_are_read_by_protocol(theirs: Any, expected: tuple[Any, ...]) -> None:
    theirs(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    found = read_qparams(theirs)
    assert (found.dtype, found.quant_min, found.quant_max, found.axis) == expected
    assert torch.equal(found.scale, theirs.calculate_qparams()[0])


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("observer", [PlaceholderObserver(dtype=torch.quint8), torchs.ReuseInputObserver()], ids=repr)
def test_observers_without_qparams_are_named(observer: Any) -> None:
    with pytest.raises(QConfigError, match=type(observer).__name__):
        read_qparams(observer)


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("bounds", [(5, 5), (9, 3), (-1, 100), (0, 256)])
def test_a_range_outside_the_dtype_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(QConfigError, match=f"quant range {bounds[0]}..{bounds[1]} is empty or outside 0..255"):
        MinMaxObserver(quant_min=bounds[0], quant_max=bounds[1])
    with pytest.raises(QConfigError, match="is not a quantized dtype"):
        dtype_range(torch.float32)


@pytest.mark.rule("QCM-01")
def test_with_args_binds_and_can_be_bound_further() -> None:
    make = MinMaxObserver.with_args(dtype=torch.qint8).with_args(quant_min=-127, quant_max=127)
    assert isinstance(make, Constructor)
    first, second = make(), make()
    assert first is not second
    assert [first.dtype, first.quant_min, first.quant_max] == [torch.qint8, -127, 127]
    assert repr(make) == "MinMaxObserver(dtype=torch.qint8, quant_min=-127, quant_max=127)"


@pytest.mark.rule("CVT-12")
@pytest.mark.parametrize("kind", [MinMaxObserver, PerChannelMinMaxObserver])
def test_observers_survive_copies_and_state_dicts(kind: Any) -> None:
    torch.manual_seed(0)
    observer = kind(dtype=torch.qint8)
    observer(torch.randn(4, 3))
    copied = copy.deepcopy(observer)
    assert_same_qparams(copied, observer, "after deepcopy")
    copied(torch.full((4, 3), 100.0))
    assert float(observer.max_val.max()) < 100, "the copy shares its range with the original"
    fresh = kind(dtype=torch.qint8)
    fresh.load_state_dict(observer.state_dict())
    assert_same_qparams(fresh, observer, "after load_state_dict")
