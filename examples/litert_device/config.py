"""What the device claims: what the shipped backend ``litert`` does, and how each set of kernels requantizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from fx_quant_conformance.backends.base import Capabilities, Representation, Requantize, RoundingMode, Taken
from fx_quant_conformance.backends.litert import LIMITS, SOFTMAX, LiteRTBackend
from fx_quant_conformance.refimpl import BackendConfig, BackendPatternConfig, DTypeConfig, qint8
from fx_quant_conformance.refimpl.config.dtype_config import DTypeWithConstraints

TWICE = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_AWAY)
UP = Requantize(multiplier_bits=31, rounds_twice=True, rounding=RoundingMode.HALF_UP)
EITHER = Requantize(multiplier_bits=31, rounds_twice=True)
MEAN = Requantize(multiplier_bits=29, rounds_twice=True, spare_bits=1, rounding=RoundingMode.HALF_AWAY)
TANH = DTypeConfig(qint8, DTypeWithConstraints(qint8, scale_exact_match=1 / 128, zero_point_exact_match=0))
FIXED: dict[Any, DTypeConfig] = {
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, "sigmoid"), SOFTMAX),
    **dict.fromkeys((nn.Tanh, torch.tanh, "tanh"), TANH),
}
"""The functions whose kernels write on one grid."""
WITHIN: dict[str, Taken] = {"ceil_mode": (False,)}
"""An AVERAGE_POOL_2D counts what explicit padding adds, also beyond the end."""


class XNNPACK(LiteRTBackend):
    """XNNPACK's delegate, with TFLite's own kernels for what it does not take."""

    name = "litert_xnnpack"
    representation = Representation.DECOMPOSED
    packages = ("ai_edge_litert",)  # type: ignore[assignment]
    settings = "the device's own files, kernels as its command says"

    def capabilities(self) -> Capabilities:
        averages = {op: LIMITS[op] | WITHIN for op in ("nn.AvgPool2d", "F.avg_pool2d")}
        return dataclasses.replace(super().capabilities(), limits=LIMITS | averages, dynamic_batch=True)


class Reference(XNNPACK):
    """TFLite's reference kernels."""

    name = "litert_reference"

    def backend_config(self) -> BackendConfig:
        fixed = [BackendPatternConfig(op).set_dtype_configs([dtypes]) for op, dtypes in FIXED.items()]
        return super().backend_config().set_backend_pattern_configs(fixed)

    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities(), requantize=TWICE, requantize_of={"*mean": MEAN})


class Builtin(Reference):
    """TFLite's own kernels, without a delegate.

    Ties go up in matrix products. In depthwise convolutions they do so in eights of channels, and away from zero in
    those left over, as in all of a grouped one.
    """

    name = "litert_builtin"

    def capabilities(self) -> Capabilities:
        rounds = {"*inear*": UP, "*onv*": EITHER, "*mean": MEAN}
        return dataclasses.replace(super().capabilities(), requantize_of=rounds)
