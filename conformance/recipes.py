"""Recipes: how to build and call each op that a pattern can name, in several variants (data, read by models.py).

A variant varies shape, geometry or arguments away from the default. Sizes are chosen at the edges of kernel tiles
(1, 7, 8, 9, 63, 64, 65), where a dropped tail or a padded lane shows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.ao.nn.intrinsic as nni
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to call an op: shapes of its tensor inputs, and the arguments that follow them."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


PerAxis: TypeAlias = int | tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Geometry of a convolution in any rank: one number for every axis, or one for each of up to three axes.

    The input is ``extent`` along the first axis and one less along each further one, so that swapped axes show.
    """

    c_in: int
    c_out: int
    kernel: PerAxis = 3
    stride: PerAxis = 1
    padding: PerAxis = 0
    dilation: PerAxis = 1
    groups: int = 1
    bias: bool = True
    batch: int = 1
    extent: int = 7

    @property
    def name(self) -> str:
        """Readable and unique: what is away from its default."""
        parts = [f"{self.c_in}to{self.c_out}k{_shown(self.kernel)}"]
        parts += [
            f"{label}{_shown(value)}"
            for label, value, default in (
                ("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1), ("g", self.groups, 1),
                ("b", self.batch, 1),
            )
            if value != default
        ]  # fmt: skip
        return "_".join(parts if self.bias else [*parts, "nobias"])


def along(value: PerAxis, rank: int) -> tuple[int, ...]:
    """Return the numbers for the first `rank` axes."""
    return (value,) * rank if isinstance(value, int) else value[:rank]


def _shown(value: PerAxis) -> str:
    return str(value) if isinstance(value, int) else "x".join(map(str, value))


CONVOLUTIONS = (
    Convolution(c_in=3, c_out=5),
    Convolution(c_in=8, c_out=8, padding=1, batch=4, extent=5),
    Convolution(c_in=65, c_out=9, kernel=1, extent=3),
    Convolution(c_in=4, c_out=6, kernel=(3, 2, 1), stride=(2, 1, 1), padding=(1, 0, 1), groups=2),
    Convolution(c_in=16, c_out=16, padding=1, groups=16),
    Convolution(c_in=9, c_out=9, padding=1, groups=9),
    Convolution(c_in=8, c_out=16, stride=2, padding=1, groups=8),
    Convolution(c_in=7, c_out=64, kernel=2, padding=1, dilation=2, bias=False),
    Convolution(c_in=1, c_out=1, kernel=5, padding=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Geometry of a linear op; `batch` are the leading dimensions of the input."""

    features_in: int
    features_out: int
    bias: bool = True
    batch: tuple[int, ...] = (2,)

    @property
    def name(self) -> str:
        """Readable and unique."""
        batch = "x".join(map(str, self.batch))
        return f"{self.features_in}to{self.features_out}_b{batch}{'' if self.bias else '_nobias'}"


MATRICES = (
    Matrix(features_in=1, features_out=1),
    Matrix(features_in=7, features_out=9, bias=False),
    Matrix(features_in=64, features_out=65, batch=(4,)),
    Matrix(features_in=63, features_out=8, batch=(1,)),
    Matrix(features_in=9, features_out=16, batch=(2, 3)),
    Matrix(features_in=257, features_out=3),
)

WEIGHTED_MODULES: dict[Any, int] = {nn.Linear: 0, nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
WEIGHTED_FUNCTIONS: dict[Any, int] = {F.linear: 0, F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
FUSED_MODULES: dict[Any, tuple[Any, ...]] = {
    nni.LinearReLU: (nn.Linear, nn.ReLU),
    nni.ConvReLU1d: (nn.Conv1d, nn.ReLU),
    nni.ConvReLU2d: (nn.Conv2d, nn.ReLU),
    nni.ConvReLU3d: (nn.Conv3d, nn.ReLU),
}
BATCH_NORMS: dict[Any, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
RELUS = frozenset({nn.ReLU, F.relu, torch.relu})

_BINARY = (
    Variant(name="65", shapes=((65,), (65,))),
    Variant(name="1x1", shapes=((1, 1), (1, 1))),
    Variant(name="2x7x3x3", shapes=((2, 7, 3, 3), (2, 7, 3, 3))),
    Variant(name="64x64", shapes=((64, 64), (64, 64))),
    Variant(name="broadcast_right", shapes=((2, 7, 3, 3), (2, 7, 1, 1))),
)
BINARY: frozenset[Any] = frozenset({operator.add, operator.mul, torch.add, torch.mul})

_CAT = (
    Variant(name="dim0", shapes=((2, 7), (3, 7)), arguments=(0,)),
    Variant(name="dim1", shapes=((2, 7, 3, 3), (2, 9, 3, 3)), arguments=(1,)),
    Variant(name="last", shapes=((2, 3, 65), (2, 3, 1)), arguments=(-1,)),
)
_STACK = (Variant(name="dim1", shapes=((2, 7), (2, 7)), arguments=(1,)), Variant(name="dim0", shapes=((9,), (9,))))
LIST_OPS: dict[Any, tuple[Variant, ...]] = {torch.cat: _CAT, torch.stack: _STACK}

_ANY_SHAPE = (
    Variant(name="65", shapes=((65,),)),
    Variant(name="2x7x3x3", shapes=((2, 7, 3, 3),)),
    Variant(name="4x64", shapes=((4, 64),)),
)


def _one(shape: tuple[int, ...], *arguments: Any, **keywords: Any) -> Variant:
    named = [f"{key}{value}" for key, value in keywords.items()]
    shown = "_".join(["x".join(map(str, shape)), *map(str, arguments), *named])
    return Variant(name=shown, shapes=(shape,), arguments=arguments, keywords=keywords)


def _pool(rank: int, *, is_average: bool) -> tuple[Variant, ...]:
    shape = (2, 9, *(8, 7, 6)[:rank])
    extra = [{"count_include_pad": False}] if is_average else [{"dilation": 2}]
    keywords: list[dict[str, Any]] = [{}, {"stride": 1, "padding": 1}, {"stride": 2, "padding": 1, "ceil_mode": True}]
    keywords += [{"stride": 2, "padding": 1, **more} for more in extra]
    return tuple(_one(shape, 3, **more) for more in keywords)


def _adaptive(rank: int) -> tuple[Variant, ...]:
    shape = (2, 9, *[7] * rank)
    return _one(shape, 1), _one(shape, 3), _one(shape, 7), _one((1, 65, *[4] * rank), 2)


_POOLS = {
    (kind, rank): (_adaptive(rank) if kind == "adaptive" else _pool(rank, is_average=kind == "avg"))
    for kind in ("max", "avg", "adaptive")
    for rank in (1, 2, 3)
}
_IMAGE = (2, 7, 3, 3)
_SQUEEZE = (_one((2, 1, 9)), _one((2, 1, 9), 1))
_UNSQUEEZE = (_one((2, 9), 1), _one((65,), -1))
_TRANSPOSE = (_one(_IMAGE, 1, 2), _one((7, 9), 0, -1))
_SHUFFLE = (_one((2, 12, 3, 3), 2), _one((1, 9, 2, 2), 3))
_UNSHUFFLE = (_one((2, 3, 4, 4), 2), _one((1, 1, 6, 6), 3))
_REPEAT_INTERLEAVE = (_one((2, 9), 2, 1), _one((7,), 3))

# Ops of one tensor: modules, functions and methods, with the arguments that follow the tensor (or make the module).
UNARY: dict[Any, tuple[Variant, ...]] = {
    nn.ReLU: _ANY_SHAPE, F.relu: _ANY_SHAPE, torch.relu: _ANY_SHAPE, "relu": _ANY_SHAPE, "relu_": _ANY_SHAPE,
    nn.Identity: _ANY_SHAPE, nn.Dropout: _ANY_SHAPE, F.dropout: (_one((4, 64), training=False),),
    nn.MaxPool1d: _POOLS["max", 1], nn.MaxPool2d: _POOLS["max", 2], nn.MaxPool3d: _POOLS["max", 3],
    F.max_pool1d: _POOLS["max", 1], F.max_pool2d: _POOLS["max", 2], F.max_pool3d: _POOLS["max", 3],
    nn.AvgPool1d: _POOLS["avg", 1], nn.AvgPool2d: _POOLS["avg", 2], nn.AvgPool3d: _POOLS["avg", 3],
    F.avg_pool1d: _POOLS["avg", 1], F.avg_pool2d: _POOLS["avg", 2], F.avg_pool3d: _POOLS["avg", 3],
    nn.AdaptiveAvgPool1d: _POOLS["adaptive", 1], nn.AdaptiveAvgPool2d: _POOLS["adaptive", 2],
    nn.AdaptiveAvgPool3d: _POOLS["adaptive", 3], F.adaptive_avg_pool1d: _POOLS["adaptive", 1],
    F.adaptive_avg_pool2d: _POOLS["adaptive", 2], F.adaptive_avg_pool3d: _POOLS["adaptive", 3],
    torch.flatten: (_one(_IMAGE), _one(_IMAGE, 1), _one(_IMAGE, 1, 2)), "flatten": (_one(_IMAGE, 1),),
    torch.narrow: (_one((2, 9), 1, 2, 5), _one((65,), 0, 64, 1)),
    torch.transpose: _TRANSPOSE, "transpose": _TRANSPOSE,
    torch.squeeze: _SQUEEZE, "squeeze": _SQUEEZE, "squeeze_": _SQUEEZE,
    torch.unsqueeze: _UNSQUEEZE, "unsqueeze": _UNSQUEEZE, "unsqueeze_": _UNSQUEEZE,
    torch.repeat_interleave: _REPEAT_INTERLEAVE, "repeat_interleave": _REPEAT_INTERLEAVE,
    nn.PixelShuffle: _SHUFFLE, torch.pixel_shuffle: _SHUFFLE,
    nn.PixelUnshuffle: _UNSHUFFLE, torch.pixel_unshuffle: _UNSHUFFLE,
    "contiguous": _ANY_SHAPE, "detach": _ANY_SHAPE, "detach_": _ANY_SHAPE,
    "permute": (_one(_IMAGE, 0, 2, 3, 1), _one((7, 9), 1, 0)),
    "repeat": (_one((2, 9), 2, 1, 3), _one((7,), 2)),
    "reshape": (_one(_IMAGE, 2, -1), _one((65,), 5, 13)),
    "resize_": (_one(_IMAGE, 2, 63),),
    "view": (_one(_IMAGE, 2, -1), _one((65,), 5, 13)),
}  # fmt: skip

# Ops that only move or select values: no arithmetic, so not a single step may differ. (NUM-05)
_ARITHMETIC: tuple[Callable[..., Any], ...] = (
    nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
)  # fmt: skip
MOVES: frozenset[Any] = frozenset({*UNARY, *LIST_OPS}).difference(_ARITHMETIC)


def binary_variants() -> tuple[Variant, ...]:
    """Variants of add and mul of two tensors."""
    return _BINARY
