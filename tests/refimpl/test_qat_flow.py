"""prepare_qat_fx: QAT modules and fake quantizes go in, are trained, and go out in convert (rules QAT-01, QAT-02)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat
import torch.ao.nn.qat as nnqat
import torch.nn.functional as F
from torch import Tensor, nn

import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import NAMED, REFERENCE, Net, X, assert_parity, calls

nniqat: Any = torch.ao.nn.intrinsic.qat
QNNPACK = NAMED.get_default_qat_qconfig("qnnpack")
FAKES = flows.torch_fakes
IMAGE = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(3))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        self.conv, self.norm = nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.wide, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.stem(x)
        y = torch.relu(self.norm(self.conv(y)) + y).mean([2, 3])
        return self.head(F.relu(self.wide(y)))


def mapping() -> Any:
    return flows.global_mapping(QNNPACK)


def prepared(model: nn.Module, *inputs: Tensor, **options: Any) -> Any:
    return refimpl.prepare_qat_fx(model, options.pop("mapping", mapping()), inputs, **options)


RUNS: Mapping[str, Callable[..., Any]] = {
    "layers": lambda net, x: net.b(net.relu(net.a(x))),
    "F.linear": lambda net, x: F.relu(F.linear(net.a(x), net.weight, net.bias)),
    "residual": lambda net, x: net.a(x) + x,
    "sharing": lambda net, x: torch.cat([net.a(x), net.b(x)]).reshape(-1, 2),
    "fixed qparams": lambda net, x: torch.sigmoid(net.a(x)),
    "a scalar": lambda net, x: net.a(x) * 2 + 1,
    "outputs": lambda net, x: {"a": net.a(x), "b": [net.b(x), x]},
    "an unused layer": lambda net, x: (net.b(x), net.a(x))[1],
}


@pytest.mark.slow
@pytest.mark.rule("QAT-01")
@pytest.mark.rule("QAT-02")
@pytest.mark.parametrize("run", RUNS)
def test_functions_and_layers_are_torchs(run: str) -> None:
    assert_parity(lambda: Net(RUNS[run]).train(), mapping, is_qat=True, converts=REFERENCE)


@pytest.mark.rule("QAT-01")
@pytest.mark.rule("QAT-02")
@pytest.mark.parametrize("config", ["native", "qnnpack", "x86", "fbgemm"])
def test_convolutions_with_batch_norm_are_torchs(config: str) -> None:
    assert_parity(
        lambda: ConvNet().train(),
        mapping,
        batches=[(IMAGE,), (2 * IMAGE,)],
        is_qat=True,
        config=config,
        converts=REFERENCE,
    )


@pytest.mark.rule("QAT-01")
def test_the_modules_of_a_matched_pattern_become_qat_modules_and_activations_are_fake_quantized() -> None:
    found = prepared(ConvNet().train(), IMAGE)
    kinds = {name: type(found.get_submodule(name)) for name in ("stem.0", "conv", "wide", "head")}
    assert kinds == {
        "stem.0": nniqat.ConvBnReLU2d, "conv": nniqat.ConvBn2d, "wide": nniqat.LinearReLU, "head": nnqat.Linear,
    }  # fmt: skip
    for slot in refimpl.explain(found).plan.slots:
        assert isinstance(found.get_submodule(slot.name), FAKES.FakeQuantizeBase), slot
    assert all(part.training for part in found.modules())


@pytest.mark.rule("QAT-01")
@pytest.mark.rule("QCM-03")
def test_what_is_not_quantized_is_not_swapped() -> None:
    found = prepared(
        ConvNet().train(), IMAGE, mapping=mapping().set_module_name("head", None).set_module_name("conv", None)
    )
    assert type(found.get_submodule("head")) is nn.Linear
    assert not isinstance(found.get_submodule("conv"), nnqat.Conv2d | nniqat.ConvBn2d)
    assert type(found.get_submodule("wide")) is nniqat.LinearReLU


@pytest.mark.rule("QAT-01")
def test_a_key_of_the_qat_class_holds_too() -> None:
    """As torch has it: modules are swapped before the mapping is read. (QCM-05)"""
    only = flows.global_mapping(None).set_object_type(nnqat.Linear, QNNPACK).set_object_type(nn.Linear, QNNPACK)
    found = prepared(Net(RUNS["residual"]).train(), X, mapping=only)
    assert type(found.get_submodule("a")) is nnqat.Linear


@pytest.mark.rule("QAT-01")
def test_training_trains_the_users_parameters_and_changes_no_module_of_his() -> None:
    model: Any = Net(RUNS["residual"]).train()
    classes = [type(part) for part in model.modules()]
    found = prepared(model, X)
    before = model.a.weight.detach().clone()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.a.weight, before)
    assert [type(part) for part in model.modules()] == classes
    assert not any(hasattr(part, "weight_fake_quant") for part in model.modules())


@pytest.mark.rule("QAT-02")
@pytest.mark.parametrize("convert", [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx])
def test_batch_norm_stays_until_convert_where_it_is_folded(convert: Callable[..., Any]) -> None:
    found = prepared(ConvNet().train(), IMAGE)
    statistics = found.get_submodule("conv").bn.running_mean
    before = statistics.clone()
    found(IMAGE)
    assert not torch.equal(statistics, before), "it is trained as a batch norm"
    reference = convert(found.eval())
    assert not [part for part in reference.modules() if isinstance(part, nn.BatchNorm2d)]
    expected = found.get_submodule("conv").to_float().weight
    assert torch.equal(reference.get_submodule("conv").weight, expected)
    assert not torch.equal(expected, found.get_submodule("conv").weight)


@pytest.mark.rule("QAT-02")
@pytest.mark.rule("CVT-12")
def test_a_model_in_training_survives_deepcopy_and_its_state_dict() -> None:
    found = prepared(ConvNet().train(), IMAGE)
    found(IMAGE)
    fresh = prepared(ConvNet().train(), IMAGE)
    fresh.load_state_dict(found.state_dict())
    expected = refimpl.convert_to_reference_fx(found.eval())
    for other in (copy.deepcopy(found), fresh.eval()):
        reference = refimpl.convert_to_reference_fx(other)
        assert torch.equal(reference(IMAGE), expected(IMAGE))
        assert calls(reference) == calls(expected)


@pytest.mark.rule("QAT-01")
def test_both_forms_give_the_same_numbers() -> None:
    found = prepared(ConvNet().train(), IMAGE)
    found(IMAGE)
    references = [
        convert(found.eval())
        for convert in (refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx)
    ]
    with torch.no_grad():
        assert torch.equal(references[0](IMAGE), references[1](IMAGE))
