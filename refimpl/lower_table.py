"""The lowering table: reference pattern → torch's quantized op or module (rules LOW-01, LOW-02)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.ao.nn.intrinsic as nni
import torch.ao.nn.intrinsic.quantized as nniq
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.reference as nnqr
import torch.nn.functional as F
from torch import nn

# (outer class, class of the module that holds the weight) → quantized module. (LOW-01)
MODULES: dict[tuple[type, type], Any] = {
    (nnqr.Linear, nnqr.Linear): nnq.Linear,
    (nnqr.Conv1d, nnqr.Conv1d): nnq.Conv1d,
    (nnqr.Conv2d, nnqr.Conv2d): nnq.Conv2d,
    (nnqr.Conv3d, nnqr.Conv3d): nnq.Conv3d,
    (nni.LinearReLU, nnqr.Linear): nniq.LinearReLU,
    (nni.ConvReLU1d, nnqr.Conv1d): nniq.ConvReLU1d,
    (nni.ConvReLU2d, nnqr.Conv2d): nniq.ConvReLU2d,
    (nni.ConvReLU3d, nnqr.Conv3d): nniq.ConvReLU3d,
}


def _tuple_of(rank: int, value: Any) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """A function whose constant weight is packed: pack op, quantized op without and with relu. (LOW-02)

    ``defaults`` stand for the arguments after the weight: bias, then stride, padding, dilation, groups.
    """

    prepack: Callable[..., Any]
    function: Callable[..., Any]
    relu_function: Callable[..., Any]
    defaults: tuple[Any, ...]
    rank: int

    def geometry(self, arguments: list[Any]) -> list[Any]:
        """Bring (stride, padding, dilation, groups) into the form that the pack op takes; [] for linear."""
        if not arguments:
            return []
        *spatial, groups = arguments
        return [*(_tuple_of(self.rank, value) for value in spatial), groups]


def _conv(rank: int) -> PackedFunction:
    ops = torch.ops.quantized
    return PackedFunction(
        prepack=getattr(ops, f"conv{rank}d_prepack"),
        function=getattr(ops, f"conv{rank}d"),
        relu_function=getattr(ops, f"conv{rank}d_relu"),
        defaults=(None, 1, 0, 1, 1),
        rank=rank,
    )


PACKED_FUNCTIONS: dict[Any, PackedFunction] = {
    F.linear: PackedFunction(
        prepack=torch.ops.quantized.linear_prepack,
        function=torch.ops.quantized.linear,
        relu_function=torch.ops.quantized.linear_relu,
        defaults=(None,),
        rank=0,
    ),
    F.conv1d: _conv(1),
    F.conv2d: _conv(2),
    F.conv3d: _conv(3),
}


class Binary(NamedTuple):
    """The quantized ops for a binary op, without and with relu."""

    plain: Callable[..., Any]
    with_relu: Callable[..., Any]


_ADD = Binary(torch.ops.quantized.add, torch.ops.quantized.add_relu)
_MUL = Binary(torch.ops.quantized.mul, torch.ops.quantized.mul_relu)
BINARY: dict[Any, Binary] = {operator.add: _ADD, torch.add: _ADD, operator.mul: _MUL, torch.mul: _MUL}

RELUS: frozenset[Any] = frozenset({F.relu, torch.relu, "relu", "relu_"})

# Ops that take quantized tensors as they are and keep their qparams: they move, select or average values. (LOW-02)
ON_QUANTIZED: frozenset[Any] = frozenset(
    {nn.ReLU, F.relu, torch.relu, "relu", "relu_",
     nn.Identity, nn.Dropout, F.dropout,
     nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d,
     nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
     nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
     F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
     torch.cat, torch.stack, torch.flatten, torch.narrow, torch.transpose, torch.squeeze, torch.unsqueeze,
     torch.repeat_interleave, nn.PixelShuffle, nn.PixelUnshuffle, torch.pixel_shuffle, torch.pixel_unshuffle,
     "contiguous", "detach", "detach_", "permute", "repeat", "repeat_interleave", "reshape", "resize_",
     "squeeze", "squeeze_", "transpose", "unsqueeze", "unsqueeze_", "view", "flatten"}
)  # fmt: skip

# Ops that read a tensor's shape, which is the same of the quantized tensor. (LOW-02)
SHAPE_OF: frozenset[Any] = frozenset({"size", "dim", "numel", "ndimension"})

# Methods of ON_QUANTIZED that change their operand: only safe when nobody else reads it. (LOW-03)
IN_PLACE: frozenset[Any] = frozenset({"relu_", "detach_", "resize_", "squeeze_", "unsqueeze_"})
