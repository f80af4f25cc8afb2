"""Ops that no native config names go through all stages without `register`; the reference model is right on all."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.conformance.bounds.error_bounds import MOVES
from fx_quant_conformance.conformance.oracle.table import rule_of
from fx_quant_conformance.refimpl import BackendPatternConfig, ObservationType
from fx_quant_conformance.refimpl.config.patterns import leaf_name
from tests.conformance.support.own_entries import U8, OwnEntries, checks_of, failures

OPS = (
    nn.SiLU,
    F.gelu,
    nn.Mish,
    F.softplus,
    F.prelu,
    "softmax",
    nn.GroupNorm,
    torch.bmm,
    "matmul",
    operator.truediv,
    torch.div,
    nn.Upsample,
    nn.UpsamplingNearest2d,
    nn.UpsamplingBilinear2d,
    nn.ConstantPad1d,
    nn.ReflectionPad2d,
    nn.ReplicationPad3d,
    nn.CircularPad2d,
    nn.PixelShuffle,
    torch.pixel_unshuffle,
    operator.getitem,
)
"""Each by one of its names; the oracle's tests compare the others."""


@pytest.mark.slow
@pytest.mark.rule("NUM-03")
@pytest.mark.parametrize("profile", ("quick", "full"))
@pytest.mark.parametrize("op", OPS, ids=leaf_name)
def test_the_reference_model_of_one_op_is_verified(op: Any, profile: str) -> None:
    """What only moves values shares its observer."""
    entry, rule = BackendPatternConfig(op).set_dtype_configs([U8]), rule_of(op)
    if rule is not None and rule.arithmetic == MOVES:
        entry.set_observation_type(ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT)
    assert failures(checks_of(OwnEntries(entry), profile=profile)) == []
