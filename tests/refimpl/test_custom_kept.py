"""What custom configs keep: untraceable modules, attributes, and the meaning of dicts (rules CUS-02 to CUS-04)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refimpl
from refimpl import ConvertCustomConfig, ModelError, PrepareCustomConfig
from tests.refimpl.support.both_core import TORCHS, Net, assert_parity, prepared
from tests.refimpl.test_custom_modules import net

# ---- CUS-02 -----------------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


@pytest.mark.rule("CUS-02")
@pytest.mark.parametrize("key", ["name", "class"])
def test_what_cannot_be_traced_is_a_leaf_and_stays_float(key: str) -> None:
    def build() -> nn.Module:
        return Net(lambda net, x: net.b(net.loose(net.a(x))), loose=Untraceable()).eval()

    def config() -> Any:
        found = TORCHS.PrepareCustomConfig()
        if key == "name":
            return found.set_non_traceable_module_names(["loose"])
        return found.set_non_traceable_module_classes([Untraceable])

    assert_parity(build, custom=(config, lambda: None))
    reference = refimpl.convert_to_reference_fx(prepared(build(), prepare_custom_config=config()))
    assert type(reference.get_submodule("loose")) is Untraceable
    with pytest.raises(ModelError, match=r"cannot be traced by torch.fx: .*Make the untraceable part a leaf"):
        prepared(build())


# ---- CUS-03 -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CUS-03")
@pytest.mark.parametrize("convert", [refimpl.convert_to_reference_fx, refimpl.convert_to_reference_decomposed_fx])
def test_preserved_attributes_survive_every_pass_and_deepcopy(convert: Callable[..., Any]) -> None:
    model: Any = net(lambda net, x: net.a(x))
    model.labels, model.other, model.scaler = ["cat", "dog"], 3, nn.Linear(1, 1)
    names = ["labels", "scaler", "not there"]
    config = PrepareCustomConfig()
    config.set_preserved_attributes(names)
    found = prepared(model, prepare_custom_config=config)
    to_convert = ConvertCustomConfig()
    to_convert.set_preserved_attributes(names)
    reference = convert(found, to_convert)
    fuse_config = refimpl.FuseCustomConfig()
    fuse_config.set_preserved_attributes(names)
    for made in (refimpl.fuse_fx(model, fuse_config), found, reference, copy.deepcopy(found), copy.deepcopy(reference)):
        assert made.labels == ["cat", "dog"] and isinstance(made.scaler, nn.Linear)
        assert not hasattr(made, "other"), "what was not named goes, as before"


# ---- CUS-04 -----------------------------------------------------------------------------------------------
