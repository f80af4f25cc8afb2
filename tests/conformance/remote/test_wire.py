"""Tensors between the judge and the backend's process: what comes back is numbers and names, or refused."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from fx_quant_conformance.conformance.machine.frames import WireError
from fx_quant_conformance.conformance.remote.wire import HeldOutputs, pack, unpack


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 4),
        torch.tensor(3),
        torch.ones(1).expand(5),
        torch.arange(9)[1::2],
        torch.arange(9.0)[3:],
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.randn(3).bfloat16(),
        torch.tensor([float("nan")]),
    ],
)
def test_a_tensor_keeps_its_values_and_its_layout(tensor: Tensor) -> None:
    pieces: list[bytes] = []
    data = json.loads(json.dumps(pack(((tensor,), [tensor]), pieces)))
    ((first,), (second,)) = unpack(data, pieces)
    for each in (first, second):
        assert each.dtype is tensor.dtype and each.stride() == tensor.stride()
        assert each.storage_offset() == min(tensor.storage_offset(), 1)
        assert torch.equal(each.nan_to_num(7), tensor.nan_to_num(7))


def test_what_is_no_plain_tensor_is_named() -> None:
    pieces: list[bytes] = []
    data = pack([{1}, None, torch.randn(2).to_sparse()], pieces)
    kinds = [type(each).__name__ for each in unpack(data, pieces)]
    assert kinds[:2] == ["set", "NoneType"] and "float32" in kinds[2]


def test_an_output_keeps_its_names() -> None:
    pieces: list[bytes] = []
    data = json.loads(json.dumps(pack(OrderedDict(b=torch.ones(2), a=(torch.zeros(1),)), pieces)))
    output = unpack(data, pieces)
    assert list(output) == ["b", "a"] and torch.equal(output["b"], torch.ones(2)) and len(output["a"]) == 1


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"dtype": "load", "shape": [1]},
        {"dtype": "float32", "shape": [2], "strides": [1], "piece": 0},
        {"dtype": "float32", "shape": [-1], "strides": [1], "piece": 0},
        {"dtype": "float32", "shape": [1], "strides": [1], "piece": 9},
        {"tuple": 3},
        {"tuple": [], "list": []},
        {"dict": [[1]]},
        7,
        {"dtype": "float32", "shape": [1, 1], "strides": [1], "piece": 0},
    ],
)
def test_an_output_that_is_none_is_said(data: object) -> None:
    with pytest.raises(WireError, match="an output that cannot be read"):
        unpack(data, [b"\0" * 4])


@pytest.mark.rule("NUM-07")
def test_outputs_are_held_to_the_bytes_that_they_had() -> None:
    """It is said how many runs later the last one came that left an output as it is, where that shows."""
    held, buffer = HeldOutputs(), torch.zeros(3)
    for value in (1.0, 2.0, 3.0):
        held.pack((torch.tensor(value), buffer.fill_(value)), [b"another's"])
    assert dict(held.find_overwritten()) == {0: 0, 1: 0}, "a part of an output: no run gave all of it"
    held = HeldOutputs()
    for value in (1.0, 1.0, 2.0, 3.0):
        held.pack([buffer.fill_(value)], [])
    assert dict(held.find_overwritten()) == {0: 3, 1: 2, 2: 1}
    buffer.fill_(4.0)
    assert dict(held.find_overwritten()) == dict.fromkeys(range(4), 0)
