"""prepare_qat_fx: QAT modules and fake quantizes go in, are trained, and go out in convert (rules QAT-01, QAT-02)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat
import torch.ao.nn.qat as nnqat
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.both_core import NAMED, Net, X, calls

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


def residual(net: Any, x: Tensor) -> Any:
    return net.a(x) + x


@pytest.mark.rule("QAT-01")
def test_the_modules_of_a_matched_pattern_become_qat_modules_and_activations_are_fake_quantized() -> None:
    found = prepared(ConvNet().train(), IMAGE)
    kinds = {name: type(found.get_submodule(name)) for name in ("stem.0", "conv", "wide", "head")}
    assert kinds == {
        "stem.0": nniqat.ConvBnReLU2d,
        "conv": nniqat.ConvBn2d,
        "wide": nniqat.LinearReLU,
        "head": nnqat.Linear,
    }
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
    found = prepared(Net(residual).train(), X, mapping=only)
    assert type(found.get_submodule("a")) is nnqat.Linear


@pytest.mark.rule("QAT-01")
def test_training_trains_the_users_parameters_and_changes_no_module_of_his() -> None:
    model: Any = Net(residual).train()
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
def test_batch_norm_stays_until_convert_where_it_is_folded() -> None:
    found = prepared(ConvNet().train(), IMAGE)
    statistics = found.get_submodule("conv").bn.running_mean
    before = statistics.clone()
    found(IMAGE)
    assert not torch.equal(statistics, before), "it is trained as a batch norm"
    reference: Any = refimpl.convert_to_reference_fx(found.eval())
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


# ---- the numbers ------------------------------------------------------------------------------------------


def trained(model: nn.Module, mapping: Any) -> Any:
    """Prepare a model and train it for some steps; in eval mode."""
    found = prepared(model, IMAGE, mapping=mapping)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        found(IMAGE).square().mean().backward()
        optimizer.step()
    return found.eval()


@pytest.mark.rule("QAT-03")
def test_convert_of_a_trained_model_is_ptq_convert_of_it_with_the_learned_qparams() -> None:
    """Training went on in the float model's own tensors: prepare that model for calibration, and in place of observers
    put the fake quantizes as they were trained, frozen."""
    model, qat = ConvNet().train(), NAMED.get_default_qat_qconfig("x86")
    found, learned = trained(model, flows.global_mapping(qat)), flows.global_mapping(qat)
    for target, part in found.named_modules():
        if hasattr(part, "observer_enabled"):
            part.disable_observer()
        if hasattr(part, "weight_fake_quant"):
            qconfig = NAMED.QConfig(activation=qat.activation, weight=partial(_same, part.weight_fake_quant))
            learned.set_module_name(target, qconfig)
    calibrated: Any = refimpl.prepare_fx(model.eval(), learned, (IMAGE,))
    for target, _ in list(calibrated.named_modules(remove_duplicate=False)):
        if target.startswith("activation_post_process") and "." not in target:
            calibrated.set_submodule(target, found.get_submodule(target))
    with torch.no_grad():
        expected, made = refimpl.convert_to_reference_fx(calibrated), refimpl.convert_to_reference_fx(found)
        assert flows.kinds(made) == flows.kinds(expected)
        assert flows.qparams(made) == flows.qparams(expected)
        assert flows.same(made(IMAGE), expected(IMAGE))


def _same(observer: nn.Module) -> nn.Module:
    return observer


@pytest.mark.rule("QAT-03")
@pytest.mark.rule("CVT-07")
def test_convert_leaves_the_trained_model_as_it_was_and_both_forms_give_the_same_bits() -> None:
    found = trained(ConvNet().train(), mapping())
    before = copy.deepcopy(found.state_dict())
    with torch.no_grad():
        first, second = (refimpl.convert_to_reference_fx(found)(IMAGE) for _ in range(2))
        decomposed = refimpl.convert_to_reference_decomposed_fx(found)(IMAGE)
    assert flows.same(first, second) and flows.same(first, decomposed)
    assert flows.same(dict(found.state_dict()), dict(before)), "observers of the trained model saw the weight once more"
