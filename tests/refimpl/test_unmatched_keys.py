"""Keys of a QConfigMapping that match nothing in a model are warned about, and others are not (rule QCM-02)."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance import refimpl
from fx_quant_conformance.refimpl import QConfigMapping
from fx_quant_conformance.refimpl.config.qconfig import as_qconfig_mapping, warn_unmatched_keys
from tests.refimpl.support import both_flows as flows
from tests.refimpl.support.qconfigs import minmax_qconfig

A = minmax_qconfig(torch.quint8, torch.qint8, per_channel=False)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.fc2(self.fc1(x))).reshape(-1, 2)


class Tail(nn.Module):
    """A class of the user's that the model does not have."""


ORDERS_OF_HEAD: set[tuple[str, Any, int]] = {
    ("head", nn.Linear, 0),
    ("head", nn.Linear, 1),
    ("head", F.relu, 0),
    ("head", "reshape", 0),
}
UNMATCHED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("set_module_name", ("head.fc3",), r"module_name head.fc3 matches nothing in Sequential; did you mean 'head.fc\d'"),
    ("set_module_name", ("xyz",), "module_name xyz matches nothing in Sequential; did you mean 'head.fc2'"),
    ("set_module_name_regex", (r"haed\..*",), r"module_name_regex haed\\..\* matches nothing in Sequential; did you"),
    ("set_object_type", (Tail,), "object_type Tail matches nothing in Sequential; did you mean"),
    ("set_object_type", ("Linaer",), "object_type Linaer matches nothing in Sequential; did you mean 'Linear'"),
    (
        "set_module_name_object_type_order",
        ("head", nn.Linear, 2),
        r"module_name_object_type_order \('head', Linear, 2\) matches nothing .*did you mean \"\('head', Linear, [01]",
    ),
)
MATCHED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("set_global", ()),
    ("set_module_name", ("head",)),
    ("set_module_name", ("head.fc2",)),
    ("set_module_name_regex", (r".*fc\d",)),
    ("set_object_type", (Head,)),
    ("set_object_type", (nn.Conv2d,)),  # torch's own types: default mappings name them for every model
    ("set_object_type", (operator.add,)),
    ("set_object_type", ("sigmoid",)),
    ("set_object_type", ("hardsigmoid_",)),
    ("set_module_name_object_type_order", ("head", "reshape", 0)),
)


def head() -> nn.Module:
    model = nn.Sequential()
    model.add_module("head", Head())
    return model


@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize(("setter", "key", "message"), UNMATCHED)
def test_a_key_that_matches_nothing_is_a_warning_with_the_nearest_name(setter: str, key: Any, message: str) -> None:
    mapping = getattr(QConfigMapping(), setter)(*key, A)
    with pytest.warns(UserWarning, match=f"^QConfigMapping: {message}"):
        warn_unmatched_keys(mapping, head(), [F.relu, "reshape"], ORDERS_OF_HEAD)


@pytest.mark.rule("QCM-02")
def test_the_second_name_of_a_module_is_none() -> None:
    """Its calls stand under the first name: a key for the second would have no effect, and nobody would know."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer).eval()
    mapping = QConfigMapping().set_global(A).set_module_name("1", None)
    with pytest.warns(UserWarning, match="module_name 1 matches nothing in Sequential"):
        found = refimpl.prepare_fx(model, mapping, (torch.ones(2, 4),))
    assert {decision.source for decision in refimpl.explain(found).plan.decisions} == {"global"}


@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize(("setter", "key"), MATCHED)
def test_other_keys_make_no_noise(setter: str, key: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unmatched_keys(getattr(QConfigMapping(), setter)(*key, A), head(), [F.relu, "reshape"], ORDERS_OF_HEAD)


@pytest.mark.rule("QCM-02")
@pytest.mark.parametrize("engine", ["x86", "qnnpack"])
def test_no_key_of_torchs_default_mappings_is_warned_about(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="QConfigMapping")
        mapping = flows.torch_mappings.get_default_qconfig_mapping(engine)
        assert any(isinstance(key, str) for key in mapping.object_type_qconfigs)
        warn_unmatched_keys(as_qconfig_mapping(mapping), head(), [], set())
