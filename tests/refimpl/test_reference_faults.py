"""Reference modules that cannot be made, whose fault that is, and what stays float (rules CVT-10, CVT-11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic
from torch import nn

from fx_quant_conformance.refimpl.convert.reference import make_reference
from fx_quant_conformance.refimpl.errors import ConfigError, QConfigError
from fx_quant_conformance.refimpl.graph.modules import add_qconfig, remove_qconfig
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.one_layer import QConfig, references

nni: Any = torch.ao.nn.intrinsic  # its classes are not annotated


@pytest.mark.rule("CVT-10")
def test_a_weight_without_a_reference_class_is_an_error_and_an_op_without_weight_is_not() -> None:
    def swap(module: nn.Module, weight_dtype: torch.dtype | None) -> nn.Module:
        return make_reference(
            module, flows.QCONFIG, {}, is_decomposed=False, where="body.layer", weight_dtype=weight_dtype
        )

    with pytest.raises(ConfigError, match=r"'body.layer'.*torch.qint8.*Linear.*reference_quantized_module"):
        swap(nn.Linear(2, 2), torch.qint8)
    with pytest.raises(ConfigError, match="Linear"):
        swap(nni.LinearReLU(nn.Linear(2, 2), nn.ReLU()), torch.qint8)
    with pytest.raises(ConfigError, match=r"torch\.float16"):
        swap(nn.Linear(2, 2), torch.float16)
    relu, norm = nn.ReLU(), nn.BatchNorm2d(2)
    assert swap(relu, torch.qint8) is relu, "torch's configs name a weight dtype for ops without weight"
    assert swap(norm, None) is norm, "and none for norms, whose weight stays float"


def test_a_weight_that_the_qconfig_leaves_in_float_stays_float() -> None:
    module = nn.Linear(2, 2)
    floating = QConfig(activation=flows.QCONFIG.activation, weight=flows.torchs.PlaceholderObserver)
    made = make_reference(module, floating, references("native"), is_decomposed=False, where="layer")
    assert made is module


class Broken(nn.Module):
    @classmethod
    def from_float(cls, module: nn.Module, qparams: object) -> Broken:
        raise TypeError("no such layout")


@pytest.mark.parametrize(
    ("reference", "message"),
    [(Broken, r"'layer'.*Broken.from_float.*TypeError: no such layout"), (nn.Linear, r"Linear.*from_float")],
)
def test_a_reference_class_that_fails_is_the_configs_fault(reference: type[nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reference(nn.Linear(2, 2), flows.QCONFIG, {nn.Linear: reference}, is_decomposed=False, where="layer")


def test_a_weight_observer_that_fails_is_the_qconfigs_fault() -> None:
    def observer() -> nn.Module:
        raise KeyError("dtype")

    bad = QConfig(activation=flows.QCONFIG.activation, weight=observer)
    with pytest.raises(QConfigError, match=r"'layer'.*weight's observer.*KeyError"):
        make_reference(nn.Linear(2, 2), bad, references("native"), is_decomposed=False, where="layer")


@pytest.mark.rule("CVT-08")
def test_qconfigs_come_and_go_without_a_change_of_the_users_modules() -> None:
    layer = nn.Linear(2, 2)
    shared = nn.Sequential(layer, nn.ReLU())
    carrier = add_qconfig(shared, flows.QCONFIG)
    assert [part.qconfig for part in carrier.modules()] == [flows.QCONFIG] * 3, "also on what is inside"
    assert not any(hasattr(part, "qconfig") for part in shared.modules())
    assert carrier.get_parameter("0.weight") is layer.weight
    carrier.register_forward_hook(lambda *_: None)
    assert not shared._forward_hooks, "the copy has hooks of its own"
    model = nn.ModuleDict({"a": carrier, "b": carrier, "plain": nn.Linear(2, 2)})
    plain = model["plain"]
    assert remove_qconfig(model) is model
    assert not any(hasattr(part, "qconfig") for part in model.modules())
    assert model["a"] is model["b"], "one module under two names stays one"
    assert model["plain"] is plain, "what has no qconfig is not copied"
    assert carrier[0].qconfig is flows.QCONFIG, "what the prepared model holds keeps its own"
