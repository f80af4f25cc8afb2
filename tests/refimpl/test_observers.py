"""Observers beside torch's own, bit for bit (rules NUM-01, NUM-02, DTY-05, QCM-01)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's observers need it loaded before them
from hypothesis import given, settings
from hypothesis import strategies as st

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.observers import observers
from fx_quant_conformance.refimpl.observers.fake_quantize import FakeQuantize
from fx_quant_conformance.refimpl.observers.observers import (
    Constructor,
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
)
from fx_quant_conformance.refimpl.observers.qparams import dtype_range, read_qparams
from tests.refimpl.support.both_flows import torchs

pytestmark = pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")  # torch's

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
    """Both tensors agree bit for bit, dtypes and shapes included."""
    for name, found, expected in zip(
        ("scale", "zero point"), ours.calculate_qparams(), theirs.calculate_qparams(), strict=True
    ):
        assert found.dtype == expected.dtype, f"{what}: {name} is {found.dtype}, torch's {expected.dtype}"
        assert torch.equal(found, expected), f"{what}: {name} {found}, torch's {expected}"


PER_TENSOR_KINDS = ["MinMaxObserver", "MovingAverageMinMaxObserver"]
PER_CHANNEL_KINDS = ["PerChannelMinMaxObserver", "MovingAveragePerChannelMinMaxObserver"]


def both(kind: str, **made: Any) -> tuple[Any, Any]:
    """Make our observer and torch's of one name."""
    return getattr(observers, kind)(**made), getattr(torchs, kind)(**made)


@pytest.mark.slow
@pytest.mark.rule("NUM-02")
@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    pairs=st.lists(PAIRS, min_size=1, max_size=3),
    scheme=SCHEMES,
    eps=st.sampled_from([torch.finfo(torch.float32).eps, 2**-12, 1e-9]),
    kind=st.sampled_from(PER_TENSOR_KINDS),
    reduce_range=st.booleans(),
    data=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int32]),
)
def test_per_tensor_qparams_are_torchs(
    pairs: list[tuple[float, float]],
    scheme: tuple[Any, Any, int],
    eps: float,
    kind: str,
    reduce_range: bool,
    data: torch.dtype,
) -> None:
    dtype, bounds, symmetric = scheme
    qscheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
    made = arguments(dtype, bounds) | {"qscheme": qscheme, "eps": eps}
    if reduce_range and not (symmetric and dtype == torch.quint8):  # these two do not go together
        made["reduce_range"] = True
    ours, theirs = both(kind, **made)
    assert (ours.quant_min, ours.quant_max) == (theirs.quant_min, theirs.quant_max)
    for pair in pairs:
        x = torch.tensor(pair, dtype=torch.float64).clamp(-6e4, 6e4).to(data)
        assert ours(x) is x
        theirs(x)
    assert_same_qparams(ours, theirs, f"{kind} of {pairs} with {made}")


@pytest.mark.rule("NUM-02")
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    pairs=st.lists(PAIRS, min_size=1, max_size=4),
    scheme=SCHEMES,
    axis=st.integers(-1, 2),
    kind=st.sampled_from(PER_CHANNEL_KINDS),
)
def test_per_channel_qparams_are_torchs(
    pairs: list[tuple[float, float]], scheme: tuple[Any, Any, int], axis: int, kind: str
) -> None:
    dtype, bounds, symmetric = scheme
    qscheme = torch.per_channel_symmetric if symmetric else torch.per_channel_affine
    made = arguments(dtype, bounds) | {"qscheme": qscheme, "ch_axis": axis}
    ours, theirs = both(kind, **made)
    x = torch.tensor(pairs).reshape(len(pairs), 2, 1).movedim(0, axis)
    for batch in (x, x * 0.5, x * 2):
        ours(batch), theirs(batch)
    assert_same_qparams(ours, theirs, f"{kind} of {pairs} with {made}")
    assert read_qparams(ours).axis == axis


@pytest.mark.rule("NUM-02", "CVT-11")
@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    pairs=st.lists(PAIRS, min_size=1, max_size=4),
    dtype=st.sampled_from([torch.quint8, torch.quint4x2]),
    kind=st.sampled_from(PER_CHANNEL_KINDS),
)
def test_the_zero_point_of_float_qparams_is_torchs_real(
    pairs: list[tuple[float, float]], dtype: torch.dtype, kind: str
) -> None:
    ours, theirs = both(kind, dtype=dtype, qscheme=torch.per_channel_affine_float_qparams)
    x = torch.tensor(pairs)
    for batch in (x, x * 0.5):
        ours(batch), theirs(batch)
    assert_same_qparams(ours, theirs, f"{kind} of rows {pairs} in {dtype}")
    weight = read_qparams(ours).weight_dict(is_decomposed=False)
    assert weight["zero_point"].dtype == torch.float32
    assert (weight["qscheme"], weight["axis"]) == (torch.per_channel_affine_float_qparams, 0)


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("dtype", [torch.qint32, torch.int32, torch.int16, torch.uint16, torch.int8, torch.uint8])
@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric], ids=str)
def test_the_other_dtypes_have_torchs_qparams(dtype: torch.dtype, qscheme: Any) -> None:
    ours, theirs = both("MinMaxObserver", dtype=dtype, qscheme=qscheme)
    x = torch.linspace(-3.0, 7.0, 11)
    ours(x), theirs(x)
    assert (ours.quant_min, ours.quant_max) == (theirs.quant_min, theirs.quant_max)
    assert_same_qparams(ours, theirs, f"{dtype}, {qscheme}")


@pytest.mark.rule("NUM-02")
def test_torch_gives_symmetric_4_bits_zero_point_0_where_a_negative_value_has_no_integer() -> None:
    ours, theirs = both("MinMaxObserver", dtype=torch.quint4x2, qscheme=torch.per_tensor_symmetric)
    x = torch.tensor([-1.0, 1.0])
    ours(x), theirs(x)
    assert [int(observer.calculate_qparams()[1]) for observer in (ours, theirs)] == [8, 0]


@pytest.mark.rule("NUM-02")
def test_torch_ignores_one_end_of_a_range_that_is_given_alone() -> None:
    ours, theirs = both("MinMaxObserver", quant_max=127)
    assert (ours.quant_max, theirs.quant_max) == (127, 255)


@pytest.mark.rule("NUM-02")
def test_a_vector_has_one_value_per_channel_where_torch_raises() -> None:
    ours, theirs = both("PerChannelMinMaxObserver", dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    x = torch.tensor([1.0, -127.5])
    ours(x)
    assert torch.equal(ours.calculate_qparams()[0], torch.tensor([1 / 127.5, 1.0]))
    with pytest.raises(IndexError):
        theirs(x)


@pytest.mark.rule("NUM-02")
def test_the_middle_of_a_given_unsigned_range_is_rounded_down_where_torch_refuses_it() -> None:
    observer = MinMaxObserver(qscheme=torch.per_tensor_symmetric, **arguments(torch.quint8, (10, 21)))
    observer(torch.tensor([-1.0, 2.0]))
    assert int(observer.calculate_qparams()[1]) == 15


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("kind", [*PER_TENSOR_KINDS, *PER_CHANNEL_KINDS])
def test_an_empty_batch_is_no_data(kind: str) -> None:
    ours, theirs = both(kind)
    for observer in (ours, theirs):
        observer(torch.empty(0, 3))
    with pytest.warns(UserWarning, match="no data"):
        assert_same_qparams(ours, theirs, "after an empty batch")
    for observer in (ours, theirs):
        observer(torch.tensor([[1.0, 2.0]]))
        observer(torch.empty(0, 3))
    assert_same_qparams(ours, theirs, "an empty batch after data")


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("kind", [PER_TENSOR_KINDS[0], PER_CHANNEL_KINDS[0]])
def test_what_was_seen_can_be_forgotten(kind: str) -> None:
    ours, fresh = (getattr(observers, kind)(dtype=torch.qint8) for _ in range(2))
    ours(torch.full((3, 2), 100.0))
    ours.reset_min_max_vals()
    for observer in (ours, fresh):
        observer(torch.tensor([[1.0, 2.0]]))
    assert_same_qparams(ours, fresh, "after reset")


@pytest.mark.rule("DTY-05")
def test_fixed_qparams_do_not_depend_on_data() -> None:
    observer = FixedQParamsObserver(scale=1 / 256, zero_point=7)
    observer(torch.tensor([-100.0, 100.0]))
    found = read_qparams(observer)
    assert (float(found.scale), int(found.zero_point), found.quant_min, found.quant_max) == (1 / 256, 7, 0, 255)
    theirs = torchs.FixedQParamsObserver(scale=1 / 256, zero_point=7)
    assert_same_qparams(observer, theirs, "fixed")
    assert observer.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.rule("DTY-05")
def test_torch_gives_fixed_qparams_of_a_signed_dtype_an_unsigned_range() -> None:
    ours, theirs = both("FixedQParamsObserver", scale=1 / 128, zero_point=0, dtype=torch.qint8)
    assert [(each.quant_min, each.quant_max) for each in (ours, theirs)] == [(-128, 127), (0, 255)]


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("bounds", [(5, 5), (9, 3), (-1, 100), (0, 256)])
def test_a_range_outside_the_dtype_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(QConfigError, match=f"quant range {bounds[0]}..{bounds[1]} is empty or outside 0..255"):
        MinMaxObserver(quant_min=bounds[0], quant_max=bounds[1])
    with pytest.raises(QConfigError, match="is not a quantized dtype"):
        dtype_range(torch.float32)


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    ("kind", "made", "why"),
    [
        ("MinMaxObserver", {"qscheme": torch.per_channel_affine}, "qscheme is torch.per_channel_affine"),
        ("PerChannelMinMaxObserver", {"qscheme": torch.per_tensor_affine}, "qscheme is torch.per_tensor_affine"),
        ("PerChannelMinMaxObserver", {"is_dynamic": True}, "is_dynamic, but"),
        ("MovingAverageMinMaxObserver", {"is_dynamic": True}, "is_dynamic, but"),
        ("MinMaxObserver", {"qscheme": torch.per_tensor_symmetric, "reduce_range": True}, "leaves no middle"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(kind: str, made: dict[str, Any], why: str) -> None:
    with pytest.raises(QConfigError, match=f"{kind}: .*{why}"):
        getattr(observers, kind)(**made)
    with pytest.raises(NotImplementedError):
        getattr(torchs, kind)(**made)


@pytest.mark.rule("DTY-07")
def test_only_what_forgets_earlier_batches_may_be_dynamic() -> None:
    made = {"is_dynamic": True, "averaging_constant": 1}
    ours, theirs = both("MovingAverageMinMaxObserver", **made)
    for observer in (ours, theirs):
        assert observer.is_dynamic
        for x in (torch.tensor([-5.0, 5.0]), torch.tensor([0.0, 1.0])):
            observer(x)
    assert_same_qparams(ours, theirs, "the last batch alone")
    assert float(ours.max_val) == 1.0


@pytest.mark.rule("QCM-01")
@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("PlaceholderObserver", {}),
        ("PlaceholderObserver", {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255, "is_dynamic": True}),
        ("PlaceholderObserver", {"dtype": torch.float16, "custom_op_name": "op"}),
        ("NoopObserver", {}),
        ("ReuseInputObserver", {}),
    ],
)
def test_observers_that_measure_nothing_say_what_torchs_say(kind: str, made: dict[str, Any]) -> None:
    ours, theirs = both(kind, **made)
    names = vars(theirs).keys() & {"dtype", "qscheme", "quant_min", "quant_max", "eps", "is_dynamic", "custom_op"}
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    x = torch.ones(2)
    assert ours(x) is x
    assert ours.state_dict() == {}


@pytest.mark.rule("QCM-01")
def test_with_args_binds_and_can_be_bound_further() -> None:
    make = MinMaxObserver.with_args(dtype=torch.qint8).with_args(quant_min=-127, quant_max=127)
    assert isinstance(make, Constructor)
    first, second = make(), make()
    assert first is not second
    assert [first.dtype, first.quant_min, first.quant_max] == [torch.qint8, -127, 127]
    assert repr(make) == "MinMaxObserver(dtype=torch.qint8, quant_min=-127, quant_max=127)"


@pytest.mark.rule("QCM-01")
def test_equal_constructors_are_equal_nested_ones_too() -> None:
    def fake(**more: Any) -> Constructor:
        return FakeQuantize.with_args(observer=MinMaxObserver.with_args(dtype=torch.qint8, **more))

    assert fake() == fake() and hash(fake()) == hash(fake())
    assert fake() == copy.deepcopy(fake())
    assert fake() != fake(quant_min=-127, quant_max=127)
    assert MinMaxObserver.with_args() != MovingAverageMinMaxObserver.with_args()


@pytest.mark.rule("CVT-12")
@pytest.mark.parametrize("kind", [*PER_TENSOR_KINDS, *PER_CHANNEL_KINDS])
def test_observers_survive_copies_and_state_dicts_either_way(kind: str) -> None:
    torch.manual_seed(0)
    ours, theirs = both(kind, dtype=torch.qint8, eps=2**-12)
    ours(torch.randn(4, 3))
    copied = copy.deepcopy(ours)
    assert_same_qparams(copied, ours, "after deepcopy")
    copied(torch.full((4, 3), 100.0))
    assert float(ours.max_val.max()) < 100, "the copy shares its range with the original"
    fresh, foreign = both(kind, dtype=torch.qint8)
    foreign.load_state_dict(ours.state_dict())
    assert_same_qparams(ours, foreign, "torch's, loaded from ours")
    theirs(torch.randn(5, 3))
    fresh.load_state_dict(theirs.state_dict())
    assert_same_qparams(fresh, theirs, "ours, loaded from torch's")
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})


@pytest.mark.rule("CVT-12")
def test_buffers_keep_their_identity_while_observing() -> None:
    observer = MinMaxObserver()
    before = observer.min_val
    observer(torch.tensor([-3.0]))
    assert observer.min_val is before, "replicas that hold the buffer would not see the range"
    assert float(before) == -3.0


@pytest.mark.rule("QCM-01")
def test_buffers_are_made_where_factory_kwargs_say() -> None:
    ours, theirs = both("MovingAveragePerChannelMinMaxObserver", factory_kwargs={"dtype": torch.float64})
    x = torch.tensor([[0.1, 0.7], [-0.3, 0.2]], dtype=torch.float64)
    ours(x), theirs(x)
    assert ours.min_val.dtype == torch.float64
    assert_same_qparams(ours, theirs, "float64")
