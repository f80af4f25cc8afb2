"""Samples of pools and of interpolation: windows, strides, padding, output sizes, modes (variants.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from conformance.ops.calls import Shape, call, module, one_input
from conformance.ops.op_model import Step
from conformance.ops.variants import Arguments, Fixed, OpSamples

_INDICES = Fixed(reason="the indices are a second, integer output, beside the same values")


def _along(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _extents(arguments: Arguments, rank: int) -> tuple[int, ...]:
    shape: Shape = arguments["shape"]
    return shape[-rank:]


def _shapes(rank: int) -> tuple[Shape, ...]:
    """A batch of images whose axes differ in length; one image without a batch; many channels; one channel."""
    return ((2, 9, 8, 7, 6)[: rank + 2], (7, 9, 8, 7)[: rank + 1], (1, 65, 5, 6, 5)[: rank + 2],
            (4, 1, 9, 5, 5)[: rank + 2])  # fmt: skip


def _windows(rank: int) -> dict[str, tuple[Any, ...]]:
    """The arguments of all pools; tuples have another number for each axis. Five along each axis is a large window."""
    return {
        "kernel_size": (3, (2, 3, 1)[:rank], 5),
        "stride": (None, 1, (2, 1, 2)[:rank]),
        "padding": (0, 1, (1, 0, 0)[:rank]),
        "ceil_mode": (False, True),
    }


_KNOWN: tuple[Arguments, ...] = (
    {"kernel_size": 2}, {"kernel_size": 2, "stride": 2}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, {"kernel_size": 3, "stride": 2},
    {"kernel_size": 5, "stride": 1, "padding": 2},
)  # fmt: skip
"""The windows of VGG, ResNet, GoogLeNet and SqueezeNet, and of spatial pyramid pooling."""


def _wide(rank: int) -> Arguments:
    """Rows longer than a register block."""
    return {"kernel_size": 3, "stride": 2, "padding": 1, "shape": (*(1, 3, 5, 5)[: rank + 1], 67)}


def _one_pixel(rank: int) -> Arguments:
    """An image of one pixel is contiguous and channels_last at once."""
    return {"kernel_size": 2, "stride": 1, "padding": 1, "shape": (2, 5, 1, 1, 1)[: rank + 2]}


def _has_windows(rank: int) -> Callable[[Arguments], bool]:
    """Along every axis the padding is at most half of the window, which fits into the padded input."""

    def is_valid(arguments: Arguments) -> bool:
        kernel, padding, dilation = (
            _along(arguments.get(name, 1), rank) for name in ("kernel_size", "padding", "dilation")
        )
        axes = zip(_extents(arguments, rank), kernel, padding, dilation, strict=True)
        return all(2 * pad <= size and extent + 2 * pad > step * (size - 1) for extent, size, pad, step in axes)

    return is_valid


def _max_pool(rank: int, *, is_module: bool) -> OpSamples:
    options = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
    return OpSamples(
        arguments={
            **_windows(rank), "dilation": (1, 2, (1, 2, 2)[:rank]), "return_indices": _INDICES, "shape": _shapes(rank)
        },
        inputs=one_input,
        step=module if is_module else call("kernel_size", **options),
        is_valid=_has_windows(rank),
        known=(*_KNOWN, _wide(rank), _one_pixel(rank)),
    )  # fmt: skip


def _avg_pool(rank: int, *, is_module: bool) -> OpSamples:
    options = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
    more: dict[str, Any] = {"count_include_pad": (True, False)}
    if rank > 1:
        more |= {"divisor_override": (None, 7)}
        options |= {"divisor_override": None}
    fits = _has_windows(rank)
    return OpSamples(
        arguments={**_windows(rank), **more, "shape": _shapes(rank)},
        inputs=one_input,
        step=module if is_module else call("kernel_size", **options),
        is_valid=lambda arguments: fits(arguments) and _counts(arguments),
        known=(*_KNOWN, _wide(rank), *[_one_pixel(rank)] * (rank < 3)),  # in three axes padding does not help to fit
    )


def _counts(arguments: Arguments) -> bool:
    """What is counted matters only where there is padding and no other divisor."""
    has_divisor = arguments.get("divisor_override") is not None
    return arguments["count_include_pad"] or (arguments["padding"] != 0 and not has_divisor)


def _adaptive(rank: int, *, is_module: bool) -> OpSamples:
    """Output sizes that divide the extents or not, that exceed them, and that are kept (None); a large reduction."""
    kept = () if rank == 1 else ((3, None, 2)[:rank],)
    large = (1, 3, *((1025,), (33, 31), (11, 10, 9))[rank - 1])
    return OpSamples(
        arguments={"output_size": (1, 3, (4, 2, 3)[:rank], 11, *kept), "shape": (*_shapes(rank), large)},
        inputs=one_input,
        step=module if is_module else call("output_size"),
        known=({"output_size": 3, "shape": (2, 5, 1, 1, 1)[: rank + 2]},),
    )


_RANK_OF_MODE = {"linear": 3, "bilinear": 4, "bicubic": 4, "trilinear": 5}
_FILTERED = ("bilinear", "bicubic")


def _interpolation_is_valid(arguments: Arguments) -> bool:
    mode, size, factor = arguments["mode"], arguments["size"], arguments["scale_factor"]
    rank = len(arguments["shape"])
    per_axis = [len(value) for value in (size, factor) if isinstance(value, tuple)]
    if _RANK_OF_MODE.get(mode, rank) != rank or any(length != rank - 2 for length in per_axis):
        return False
    if size is not None and (factor != 2 or arguments["recompute_scale_factor"]):
        return False
    if arguments["align_corners"] is not None and mode not in _RANK_OF_MODE:
        return False
    return not arguments["antialias"] or mode in _FILTERED


def _interpolate(op: Any, arguments: Arguments) -> Step:
    """The factor is given where no size is: it is one or the other."""
    options = ("align_corners", "recompute_scale_factor", "antialias")
    keywords = {name: arguments[name] for name in options if arguments[name]}
    if arguments["align_corners"] is False:
        keywords["align_corners"] = False
    if arguments["mode"] != "nearest":
        keywords["mode"] = arguments["mode"]
    given = "scale_factor" if arguments["size"] is None else "size"
    return Step(op=op, keywords=tuple({given: arguments[given], **keywords}.items()))


_INTERPOLATE = OpSamples(
    arguments={
        "size": (None, 5, (11, 3)),
        "scale_factor": (2, 1.5, (0.75, 3.0)),
        "mode": ("nearest", "nearest-exact", "area", "linear", "bilinear", "bicubic", "trilinear"),
        "align_corners": (None, True, False),
        "recompute_scale_factor": (None, True),
        "antialias": (False, True),
        "shape": ((2, 7, 5, 6), (2, 9, 7), (1, 3, 4, 5, 3), (1, 65, 4, 3)),
    },
    inputs=one_input,
    step=_interpolate,
    is_valid=_interpolation_is_valid,
    known=({"size": 5, "shape": (2, 5, 1, 1)},),
)

_MAX = ((nn.MaxPool1d, F.max_pool1d), (nn.MaxPool2d, F.max_pool2d), (nn.MaxPool3d, F.max_pool3d))
_AVG = ((nn.AvgPool1d, F.avg_pool1d), (nn.AvgPool2d, F.avg_pool2d), (nn.AvgPool3d, F.avg_pool3d))
_ADAPTIVE = ((nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d), (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
             (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d))  # fmt: skip

OP_SAMPLES: dict[Any, OpSamples] = {
    op: make(rank, is_module=isinstance(op, type))
    for make, table in ((_max_pool, _MAX), (_avg_pool, _AVG), (_adaptive, _ADAPTIVE))
    for rank, ops in enumerate(table, start=1)
    for op in ops
} | {F.interpolate: _INTERPOLATE}
