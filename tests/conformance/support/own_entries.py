"""The reference model under entries of a test's own, which reports a quantized kernel; its claims and their checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fx_quant_conformance.backends.base import Backend, Capabilities
from fx_quant_conformance.conformance.claims import registry
from fx_quant_conformance.conformance.claims.claim import Claim, enumerate_claims
from fx_quant_conformance.conformance.oracle import table
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference

U8 = DTypeConfig(torch.quint8, torch.quint8)
U8_S8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


class OwnEntries(ReportingReference):
    """Claims these entries."""

    name = "own entries"

    def __init__(self, *entries: BackendPatternConfig) -> None:
        self.entries = BackendConfig(self.name).set_backend_pattern_configs(list(entries))

    def backend_config(self) -> BackendConfig:
        """Return the entries."""
        return self.entries


def claim_of(entry: BackendPatternConfig, dtypes: DTypeConfig = U8, flow: str = "ptq") -> Claim:
    """The claim of an entry, given this dtype config, that is alone in its config."""
    config = BackendConfig("c").set_backend_pattern_config(entry.set_dtype_configs([dtypes]))
    return next(each for each in enumerate_claims(config, Capabilities()) if each.flow == flow)


def checks_of(backend: Backend, pattern: str = "", profile: str = "quick") -> list[Check]:
    """The checks of the first claim of a backend, or of the first one on a pattern."""
    bench = Bench(backend, seed=0, profile=profile)
    claims = enumerate_claims(bench.config, bench.capabilities)
    claim = next(each for each in claims if pattern in ("", each.pattern))
    return [each for each in run_claim(bench, claim) if isinstance(each, Check)]


def failures(checks: list[Check]) -> list[tuple[str, str, str]]:
    """Stage, verdict and message of the checks that do not hold."""
    return [(each.stage, each.verdict.value, each.message) for each in checks if each.verdict is not Verdict.VERIFIED]


@pytest.fixture
def no_registrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(table, "_vendor_rules", {})
    yield
