"""Findings of docs/findings.md that the suite makes by itself, with its profile full, a few of each kind; no others."""

from __future__ import annotations

import pytest
import torch

from fx_quant_conformance.backends.discovery import find_backend
from fx_quant_conformance.conformance.claims.claim import enumerate_claims
from fx_quant_conformance.conformance.pipeline.claim_run import run_claim
from fx_quant_conformance.conformance.stages.bench import Bench
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import Verdict

pytestmark = pytest.mark.slow

# engine, a claim that holds its wrong kernel (docs/findings.md), the stage that shows it
WRONG = (
    ("qnnpack", "nn.MaxPool2d/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight", "numerics"),  # 2
    ("qnnpack", "nn.AvgPool2d/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight", "numerics"),  # 3
    ("fbgemm", "nn.ConvTranspose2d/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric", "numerics"),
    ("onednn", "nn.ConvTranspose2d/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric", "numerics"),
    ("onednn", "nn.Conv2d/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_channel_symmetric", "numerics"),  # 12
    ("onednn", "nn.MaxPool2d/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight", "numerics"),  # 39
    ("qnnpack", "nn.ReLU6/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight", "invariance"),  # 9
)
RIGHT = (
    ("qnnpack", "nn.Conv2d/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_channel_symmetric"),
    ("onednn", "nn.ReLU/static:in=quint8,w=*,b=*,out=quint8/ptq/no_weight"),
)


def verdicts(engine: str, claim_id: str) -> dict[str, Verdict]:
    bench = Bench(find_backend(engine), seed=1, profile="full")
    claims = {claim.id: claim for claim in enumerate_claims(bench.config, bench.capabilities)}
    found = run_claim(bench, claims[claim_id])
    return {check.stage: check.verdict for check in found if isinstance(check, Check)}


def engine_or_skip(name: str) -> str:
    if name not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this build of torch has no engine {name}")
    return name


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("engine", "claim_id", "stage"), WRONG, ids=lambda value: str(value).partition("/")[0])
def test_a_wrong_kernel_is_found(engine: str, claim_id: str, stage: str) -> None:
    if claim_id.startswith("nn.Conv2d/") and not torch.cpu._is_vnni_supported():
        pytest.skip("this CPU has no AVX-512 VNNI, with which finding 12 shows")
    assert verdicts(engine_or_skip(engine), claim_id)[stage] is Verdict.REFUTED


@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize(("engine", "claim_id"), RIGHT, ids=lambda value: str(value).partition("/")[0])
def test_a_right_kernel_is_not_refuted(engine: str, claim_id: str) -> None:
    assert set(verdicts(engine_or_skip(engine), claim_id).values()) == {Verdict.VERIFIED}
