"""Ops that no native config names go through all stages without `register`; the reference model is right on all."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backends.base import Capabilities
from conformance.claims.claim import enumerate_claims
from conformance.oracle.error_bounds import MOVES
from conformance.oracle.table import rule_of
from conformance.pipeline.claim_run import run_claim
from conformance.stages.bench import Bench
from refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, ObservationType
from refimpl.patterns import leaf_name
from reports.schema import Check
from reports.verdicts import Verdict
from tests.conformance.support.fake_backends.reporting import ReportingReference

OPS = (
    nn.SiLU, F.gelu, nn.Mish, F.softplus, F.prelu, "softmax", nn.GroupNorm, torch.bmm, "matmul", operator.truediv,
    torch.div, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.ConstantPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad3d, nn.CircularPad2d, nn.PixelShuffle, torch.pixel_unshuffle,
)  # fmt: skip
"""Each by one of its names; the oracle's tests compare the others."""


class OneOp(ReportingReference):
    """The reference model itself, for one op; what only moves values shares its observer."""

    def __init__(self, op: Any) -> None:
        entry = BackendPatternConfig(op).set_dtype_configs([DTypeConfig(torch.quint8, torch.quint8)])
        rule = rule_of(op)
        if rule is not None and rule.arithmetic == MOVES:
            entry.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
        self.entries = BackendConfig("one op").set_backend_pattern_config(entry)

    def backend_config(self) -> BackendConfig:
        return self.entries

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), float_accumulation=True)


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("profile", ("quick", "full"))
@pytest.mark.parametrize("op", OPS, ids=leaf_name)
def test_the_reference_model_of_one_op_is_verified(op: Any, profile: str) -> None:
    bench = Bench(OneOp(op), seed=0, profile=profile)
    claim, *_ = enumerate_claims(bench.config, bench.capabilities)
    checks = [each for each in run_claim(bench, claim) if isinstance(each, Check)]
    assert [(each.stage, each.message) for each in checks if each.verdict is not Verdict.VERIFIED] == []
