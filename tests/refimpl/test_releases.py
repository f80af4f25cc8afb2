"""The table of what differs between torch's releases: each row is looked for in the torch that runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import _config as symbolic

from fx_quant_conformance.refimpl.releases import (
    DIFFERENCES,
    NEWEST,
    OLDEST,
    format_lack,
    has,
    list_left_out,
    read_release,
    refuse_old,
)
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_flows import torchs


def takes(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


def traces_lists() -> bool:
    def join(x: Any) -> Any:
        return torch.cat(torch.split(x, 2))

    try:
        torch.fx.symbolic_trace(join)
    except TypeError:
        return False
    return True


class Counter(nn.Module):
    """It gives its buffer a new value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Buffer(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.count = x + self.count


def traces_buffers() -> bool:
    try:
        torch.fx.symbolic_trace(Counter())
    except TypeError:
        return False
    return True


def counts_of_constant() -> bool:
    observer = torchs.HistogramObserver()
    observer(torch.tensor([0.25])), observer(torch.tensor([1.0, -2.0]))
    place = int((0.25 + 2.0) / 3.0 * observer.bins)
    return bool(observer.histogram[place - 1 : place + 2].sum() == 1)


def adds_before_rounding() -> bool:
    return torch.quantize_per_tensor(torch.tensor([0.5]), 1.0, 1, torch.quint8).int_repr().tolist() == [2]


class TwoLinears(nn.Module):
    """Two linear functions of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Any) -> Any:
        return F.linear(F.linear(x, self.weight), self.weight)


def lowers_one_of_two() -> bool:
    """Only one of the two is quantized: the other reads the weight itself."""
    mapping = flows.global_mapping().set_module_name_object_type_order("", F.linear, 1, None)
    prepared = flows.torch_flow(TwoLinears().eval(), mapping, [(torch.ones(2, 2),)]).prepared
    try:
        torch_fx.convert_fx(prepared)
    except KeyError as error:
        assert str(error) == "'weight'"
        return False
    return True


LOOKED_FOR: dict[str, Callable[[], bool]] = {
    "dynamic_row": lambda: hasattr(symbolic, "backed_size_oblivious"),
    "names_of_calls": lambda: takes(torch.fx.Graph.call_function, "name"),
    "traces_lists": traces_lists,
    "traces_buffers": traces_buffers,
    "histogram_of_constant": counts_of_constant,
    "norm_bias": lambda: all(takes(norm, "bias") for norm in (nn.BatchNorm2d, nn.InstanceNorm2d, nn.GroupNorm)),
    "adds_before_rounding": adds_before_rounding,
    "weight_of_two_ops": lowers_one_of_two,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_row_says_what_the_torch_that_runs_has(name: str) -> None:
    assert has(name) is LOOKED_FOR[name]()


def test_rows_are_in_the_order_of_releases() -> None:
    rows = list(DIFFERENCES.values())
    assert rows == sorted(rows, key=lambda row: row.since)
    assert all(OLDEST <= row.since <= NEWEST and (row.until is None or row.until > row.since) for row in rows)
    assert OLDEST <= read_release() <= NEWEST


@pytest.mark.parametrize(
    ("version", "expected"), [("2.12.1", False), ("2.13.0+cpu", True), ("2.13.5+cu130", True), ("2.14.0a0", False)]
)
def test_a_difference_may_end(version: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert has("adds_before_rounding") is expected


def test_a_lack_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert format_lack("norm_bias") == (
        "torch 2.9.1+cu128 has no argument bias of batch, instance and group norms, which is there since 2.12: cases "
        "without a bias are left out"
    )
    assert "since 2.13, until 2.14: ties" in format_lack("adds_before_rounding")


def test_what_the_suite_does_not_try_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    assert list_left_out() == [format_lack("norm_bias")]
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert list_left_out() == []


def test_a_torch_that_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_old()
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    with pytest.raises(ImportError, match=r"torch 2\.5\.1 is too old: refimpl needs 2\.6 or newer"):
        refuse_old()
