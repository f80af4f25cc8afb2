"""The flow takes names for itself only where no attribute of the model has them (TRC-02)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl.graph.graph_modules import free_name, free_names
from tests.refimpl.support.ratios import decibels, make, run

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Named(nn.Module):
    """Two layers and what a case adds; all that it adds is read."""

    def __init__(self, read: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(8, 8), nn.Linear(8, 4), read
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.read(self, self.first(x))))


def observer_name() -> nn.Module:
    return Named(lambda net, y: net.activation_post_process_0(y), activation_post_process_0=nn.Linear(8, 8))


def observer_names_of_tensors() -> nn.Module:
    return Named(
        lambda net, y: y * net.activation_post_process_1 + net.activation_post_process_2,
        activation_post_process_1=nn.Parameter(torch.full((8,), 3.0)),
        activation_post_process_2=torch.full((8,), -2.0),
    )


def qparams_names() -> nn.Module:
    return Named(
        lambda net, y: y * net.first_scale_0 + net.last_input_zero_point_0 + net.first_input_scale_0,
        first_scale_0=torch.tensor(3.0),
        last_input_zero_point_0=torch.tensor(0.5),
        first_input_scale_0=nn.Parameter(torch.tensor(0.25)),
    )


def qparams_name_of_a_module() -> nn.Module:
    return Named(lambda net, y: net.first_scale_0(y), first_scale_0=nn.Linear(8, 8))


def packed_name() -> nn.Module:
    return Named(
        lambda net, y: F.linear(y, net.weight) * net._packed_weight_0,
        weight=nn.Parameter(torch.randn(8, 8)),
        _packed_weight_0=torch.tensor(2.0),
    )


def folded_name() -> nn.Module:
    return Named(
        lambda net, y: F.linear(y, net.weight * 0.5) + net.mul_folded,
        weight=nn.Parameter(torch.randn(8, 8)),
        mul_folded=torch.full((8,), 2.0),
    )


def name_of_a_second_call() -> nn.Module:
    return Named(lambda net, y: net.first_0(net.first(y)), first_0=nn.Linear(8, 8))


def name_of_a_read() -> nn.Module:
    return Named(lambda net, y: (y + net.first.weight.sum()) * net.first_weight, first_weight=torch.tensor(2.0))


def name_of_a_choice() -> nn.Module:
    return Named(
        lambda net, y: F.dropout(y, 0.5, net.training) + net.mode_constant_0, mode_constant_0=torch.full((8,), 2.0)
    )


CASES = [
    observer_name,
    observer_names_of_tensors,
    qparams_names,
    qparams_name_of_a_module,
    packed_name,
    folded_name,
    name_of_a_second_call,
    name_of_a_read,
    name_of_a_choice,
]


def built(case: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return case()


@pytest.mark.rule("TRC-02")
@pytest.mark.parametrize("is_qat", [False, True], ids=["ptq", "qat"])
@pytest.mark.parametrize("case", CASES)
def test_a_models_own_names_stay_its_own(case: Callable[[], nn.Module], is_qat: bool) -> None:
    made = make(built(case), X, engine="qnnpack", is_qat=is_qat)  # saturates on no CPU
    assert made.worst > 24, made.ratios()


@pytest.mark.slow
@pytest.mark.rule("TRC-02")
@pytest.mark.parametrize("case", CASES)
def test_a_models_own_names_survive_equalization_and_export(case: Callable[[], nn.Module]) -> None:
    equalized = refimpl.QConfigMapping().set_global(refimpl.default_equalization_qconfig)
    model = built(case).eval()
    mapping = refimpl.get_default_qconfig_mapping("qnnpack")
    prepared = refimpl.prepare_fx(model, mapping, (X,), _equalization_config=equalized)
    prepared(X)
    assert decibels(run(model, (X,)), run(refimpl.convert_to_reference_fx(prepared), (X,))) > 24
    decomposed = make(model, X).forms["decomposed"]
    program = refimpl.export_reference(decomposed, (X,)).module()
    assert decibels(run(decomposed, (X,)), program(X)) > 90


@pytest.mark.rule("TRC-02")
def test_a_preserved_attribute_keeps_its_name() -> None:
    custom = refimpl.PrepareCustomConfig().set_preserved_attributes(["activation_post_process_0"])
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    model.activation_post_process_0 = "mine"  # type: ignore[assignment]
    mapping = refimpl.get_default_qconfig_mapping("qnnpack")
    prepared: Any = refimpl.prepare_fx(model, mapping, (X,), prepare_custom_config=custom)
    assert prepared.activation_post_process_0 == "mine"
    assert [slot.name for slot in refimpl.explain(prepared).plan.slots] == [
        "activation_post_process_1",
        "activation_post_process_2",
    ]


@pytest.mark.rule("TRC-02")
def test_what_is_free_is_asked_of_attributes_of_any_kind_at_any_level() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("a_0", torch.ones(1))
    model.a_1, model.a_2, model[0].a_0 = nn.ReLU(), "text", nn.Parameter(torch.ones(1))
    names = free_names(model, "a_", ["a_4"])
    assert [next(names), next(names)] == ["a_3", "a_5"]
    assert next(free_names(model, "0.a_")) == "0.a_1"
    assert free_name(model, "b") == "b" and free_name(model, "a_2") == "a_2_0" and free_name(model, "b", ["b"]) == "b_0"
    assert copy.deepcopy(model).a_2 == "text"


@pytest.mark.rule("TRC-02")
@pytest.mark.parametrize("name", ("graph", "code", "meta", "recompile", "_graph"))
def test_a_name_that_each_graph_module_has_is_an_error_that_names_it(name: str) -> None:
    for part, read in (
        (nn.Linear(8, 8), lambda net, y: getattr(net, name)(y)),
        (nn.Parameter(X[0]), lambda net, y: y + getattr(net, name)),
    ):
        model = Named(read, **{name: part})
        with pytest.raises(refimpl.ModelError, match=f"Named: .* rename the model's '{name}'"):
            refimpl.prepare_fx(model.eval(), refimpl.get_default_qconfig_mapping("x86"), (X,))


@pytest.mark.rule("TRC-02")
def test_an_attribute_that_is_no_part_of_the_graph_may_have_any_name() -> None:
    model = Named(lambda net, y: y * net.origin * net.meta["gain"], origin=torch.tensor(2.0), meta={"gain": 0.5}).eval()
    assert make(model, X).worst > 25
    assert type(make(model, X).prepared).__name__ == "Named"
