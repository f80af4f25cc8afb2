"""Every group of slots has an observer of its own, which is what its constructor makes. (OBS-15, QCM-01)"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from fx_quant_conformance.refimpl.observers.observers import Constructor

X = torch.tensor([[-3.0, 1.0], [0.5, 2.0]])


class Counted(MinMaxObserver):
    """Knows how many there are."""

    made: ClassVar[list[Any]] = []

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.made.append(self)


def observers_of(mapping: QConfigMapping, is_qat: bool = False) -> list[tuple[Any, Any]]:
    """Return each observer of a prepared chain of two linears and a relu, with its constructor; no instance twice."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    prepare = refimpl.prepare_qat_fx if is_qat else refimpl.prepare_fx
    prepared = prepare(model.train(is_qat), mapping, (X,))
    found = {
        slot.group: (prepared.get_submodule(slot.name), slot.make) for slot in refimpl.explain(prepared).plan.slots
    }
    return list(found.values())


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return all attributes but the buffers, and but the name of the observed value, which prepare sets."""
    left_out = ("_buffers", "observes")
    return {name: {k: v for k, v in vars(part).items() if k not in left_out} for name, part in module.named_modules()}


@pytest.mark.rule("OBS-15")
@pytest.mark.parametrize("is_qat", [False, True])
@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
def test_an_observer_is_what_its_constructor_makes(engine: str, is_qat: bool) -> None:
    mapping = (get_default_qat_qconfig_mapping if is_qat else get_default_qconfig_mapping)(engine)
    found = observers_of(mapping, is_qat)
    assert len(found) > 2
    for observer, make in found:
        expected = make().train(is_qat)
        mine, alone = observer.state_dict(), expected.state_dict()
        assert list(mine) == list(alone)
        assert all(torch.equal(mine[key], alone[key]) for key in alone)
        assert repr(observer) == repr(expected)
        for name, state in state_of(expected).items():
            own = state_of(observer)[name]
            assert list(own) == list(state)
            assert all(own[key] == value for key, value in state.items() if key != "_modules")


@pytest.mark.rule("OBS-15")
def test_what_one_observer_sees_no_other_does() -> None:
    (first, _), *others = observers_of(get_default_qconfig_mapping("x86"))
    before = [{key: value.clone() for key, value in other.state_dict().items()} for other, _ in others]
    first(X)
    assert first.min_val == -3.0
    for (other, _), state in zip(others, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())


@pytest.mark.rule("QCM-01")
def test_a_users_own_class_is_called_for_each_instance_and_a_function_may_share_one() -> None:
    weight = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    found = observers_of(QConfigMapping().set_global(QConfig(Constructor(Counted), weight)))
    assert all(any(observer is made for made in Counted.made) for observer, _ in found)
    shared = MinMaxObserver()
    found = observers_of(QConfigMapping().set_global(QConfig(Constructor(lambda: shared), weight)))
    assert [observer is shared for observer, _ in found] == [True] * len(found)
