"""Backends of torchao Quantizers: their configs are what these annotate, and they are configured as claims ask."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.torchao import require_torchao

require_torchao()

from fx_quant_conformance.backends import exporting, pt2e_x86, pt2e_xnnpack
from fx_quant_conformance.backends.base import Backend, QuantizerRequest
from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.pt2e.derive import derive_config
from fx_quant_conformance.conformance.pt2e.merging import Part, merge_parts
from fx_quant_conformance.conformance.pt2e.remembered import remember_patterns
from fx_quant_conformance.refimpl import BackendPatternConfig
from fx_quant_conformance.refimpl.config.patterns import pattern_name

X86: dict[str, tuple[Callable[[], Any], bool]] = {
    "make_quantizer": (pt2e_x86.make_quantizer, False),
    "make_dynamic": (pt2e_x86.make_dynamic, False),
    "make_qat": (pt2e_x86.make_qat, True),
    "make_dynamic_qat": (pt2e_x86.make_dynamic_qat, True),
}
XNNPACK: dict[str, tuple[Callable[[], Any], bool]] = {
    name: (getattr(pt2e_xnnpack, name), "qat" in name)
    for name in (
        "make_quantizer",
        "make_per_tensor",
        "make_dynamic",
        "make_dynamic_per_tensor",
        "make_qat",
        "make_qat_per_tensor",
        "make_dynamic_qat",
        "make_dynamic_qat_per_tensor",
    )
}
GLOBS = (
    "nn.Linear",
    "nn.Linear+nn.ReLU",
    "nnqat.Linear",
    "nni.LinearReLU",
    "nni.LinearBn1d",
    "torch.cat",
    "nn.Tanh",
    "operator.mul",
    "nn.MaxPool2d",
    "nn.ReLU",
)


def backend_of(name: str) -> Backend:
    """A backend, or a skip that says what to install."""
    backend = find_backend(name)
    if reason := backend.unavailable_reason():
        pytest.skip(reason)
    return backend


def spell(entry: BackendPatternConfig) -> tuple[Any, ...]:
    return entry.observation_type, entry.dtype_configs, entry.root_module, entry.qat_module, entry.fused_module


@pytest.mark.slow
@pytest.mark.parametrize(("name", "makers"), [("pt2e-x86", X86), ("pt2e-xnnpack", XNNPACK)])
def test_the_config_is_what_its_quantizers_annotate(
    name: str, makers: dict[str, tuple[Callable[[], Any], bool]]
) -> None:
    """For some patterns: the command in the config's first lines takes minutes for all."""
    backend, parts = backend_of(name), list[Part]()
    with remember_patterns():
        for maker, (make, is_qat) in makers.items():
            config, rows = derive_config(make(), name, is_qat=is_qat, globs=GLOBS)
            parts.append(Part(name=maker, is_qat=is_qat, config=config, rows=rows))
    derived, _ = merge_parts(name, parts)
    found = {pattern_name(entry.normal_pattern): spell(entry) for entry in derived.configs}
    own = {pattern_name(entry.normal_pattern): spell(entry) for entry in backend.backend_config().configs}
    assert len(found) >= 6 and found == {pattern: each for pattern, each in own.items() if pattern in GLOBS}


@pytest.mark.parametrize("name", ["pt2e-x86", "pt2e-xnnpack"])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_qat", [False, True])
def test_the_quantizer_is_configured_as_a_claim_asks(name: str, is_qat: bool, is_dynamic: bool) -> None:
    backend = backend_of(name)
    for scheme in (*backend.capabilities().weight_schemes, ""):
        request = QuantizerRequest(is_qat=is_qat, is_dynamic=is_dynamic, weight_scheme=scheme)
        quantizer = backend.quantizer(request)
        config = quantizer.global_config
        assert config.is_qat is is_qat and config.input_activation.is_dynamic is is_dynamic
        is_per_channel = config.weight.qscheme is torch.per_channel_symmetric
        assert is_per_channel == (scheme != "per_tensor_symmetric")
        assert backend.quantizer(request) is not quantizer, "a new one each time"
    assert backend.quantizer(QuantizerRequest(weight_scheme="per_tensor_affine")) is None


def test_the_name_of_an_extra_is_in_what_is_said_of_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "find_spec", lambda package: None)
    reason = find_backend("pt2e-x86").unavailable_reason()
    assert reason == "torchao not installed: pip install -c constraints.txt 'fx-quant-conformance[pt2e-x86]'"
    monkeypatch.setattr("fx_quant_conformance.backends.executorch.find_spec", lambda package: None)
    assert "fx-quant-conformance[pt2e-xnnpack]" in str(find_backend("pt2e-xnnpack").unavailable_reason())
