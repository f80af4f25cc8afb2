"""What a backend says of itself, as data: equal claims without an import of the vendor's code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from backends.base import Capabilities, Requantize, RoundingMode
from backends.discovery import find_backend
from conformance.claims.claim import config_digest, enumerate_claims
from conformance.claims.pattern_plan import is_taken
from conformance.claims.preparation import OWN_OF_THE_SUITE
from conformance.remote.config_data import config_from_data, config_to_data, has_own_code
from conformance.remote.description import Description, DescriptionError, describe, read_description
from refimpl import BackendConfig, BackendPatternConfig, MinMaxObserver, QConfig
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
    assert there.own == frozenset()  # torch's classes and the suite's are no vendor's
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
    assert {name.partition("/")[0] for name in there.own} == {f"{__name__}.Squash", "nn.Linear+nn.ReLU"}
    own, pair = (entry for entry in there.config.configs if entry.pattern is not nn.Linear)
    assert has_own_code(own.pattern) and own.pattern is not Squash
    for call in (own.pattern, pair.fuser_method):
        with pytest.raises(RuntimeError, match="is the vendor's code, which this process has not imported"):
            call(False)  # type: ignore[misc,operator]


@pytest.mark.parametrize(
    "function", [partial(torch.load, "file"), partial(print, "x"), lambda *_: None], ids=["load", "print", "lambda"]
)
def test_no_function_is_called_with_arguments_of_the_vendors_choice(function: Callable[..., Any]) -> None:
    """A config could otherwise name any function of torch, and have the judge call it."""
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).add_dtype_config(INT8).set_fuser_method(function)
    data = config_to_data(BackendConfig("sly").set_backend_pattern_config(entry))
    try:
        (back,) = config_from_data(data).configs
    except Exception as error:
        assert "takes no arguments from a config" in str(error)
    else:
        assert has_own_code((back.fuser_method,))


class Shifting(Good):
    """Prepares with an observer of its own, and rounds down."""

    def qconfigs(self) -> list[QConfig]:
        return [QConfig(OwnObserver, OwnObserver)]

    def capabilities(self) -> Capabilities:
        down = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.DOWN)
        return replace(super().capabilities(), requantize=down)


class OwnObserver(MinMaxObserver):
    """A vendor's observer."""


def test_a_vendor_that_prepares_is_judged_beside_its_code_and_its_rounding_is_known() -> None:
    there = sent(Shifting())
    claims = enumerate_claims(there.config, there.capabilities)
    assert there.prepares and there.own == {claim.id for claim in claims}
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
    [{"representation": "FLOAT"}, {"capabilities": {"limits": {}}}, {"config": {"dict": 3}}, {"versions": 3},
     {"config": {"name": ["os", "system"]}}],
)  # fmt: skip
def test_what_is_no_description_is_said(change: dict[str, Any]) -> None:
    with pytest.raises(DescriptionError, match="what the backend says of itself cannot be read"):
        read_description({**json.loads(json.dumps(describe(Good()))), **change})
