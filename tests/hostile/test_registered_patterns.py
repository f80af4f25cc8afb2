"""Vendors whose fused kernels are wrong only where few inputs lead: nothing of that may be green, in any profile."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.fx import GraphModule

from fx_quant_conformance.conformance.claims import registry
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.claims.registry import register
from fx_quant_conformance.conformance.oracle import table
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from fx_quant_conformance.refimpl.config.fusers import sequential
from fx_quant_conformance.refimpl.graph.invariants import is_dequantize
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference
from tests.mutants.pattern_faults import MUTANTS
from tests.mutation.mutant import Mutant

WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(table, "_vendor_rules", {})
    yield


def verdicts_of(backend: Any, globs: tuple[str, ...] = ("*",)) -> Iterator[tuple[str, Verdict]]:
    """Yield each claim that matches, with the worst of its verdicts."""
    bench = Bench(backend, seed=0, profile="quick")
    for claim in enumerate_claims(bench.config, bench.capabilities):
        if any(fnmatchcase(claim.id, glob) for glob in globs):
            checks = [each for each in run_claim(bench, claim) if isinstance(each, Check)]
            yield claim.id, Verdict.worst(check.verdict for check in checks)


def is_refuted(backend: Any, globs: tuple[str, ...] = ("*",)) -> bool:
    """Tell whether a claim is refuted; the first that is ends the search."""
    return any(verdict is Verdict.REFUTED for _, verdict in verdicts_of(backend, globs))


# -- a fused convolution and ReLU6 that clamps by the input's scale ---------------------------------------------------


class ConvReLU6(nni._FusedModule):  # type: ignore[name-defined,misc]
    def __init__(self, conv: nn.Module, relu: nn.Module) -> None:
        super().__init__(conv, relu)


class ClampsByInput(ReportingReference):
    """Holds the six in steps of the input, and compares it with steps of the output."""

    name = "clamps by input"

    def backend_config(self) -> BackendConfig:
        pair = BackendPatternConfig((nn.Conv2d, nn.ReLU6)).set_dtype_configs([WEIGHTED])
        pair.set_fuser_method(sequential(ConvReLU6)).set_fused_module(ConvReLU6)
        fused = BackendPatternConfig(ConvReLU6).set_dtype_configs([WEIGHTED])
        fused.set_root_module(nn.Conv2d).set_reference_quantized_module(nnqr.Conv2d)
        return BackendConfig("own").set_backend_pattern_configs([pair, fused])

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
        for node in reference_model.graph.nodes:
            if node.op == "call_module" and is_dequantize(node.args[0]):
                quantize, output = node.args[0].args[0], next(iter(node.users))
                fused: Any = reference_model.get_submodule(str(node.target))
                fused[1] = nn.Hardtanh(0.0, round(6.0 / quantize.args[1]) * output.args[1])
        return super().lower(reference_model, example_inputs)


def build_fixed() -> nn.Module:
    return nn.Sequential(ConvReLU6(nn.Conv2d(3, 8, 3), nn.ReLU6())).eval()


def build_pair() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6()).eval()


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
@pytest.mark.rule("NUM-03")
def test_a_registered_clamp_by_another_scale_is_refuted() -> None:
    """With one geometry and inputs within (−3, 4) it was VERIFIED: no sum of products came to six."""
    register((nn.Conv2d, nn.ReLU6), build_pair, [(2, 3, 8, 8)])
    register(ConvReLU6, build_fixed, [(2, 3, 8, 8)])
    found = dict(verdicts_of(ClampsByInput()))
    assert len(found) == 8, "two patterns, four schemes"
    assert set(found.values()) == {Verdict.REFUTED}


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
def test_a_vendor_cannot_register_an_easy_model_in_the_place_of_an_ops_own() -> None:
    """Only on a convolution without a window, a stride and groups is this kernel right."""

    class NoPadding(ReportingReference):
        def backend_config(self) -> BackendConfig:
            entry = BackendPatternConfig(nn.Conv2d).set_dtype_configs([WEIGHTED])
            entry.set_root_module(nn.Conv2d).set_reference_quantized_module(nnqr.Conv2d)
            return BackendConfig("own").set_backend_pattern_config(entry)

        def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Any:
            lowered = super().lower(reference_model, example_inputs)

            def run(*inputs: Tensor) -> Any:
                result = lowered(*inputs)
                return result if reference_model.get_submodule("op0").kernel_size == (1, 1) else result.flip(-1)

            return run if hasattr(reference_model, "op0") else lowered

    register(nn.Conv2d, lambda: nn.Sequential(nn.Conv2d(1, 1, 1)).eval(), [(1, 1, 2, 2)])
    assert is_refuted(NoPadding())


# -- the mutants of patterns ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("mutant", [each for each in MUTANTS if not each.is_honest], ids=lambda mutant: mutant.name)
def test_faults_of_patterns_are_refuted_in_quick(mutant: Mutant) -> None:
    assert is_refuted(mutant.make(), mutant.claims)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
def test_clamps_of_integers_are_not_refuted() -> None:
    [honest] = [each for each in MUTANTS if each.name == "epilogues clamp integers"]
    found = dict(verdicts_of(honest.make(), ("*ReLU6/*", "*Hardtanh/*", "*Clip/*")))
    assert len(found) > 8 and set(found.values()) <= {Verdict.VERIFIED, Verdict.UNSHOWN}, found
