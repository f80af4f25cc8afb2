"""HistogramObserver beside torch's, bit for bit: counts, merging, search (rule NUM-02)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx  # torch's observers need it loaded before them
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fx_quant_conformance.refimpl.errors import QConfigError
from fx_quant_conformance.refimpl.observers import histogram
from fx_quant_conformance.refimpl.observers.histogram import HistogramObserver
from fx_quant_conformance.refimpl.observers.qparams import read_plain_observers
from fx_quant_conformance.refimpl.releases import has
from tests.refimpl.support.both_flows import torchs

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),  # torch's
    pytest.mark.filterwarnings("ignore:torch.inf detected:UserWarning"),  # torch's
]

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "exponential": torch.exp,
    "half zeros": torch.relu,
    "negative": lambda x: -x.abs(),
    "few values": lambda x: (x * 3).round(),
    "two clusters": lambda x: torch.cat([x - 5, x * 0.01 + 3]),
    "an outlier": lambda x: torch.cat([x, torch.tensor([1000.0])]),
    "heavy tails": lambda x: x / (x.flip(0).abs() + 1e-3),
}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric, "eps": 2**-12},
    {"reduce_range": True},
    {"quant_min": 0, "quant_max": 127},
    {"qscheme": torch.per_tensor_symmetric},
    {"bins": 64},
    {"bins": 3},
]
BATCH = st.tuples(
    st.sampled_from(sorted(SHAPES)), st.sampled_from([500, 5000, 20_000]), st.sampled_from([1e-30, 1e-3, 1.0, 1e4])
)


def drawn(shape: str, size: int, scale: float, seed: int = 0) -> Tensor:
    return SHAPES[shape](torch.randn(size, generator=torch.Generator().manual_seed(seed))) * scale


def assert_same(ours: Any, theirs: Any, what: str) -> None:
    """Counts, bounds and qparams agree bit for bit, dtypes and shapes included."""
    for name in ("histogram", "min_val", "max_val"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), f"{what}: {name} differs"
    for found, expected in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected), f"{what}: {found}, torch's {expected}"


@pytest.mark.slow
@pytest.mark.rule("NUM-02")
@settings(max_examples=16, derandomize=True, deadline=None)
@given(batches=st.lists(BATCH, min_size=1, max_size=3), made=st.sampled_from(ARGUMENTS), seed=st.integers(0, 99))
def test_counts_and_qparams_are_torchs(batches: list[tuple[str, int, float]], made: dict[str, Any], seed: int) -> None:
    ours, theirs = HistogramObserver(**made), torchs.HistogramObserver(**made)
    for offset, batch in enumerate(batches):
        x = drawn(*batch, seed=seed + offset)
        assert ours(x) is x
        theirs(x)
    assert_same(ours, theirs, f"{batches} with {made}")


@pytest.mark.slow
@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize(
    "batches", [[[0.0, 0.0]], [[0.25]], [[0.25], [1.0, -2.0]], [[-1.0, 3.0], [0.5, 0.5]], [[0.25], [0.25]]], ids=str
)
def test_constants_and_a_few_values_are_torchs(batches: list[list[float]]) -> None:
    ours, theirs = HistogramObserver(), torchs.HistogramObserver()
    for batch in batches:
        ours(torch.tensor(batch)), theirs(torch.tensor(batch))
    if len(batches) == 2 and len(batches[0]) == 1 and batches[0] != batches[1] and not has("histogram_of_constant"):
        with pytest.raises(AssertionError, match="histogram differs"):
            assert_same(ours, theirs, str(batches))
    else:
        assert_same(ours, theirs, str(batches))


def counting(counts: Tensor) -> HistogramObserver:
    """Make an observer that counted this between -3 and 5."""
    observer = HistogramObserver(bins=len(counts))
    state = {"eps": observer.eps, "min_val": torch.tensor(-3.0), "max_val": torch.tensor(5.0), "histogram": counts}
    observer.load_state_dict(state)
    return observer


@cache
def walked(name: str) -> list[tuple[int, int]]:
    """Walk every step: each drops 1e-5 of the counts, on the side where more bins go; list where bins went."""
    counts = ASKEW[name]
    counted, total = counts.cumsum(0), float(counts.sum())
    found, start, end, dropped, kept = [], 0, len(counts) - 1, 0.0, 1.0
    while dropped < kept and start < end:
        low = next((b for b in range(start, end) if counted[b] >= (dropped + 1e-5) * total), end)
        high = next((b for b in range(end, start, -1) if counted[b] <= (kept - 1e-5) * total), start)
        before = (start, end)
        if low - start > end - high:
            start, dropped = low, dropped + 1e-5
        else:
            end, kept = high, kept - 1e-5
        if (start, end) != before:
            found.append((start, end))
    return found


LIGHT_ENDS = torch.logspace(-8, 0, 24).repeat_interleave(2)
ASKEW: dict[str, Tensor] = {
    "both": torch.cat([LIGHT_ENDS, torch.logspace(0, -7, 40)]),
    "comb": torch.tensor([1e-6, 3.0, 0.0, 2e-5] * 16),
    "heavy ends": torch.tensor([5.0, *[1e-5] * 50, 4.0]),
    "counts": drawn("few values", 64, 1.0).abs(),
}


@pytest.mark.slow
@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("name", ASKEW)
def test_the_search_tries_the_bins_that_single_steps_reach(name: str) -> None:
    observer = counting(ASKEW[name])
    expected = walked(name)
    assert expected and list(observer._find_candidates()) == expected
    theirs = torchs.HistogramObserver(bins=observer.bins)
    theirs.load_state_dict(observer.state_dict())
    assert_same(observer, theirs, "the same counts")


@pytest.mark.slow
@pytest.mark.rule("NUM-02")
def test_the_examples_move_both_sides() -> None:
    moves = {(low > start, high < end) for found in map(walked, ASKEW) for (start, end), (low, high) in pairwise(found)}
    assert moves == {(True, False), (False, True)}


@pytest.mark.rule("NUM-02")
def test_the_shares_are_sums_as_a_loop_rounds_them() -> None:
    dropped, kept = histogram._sum_shares()
    left, right = 0.0, 1.0
    for step in range(20_000):
        assert (left, -right) == (float(dropped[step]), float(kept[step])), f"after {step} steps"
        left, right = left + 1e-5, right - 1e-5
    assert float(dropped[-1]) > 1.0, "too few steps for one side to drop everything"


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("values", [[math.inf, 1.0, -2.0], [-math.inf, 1.0, 2.0], [math.inf, -math.inf]], ids=str)
def test_infinite_values_are_ignored_with_a_warning(values: list[float]) -> None:
    ours, theirs = HistogramObserver(), torchs.HistogramObserver()
    with pytest.warns(UserWarning, match="HistogramObserver: infinite values in the input are ignored"):
        ours(torch.tensor(values))
    theirs(torch.tensor(values))
    for observer in (ours, theirs):
        observer(drawn("normal", 5000, 1.0))
    assert_same(ours, theirs, str(values))


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_data_in_other_floats_are_counted_as_torch_does(dtype: torch.dtype) -> None:
    ours, theirs = HistogramObserver(), torchs.HistogramObserver()
    for seed in range(3):
        x = torch.randn(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
        ours(x.to(dtype)), theirs(x.to(dtype))
    assert_same(ours, theirs, f"{dtype}")


@pytest.mark.rule("NUM-02")
def test_integers_are_counted_as_floats_where_torch_raises() -> None:
    x = torch.arange(-40, 90)
    ours, of_floats = HistogramObserver(), HistogramObserver()
    ours(x), of_floats(x.float())
    assert_same(ours, of_floats, "int64")
    with pytest.raises(RuntimeError, match="not implemented"):
        torchs.HistogramObserver()(x)


@pytest.mark.rule("NUM-02")
def test_an_empty_batch_is_no_data() -> None:
    ours, theirs = HistogramObserver(), torchs.HistogramObserver()
    for observer in (ours, theirs):
        observer(torch.empty(0))
    with pytest.warns(UserWarning, match="no data"):
        assert_same(ours, theirs, "empty")


@pytest.mark.rule("NUM-02")
@pytest.mark.parametrize("made", [{"qscheme": torch.per_channel_affine}, {"is_dynamic": True}], ids=str)
def test_schemes_of_channels_and_dynamic_ones_are_refused(made: dict[str, Any]) -> None:
    with pytest.raises(QConfigError, match="HistogramObserver: "):
        HistogramObserver(**made)
    with pytest.raises(NotImplementedError):
        torchs.HistogramObserver(**made)


@pytest.mark.rule("CVT-12")
def test_histograms_survive_copies_and_state_dicts_either_way() -> None:
    ours, theirs = HistogramObserver(), torchs.HistogramObserver()
    ours(drawn("normal", 5000, 1.0)), theirs(drawn("exponential", 5000, 1.0))
    copied = copy.deepcopy(ours)
    copied(drawn("normal", 5000, 100.0))
    assert float(ours.max_val) < 10, "the copy shares its range with the original"
    fresh, foreign = HistogramObserver(), torchs.HistogramObserver()
    foreign.load_state_dict(ours.state_dict())
    assert_same(ours, foreign, "torch's, loaded from ours")
    fresh.load_state_dict(theirs.state_dict())
    assert_same(fresh, theirs, "ours, loaded from torch's")


@pytest.mark.rule("NUM-02")
def test_the_ranges_of_many_observers_at_once_are_those_of_each_alone() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(size) * 3 for size in (1, 2, 50, 3000)] * 10 + [torch.full((4,), 2.0), torch.zeros(9)]
    observers = [HistogramObserver(reduce_range=True) for _ in batches]
    for observer, batch in zip(observers, batches, strict=True):
        observer(batch)
    found = read_plain_observers([*observers, HistogramObserver()])  # one without data is left out
    assert set(found) == set(map(id, observers))
    for observer in observers:
        scale, zero_point = observer.calculate_qparams()
        qparams = found[id(observer)]
        assert torch.equal(qparams.scale, scale)
        assert torch.equal(qparams.zero_point, zero_point)
        assert qparams.zero_point.dtype == zero_point.dtype
