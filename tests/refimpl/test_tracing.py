"""Tracing records what fx records, calls of functions in ``math`` too, and leaves ``math`` as it was. (CUS-02)"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import floor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Tracer

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import ModelError
from fx_quant_conformance.refimpl.graph.tracer import trace


def _flatten(x: Tensor) -> Tensor:
    return x.reshape(-1, math.prod(x.shape[1:]))


def _scale(x: Tensor) -> Tensor:
    return x / math.sqrt(x.size(1)) * math.pi


def _round(x: Tensor) -> Tensor:
    return x * floor(x.size(0) / 2) + math.ceil(x.size(1) / 2)


def _use_no_traced_value(x: Tensor) -> Tensor:
    return x * math.sqrt(4.0)


class _Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _calls_of(graph: Any) -> list[tuple[Any, ...]]:
    return [(node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]


@pytest.mark.parametrize("function", [_flatten, _scale, _round, _use_no_traced_value])
def test_functions_of_math_are_recorded_as_fx_records_them(function: Callable[[Tensor], Tensor]) -> None:
    model = _Model(function)
    before = dict(vars(math))
    assert _calls_of(trace(model).graph) == _calls_of(Tracer().trace(model))
    assert vars(math) == before


def test_math_is_as_it_was_after_a_model_that_cannot_be_traced() -> None:
    def branch(x: Tensor) -> Tensor:
        return x if math.sqrt(x.size(0)) > 1 else -x

    before = dict(vars(math))
    with pytest.raises(ModelError, match=r"cannot be traced .* \(at test_tracing.py:\d+: return x if math.sqrt"):
        trace(_Model(branch))
    assert vars(math) == before


def test_a_model_that_raises_shows_its_line_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = refimpl.fuse_fx(_Model(lambda x: x.reshape(5, 7)).eval())
    with pytest.raises(RuntimeError, match="invalid for input of size 4") as raised:
        model(torch.ones(4))
    assert "x.reshape(5, 7)" in str(raised.traceback[-1].statement)
    assert capsys.readouterr() == ("", "")
