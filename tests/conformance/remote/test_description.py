"""What a backend says of itself, as data: equal claims without an import of the vendor's code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fx_quant_conformance.backends.base import Capabilities, Requantize, RoundingMode
from fx_quant_conformance.backends.discovery import find_attribute, find_backend
from fx_quant_conformance.conformance.claims.claim import config_digest, enumerate_claims
from fx_quant_conformance.conformance.claims.pattern_plan import is_taken
from fx_quant_conformance.conformance.claims.preparation import OWN_OF_THE_SUITE
from fx_quant_conformance.conformance.remote.config_data import (
    ConfigDataError,
    config_from_data,
    config_to_data,
    has_own_code,
)
from fx_quant_conformance.conformance.remote.description import (
    Description,
    DescriptionError,
    describe,
    read_description,
)
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, MinMaxObserver, QConfig
from fx_quant_conformance.refimpl.config.fusers import sequential
from tests.conformance.support.fake_backends.fakes import INT8, Good


def sent(backend: Any) -> Description:
    return read_description(json.loads(json.dumps(describe(backend))))


@pytest.mark.parametrize("name", ["reference", "onednn"])
def test_a_shipped_config_comes_back_with_the_same_claims(name: str) -> None:
    backend = find_backend(name)
    there = sent(backend)
    config = backend.backend_config()
    claims = [enumerate_claims(each, backend.capabilities()) for each in (config, there.config)]
    assert [claim.id for claim in claims[0]] == [claim.id for claim in claims[1]]
    assert config_digest(claims[0]) == config_digest(claims[1])
    assert there.vendor_claims == frozenset()  # torch's classes and the suite's are no vendor's
    assert (there.name, there.versions) == (backend.name, backend.versions())


class Packs(Good):
    """Declares what version 0.2.0 had no words for, and later ones have not any more."""

    def capabilities(self) -> Capabilities:
        return Capabilities(packs=False)  # type: ignore[call-arg]


def test_a_capability_that_was_removed_is_named_with_what_to_do() -> None:
    with pytest.raises(DescriptionError, match="no packs any more: each case is lowered alone: leave it out"):
        describe(Packs())


class Squash(nn.Module):
    """A vendor's own module."""


def fuse_own(is_qat: bool, linear: nn.Module, squash: nn.Module) -> nn.Module:
    return nn.Sequential(linear, squash)


class Owner(Good):
    """Claims a module of its own, alone and after a linear one."""

    def backend_config(self) -> BackendConfig:
        own = BackendPatternConfig(Squash).add_dtype_config(INT8)
        pair = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(INT8).set_fuser_method(fuse_own)
        pair.set_fused_module(nn.Sequential)
        return super().backend_config().set_backend_pattern_configs([own, pair])


def test_the_vendors_own_code_is_a_stand_in_that_cannot_run() -> None:
    there = sent(Owner())
    ids = [claim.id for claim in enumerate_claims(Owner().backend_config(), Owner().capabilities())]
    assert [claim.id for claim in enumerate_claims(there.config, there.capabilities)] == ids
    assert {name.partition("/")[0] for name in there.vendor_claims} == {f"{__name__}.Squash", "nn.Linear+nn.ReLU"}
    own, pair = (entry for entry in there.config.configs if entry.pattern is not nn.Linear)
    assert has_own_code(own.pattern) and own.pattern is not Squash
    for call in (own.pattern, pair.fuser_method):
        with pytest.raises(RuntimeError, match="is the vendor's code, which this process has not imported"):
            call(False)  # type: ignore[misc,operator]


EVIL = "evil_vendor:VALUE"
"""What a helper of the suite would import by its name."""


@pytest.mark.parametrize(
    "function",
    [
        partial(find_attribute, EVIL),
        find_attribute,
        partial(torch.load, "file"),
        torch.load,
        partial(print, "x"),
        exec,
        sequential(eval),
        lambda *_: None,
    ],
)
def test_of_a_configs_functions_the_judge_calls_only_what_a_list_names(
    function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config could otherwise name any function of torch or the suite: one imports the vendor's code in the judge."""
    (tmp_path / "evil_vendor.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(INT8).set_fuser_method(function)
    entry._set_root_node_getter(function)._set_extra_inputs_getter(function)
    (back,) = config_from_data(config_to_data(BackendConfig("sly").set_backend_pattern_config(entry))).configs
    for called in (back.fuser_method, back._root_node_getter, back._extra_inputs_getter):
        assert called is not None
        with pytest.raises(RuntimeError, match="is the vendor's code, which this process has not imported"):
            called("a node")
        assert has_own_code((called,)) and "evil_vendor" not in sys.modules


def forge(name: str, *arguments: Any) -> dict[str, Any]:
    function = {"name": ["function", name]}
    return {"call": [function, {"list": list(arguments)}, {"dict": []}]} if arguments else function


FORGED = {
    "a function of the suite": forge("fx_quant_conformance.backends.discovery.find_attribute"),
    "its call": forge("fx_quant_conformance.backends.discovery.find_attribute", EVIL),
    "a call of an op": forge("torch.load", "file"),
    "a call that calls": forge("fx_quant_conformance.refimpl.config.fusers.assemble", forge("torch.load")),
    "a function of another module": forge("torch.os.system"),
    "a module": forge("torch.nn.functional"),
    "a class of no module": {"name": ["class", "nn.Parameter"]},
    "an op that is none": {"name": ["class", "nn.Linen"]},
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize(
    "place", ["pattern", "fuser_method", "root_node_getter", "extra_inputs_getter", "fused_module"]
)
def test_what_data_may_not_name_is_not_found(place: str, value: dict[str, Any]) -> None:
    """The vendor's process may send what it likes."""
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(INT8)
    data = config_to_data(BackendConfig("sly").set_backend_pattern_config(entry))
    entries = dict(data["dict"])["configs"]["list"]
    entries[0]["dict"].append([place, value])
    try:
        (back,) = config_from_data(data).configs
    except ConfigDataError:
        return
    assert has_own_code(getattr(back, place, None) or getattr(back, f"_{place}"))


class Shifting(Good):
    """Prepares with an observer of its own, and rounds down."""

    def qconfigs(self) -> list[QConfig]:
        return [QConfig(OwnObserver, OwnObserver)]

    def capabilities(self) -> Capabilities:
        down = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.DOWN)
        return replace(super().capabilities(), requantize=down, requantize_of={"nn.Linear": Requantize(), "*": down})


class OwnObserver(MinMaxObserver):
    """A vendor's observer."""


def test_a_vendor_that_prepares_is_judged_beside_its_code_and_its_rounding_is_known() -> None:
    there = sent(Shifting())
    claims = enumerate_claims(there.config, there.capabilities)
    assert there.prepares and there.vendor_claims == {claim.id for claim in claims}
    assert there.preparation == OWN_OF_THE_SUITE, "the observers are known where the vendor's code is"
    assert there.capabilities == Shifting().capabilities()
    assert not sent(Good()).prepares


def test_what_is_no_qconfig_is_said_of_the_backend() -> None:
    class Wrong(Good):
        def qconfigs(self) -> Any:
            return [MinMaxObserver]

    with pytest.raises(DescriptionError, match=r"qconfigs\(\) or a custom config: QConfigError: QConfig of Backend"):
        describe(Wrong())


def test_a_limit_without_effect_is_said_of_the_backend() -> None:
    class Limited(Good):
        def capabilities(self) -> Capabilities:
            return Capabilities(limits={"Conv2d": {"groups": (1,)}})

    with pytest.raises(DescriptionError, match=r"'Conv2d' is no op .* did you mean 'nn.Conv2d'"):
        describe(Limited())


def test_a_rounding_of_no_op_is_said_of_the_backend() -> None:
    class Rounding(Good):
        def capabilities(self) -> Capabilities:
            return Capabilities(requantize_of={"nn.Conv*": Requantize(), "Conv2d": Requantize()})

    with pytest.raises(DescriptionError, match=r"requantize_of: 'Conv2d' fits no op .* did you mean 'nn.Conv2d'"):
        describe(Rounding())


def test_limits_are_the_values_that_the_suite_tries() -> None:
    def odd(value: Any) -> bool:
        """Odd ones, as the machine has them.

        More text.
        """
        return value in (1, 3)

    class Limited(Good):
        def capabilities(self) -> Capabilities:
            return Capabilities(limits={"nn.Conv2d": {"kernel_size": odd, "padding": (0, 1)}})

    limits = sent(Limited()).capabilities.limits["nn.Conv2d"]
    assert is_taken(limits, False, {"kernel_size": 1, "padding": 0}) and is_taken(limits, False, {"kernel_size": 3})
    assert not is_taken(limits, False, {"kernel_size": 2}) and not is_taken(limits, False, {"padding": 2})
    assert getattr(limits["kernel_size"], "text", "") == "Odd ones, as the machine has them"
    assert getattr(limits["padding"], "text", "") == "0, 1"


@pytest.mark.parametrize(
    "change",
    [
        {"representation": "FLOAT"},
        {"capabilities": {"limits": {}}},
        {"config": {"dict": 3}},
        {"versions": 3},
        {"config": {"name": ["os", "system"]}},
    ],
)
def test_what_is_no_description_is_said(change: dict[str, Any]) -> None:
    with pytest.raises(DescriptionError, match="what the backend says of itself cannot be read"):
        read_description({**json.loads(json.dumps(describe(Good()))), **change})
