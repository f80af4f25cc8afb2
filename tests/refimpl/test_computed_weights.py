"""A weight that is computed of parameters stays float, is observed once, and is held after convert (OBS-16)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.ratios import decibels, make, run, torch_ratios
from tests.refimpl.test_modes import MODES

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Computes(nn.Module):
    """Computes the weight of an op of its parameters, each time that it runs."""

    def __init__(self, compute: Callable[[Any], Any], rows: bool = True) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 16) if rows else torch.randn(4, 3, 3, 3))
        self.low, self.high = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 16))
        self.register_buffer("offset", torch.randn(self.weight.shape[1:]))
        self.compute, self.last = compute, nn.Linear(8, 4) if rows else nn.Conv2d(4, 4, 1)
        self.op: Any = F.linear if rows else F.conv2d

    def forward(self, x: Tensor) -> Any:
        return self.last(self.op(x, self.compute(self)))


class Held(Computes):
    """The same model with the weight as a parameter."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.weight = nn.Parameter(self.compute(self).detach())

    def forward(self, x: Tensor) -> Any:
        return self.last(self.op(x, self.weight))


def standardized(net: Any) -> Any:
    mean = net.weight.mean((1, 2, 3), keepdim=True)
    return (net.weight - mean) / (net.weight.std((1, 2, 3), keepdim=True) + 1e-5)


COMPUTED: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "number": (lambda net: net.weight * 0.5, True),
    "adapter": (lambda net: net.weight + 0.5 * (net.low @ net.high), True),
    "normalized": (lambda net: F.normalize(net.weight, dim=1), True),
    "joined": (lambda net: torch.cat([net.weight[:4], net.weight[4:] * 2]), True),
    "transposed": (lambda net: (net.high.t() @ net.low.t()).t().contiguous(), True),
    "standardized": (standardized, False),
}


@pytest.mark.rule("OBS-16")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_quantized_as_the_same_weight_that_is_held(name: str) -> None:
    x = X if COMPUTED[name][1] else IMAGES
    computed, held = make(Computes(*COMPUTED[name]), x), make(Held(*COMPUTED[name]), x)
    assert torch.equal(run(computed.prepared, (x,)), run(held.prepared, (x,)))
    for form, model in computed.forms.items():
        assert flows.same(run(model, (x,)), run(held.forms[form], (x,))) or form == "lowered", form
    assert computed.ratios() == held.ratios()


@pytest.mark.rule("OBS-16")
@pytest.mark.parametrize("mode", MODES)
def test_so_it_is_in_every_mode(mode: str) -> None:
    found = []
    for kind in (Computes, Held):
        prepared = refimpl.prepare_fx(kind(*COMPUTED["number"]).eval(), flows.global_mapping(MODES[mode][0]), (X,))
        prepared(X)
        found.append(refimpl.convert_to_reference_fx(prepared))
    assert torch.equal(found[0](X), found[1](X))
    calls = [node.name for node in found[0].graph.nodes if node.name.startswith("mul")]
    assert calls == (["mul_folded"] if mode != "float16" else ["mul"])


@pytest.mark.rule("OBS-16")
def test_it_is_no_less_accurate_than_torchs_reference_or_lowered_model() -> None:
    """The other side of the row of deviations.md: torch observes what it is computed of as activations."""
    ratios = torch_ratios(Computes(*COMPUTED["number"]), X)
    assert ratios["reference"] < ratios["lowered"] - 1 < make(Computes(*COMPUTED["number"]), X).worst


@pytest.mark.rule("OBS-16")
def test_what_it_is_computed_of_stays_float_with_that_reason() -> None:
    prepared = refimpl.prepare_fx(Computes(*COMPUTED["adapter"]).eval(), refimpl.get_default_qconfig_mapping(), (X,))
    rows = {row["node"]: row for row in refimpl.explain(prepared).rows()}
    for node in ("matmul", "mul", "add"):
        assert rows[node]["reason"] in ("OBS-16: it is computed of parameters and buffers only", "no pattern matches")
    assert rows["add"]["dtype config"] == "float" and rows["linear"]["dtype config"] != "float"
    observed = {slot.value: slot.role for slot in refimpl.explain(prepared).plan.slots}
    assert observed == {"x": "input", "add": "weight", "linear": "output", "last": "output"}


@pytest.mark.rule("OBS-16")
def test_in_training_its_parts_are_trained_and_convert_holds_the_trained_value() -> None:
    def train(prepared: Any) -> None:
        loss = prepared(X).square().mean()
        loss.backward()
        for name in ("low", "high", "weight"):
            parameter = prepared.get_parameter(name)
            assert parameter.grad is not None and bool((parameter.grad != 0).any()), name
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad

    with torch.enable_grad():
        made = make(Computes(*COMPUTED["adapter"]), X, is_qat=True, train=train)
    trained = copy.deepcopy(Computes(*COMPUTED["adapter"]))
    for name in ("low", "high", "weight"):
        trained.get_parameter(name).data = made.prepared.get_parameter(name).data.clone()
    held = made.forms["reference"].get_buffer("add_folded")
    assert torch.equal(held, trained.compute(trained))
    assert decibels(run(trained.eval(), (X,)), run(made.forms["reference"], (X,))) > 20


@pytest.mark.rule("OBS-16")
def test_an_exported_program_holds_its_integers() -> None:
    made = make(Computes(*COMPUTED["adapter"]), X)
    program = refimpl.export_reference(made.forms["decomposed"], (X,))
    integers = [
        value for value in (*program.constants.values(), *program.state_dict.values()) if not value.is_floating_point()
    ]
    assert sorted(tuple(value.shape) for value in integers if value.dim() == 2) == [(4, 8), (8, 16)]


@pytest.mark.rule("OBS-16")
def test_a_weight_that_is_another_each_time_is_not_held() -> None:
    model = Computes(lambda net: net.weight * torch.rand_like(net.weight)).eval()
    prepared = refimpl.prepare_fx(model, refimpl.get_default_qconfig_mapping("qnnpack"), (X,))
    prepared(X)
    reference = refimpl.convert_to_reference_fx(prepared)
    assert not torch.equal(reference(X), reference(X))


@pytest.mark.rule("OBS-16")
def test_a_weight_of_a_buffer_that_forward_writes_to_is_not_held() -> None:
    class Counts(Computes):
        def forward(self, x: Tensor) -> Any:
            offset = self.get_buffer("offset")
            offset.add_(1)
            return self.last(F.linear(x, self.weight * offset))

    prepared = refimpl.prepare_fx(Counts(*COMPUTED["number"]).eval(), refimpl.get_default_qconfig_mapping(), (X,))
    prepared(X)
    reference = refimpl.convert_to_reference_fx(prepared)
    assert not torch.equal(reference(X), reference(X))
