"""What the passes return, and what they were given, is freed by its last reference, without the cyclic collector."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import PrepareCustomConfig, QConfigMapping
from fx_quant_conformance.refimpl.prepare.equalize import default_equalization_qconfig
from fx_quant_conformance.refimpl.prepare.prepare import prepare_fx

X = torch.ones(2, 3, 8, 8)


class Net(nn.Module):
    """A residual block, a functional linear with a weight of the model's own, and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.child = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.norm(self.conv(x)) + x)
        return self.child(F.linear(x, self.weight))


def mapping(is_qat: bool = False) -> QConfigMapping:
    defaults = refimpl.get_default_qat_qconfig_mapping if is_qat else refimpl.get_default_qconfig_mapping
    return defaults("qnnpack")


def static(model: nn.Module) -> Iterator[nn.Module]:
    prepared = prepare_fx(model, mapping(), (X,))
    prepared(X)
    yield prepared
    for convert in (refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx, refimpl.convert_fx):
        converted = convert(prepared)
        converted(X)
        yield converted


def trained(model: nn.Module) -> Iterator[nn.Module]:
    prepared = refimpl.prepare_qat_fx(model.train(), mapping(is_qat=True), (X,))
    prepared(X).sum().backward()
    yield from (prepared, refimpl.convert_fx(prepared))


def equalized(model: nn.Module) -> Iterator[nn.Module]:
    equalization = QConfigMapping().set_global(default_equalization_qconfig)
    prepared = prepare_fx(model, mapping(), (X,), _equalization_config=equalization)
    prepared(X)
    yield from (prepared, refimpl.convert_fx(prepared))


def standalone(model: nn.Module) -> Iterator[nn.Module]:
    custom = PrepareCustomConfig().set_standalone_module_name("child", None, (X,), None, None)
    prepared = prepare_fx(model, mapping(), (X,), custom)
    prepared(X)
    yield from (prepared, refimpl.convert_fx(prepared))


def copied(model: nn.Module) -> Iterator[nn.Module]:
    prepared = prepare_fx(model, mapping(), (X,))
    other = copy.deepcopy(prepared)
    other(X)
    yield from (other, copy.deepcopy(refimpl.convert_fx(other)))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Make sure that what is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.rule("CVT-12")
@pytest.mark.parametrize("flow", [static, trained, equalized, standalone, copied])
def test_a_dropped_model_is_freed_without_the_collector(flow: Callable[[nn.Module], Iterator[nn.Module]]) -> None:
    with no_garbage_collection():
        model = Net().eval()
        models = [model, *flow(model)]
        held = [ref(each) for part in models for each in (part, *part.modules(), *part.parameters())]
        assert len(held) > 10
        del model, models
        kept = [type(each()).__name__ for each in held if each() is not None]
    assert kept == []


@pytest.mark.rule("CVT-12")
def test_a_graph_knows_its_module_while_it_lives() -> None:
    prepared = prepare_fx(Net().eval(), mapping(), (X,))
    assert prepared.graph.owning_module is prepared
    copied = copy.deepcopy(prepared)
    assert copied.graph.owning_module is copied
    GraphModule(prepared, prepared.graph)  # shares the graph, and is gone
    assert prepared.graph.owning_module is prepared
    prepared.graph.eliminate_dead_code()  # asks the owner whether a call is pure
    prepared.graph.lint()
    graph = prepared.graph
    del prepared
    assert graph.owning_module is None
    assert torch.equal(GraphModule(copied, graph)(X), copied(X))


@pytest.mark.rule("CVT-12")
def test_a_graph_can_be_pickled_as_those_of_fx_can() -> None:
    prepared = prepare_fx(Net().eval(), mapping(), (X,))
    stream = io.BytesIO()
    pickle.dump(prepared.graph, stream)
    stream.seek(0)
    kept, made = (
        [(node.op, node.name, str(node.target), str(node.args)) for node in graph.nodes]  # releases differ in types
        for graph in (pickle.load(stream), prepared.graph)
    )
    assert kept == made
