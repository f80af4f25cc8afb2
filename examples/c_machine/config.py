"""What the C machine claims: static int8 for a small set of ops, and how it requantizes (machine.c is the machine)."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.base import Backend, Capabilities, Representation, Requantize, RoundingMode
from fx_quant_conformance.refimpl import BackendConfig, DTypeConfig, nni, nniqat, nnqat, nnqr, qint8
from fx_quant_conformance.refimpl.config.backend_config import DIFFERENT, SHARE
from fx_quant_conformance.refimpl.config.dtype_config import DTypeWithConstraints
from fx_quant_conformance.refimpl.config.fusers import sequential
from fx_quant_conformance.refimpl.config.native import LINEAR_SWAP, Row, config_of

WEIGHTED = DTypeConfig(qint8, qint8, qint8, torch.float32)
PLAIN = DTypeConfig(qint8, qint8)
CONV_SWAP: dict[str, Any] = {"root": nn.Conv2d, "reference": nnqr.Conv2d}
INDEX = {"weight": 1, "bias": 2}
WITH_A_NUMBER = {0: DIFFERENT, 1: SHARE, 2: DIFFERENT}  # a sum or product with a number keeps the grid of its tensor
PROBABILITY = DTypeWithConstraints(
    qint8,
    quant_min_lower_bound=-128,
    quant_max_upper_bound=127,
    scale_exact_match=1 / 256,
    zero_point_exact_match=-128,
)

FAMILIES: dict[str, tuple[Row, ...]] = {
    "conv": (
        Row(patterns=(nn.Conv2d,), qat=nnqat.Conv2d, **CONV_SWAP),
        Row(patterns=(nnqat.Conv2d,), **CONV_SWAP),
        Row(patterns=(F.conv2d,), index=INDEX),
        Row(
            patterns=((nn.Conv2d, nn.ReLU), (nn.Conv2d, F.relu)), fused=nni.ConvReLU2d, fuser=sequential(nni.ConvReLU2d)
        ),
        Row(patterns=(nni.ConvReLU2d,), qat=nniqat.ConvReLU2d, **CONV_SWAP),
        Row(patterns=(nniqat.ConvReLU2d,), **CONV_SWAP),
        Row(patterns=((F.conv2d, nn.ReLU), (F.conv2d, F.relu))),
    ),
    "linear": (
        Row(patterns=(nn.Linear,), qat=nnqat.Linear, **LINEAR_SWAP),
        Row(patterns=(nnqat.Linear,), **LINEAR_SWAP),
        Row(patterns=(F.linear,), index=INDEX),
        Row(
            patterns=((nn.Linear, nn.ReLU), (nn.Linear, F.relu)), fused=nni.LinearReLU, fuser=sequential(nni.LinearReLU)
        ),
        Row(patterns=(nni.LinearReLU,), qat=nniqat.LinearReLU, **LINEAR_SWAP),
        Row(patterns=(nniqat.LinearReLU,), **LINEAR_SWAP),
        Row(patterns=((F.linear, nn.ReLU), (F.linear, F.relu))),
    ),
    "binary": tuple(
        Row(patterns=((op, nn.ReLU), (op, F.relu), op), observe_by_tensor_args=WITH_A_NUMBER)
        for op in (operator.add, torch.add, operator.mul, torch.mul)
    ),
    "difference": (Row(patterns=(operator.sub, torch.sub), observe_by_tensor_args=WITH_A_NUMBER),),
    "cat": (Row(patterns=(torch.cat,)),),  # its operands and its result have a grid each
    "norm": (Row(patterns=(nn.BatchNorm2d,)),),
    "table": (
        Row(patterns=(nn.Sigmoid, torch.sigmoid, nn.Hardsigmoid), output=PROBABILITY),
        Row(patterns=(nn.Hardswish, F.hardswish, nn.GELU)),
    ),
    "keeps the grid": (
        Row(
            patterns=(
                nn.ReLU,
                F.relu,
                nn.MaxPool2d,
                F.max_pool2d,
                nn.AvgPool2d,
                F.avg_pool2d,
                nn.AdaptiveAvgPool2d,
                F.adaptive_avg_pool2d,
                torch.flatten,
            ),
            observe=SHARE,
        ),
    ),
}


class CMachine(Backend):
    """The machine of machine.c. It runs as a command: only its claims are in Python."""

    name = "c_machine"
    representation = Representation.DECOMPOSED

    def backend_config(self) -> BackendConfig:
        """Return the claims: each family in int8, layers with weights of int8 and a bias."""
        table = {family: (WEIGHTED if family in ("conv", "linear") else PLAIN,) for family in FAMILIES}
        return config_of(self.name, table, FAMILIES)

    def capabilities(self) -> Capabilities:
        """Return how the machine computes: integer sums, one product with 31 bits, one shift that rounds half up.

        It pads with zeros, and its norms have statistics of their own.
        """
        return Capabilities(
            weight_schemes=("per_tensor_symmetric", "per_channel_symmetric"),
            int32_bias=True,
            requantize=Requantize(multiplier_bits=31, rounding=RoundingMode.HALF_UP),
            limits={"nn.Conv2d": {"padding_mode": ("zeros",)}, "nn.BatchNorm2d": {"track_running_stats": (True,)}},
        )
