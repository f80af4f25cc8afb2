"""Pools and interpolation: their samples (windows, strides, padding, sizes, modes) and their rules (variants.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.conformance.bounds import error_bounds_arithmetic as bounds
from fx_quant_conformance.conformance.bounds.error_bounds import RESCALE, OpRule
from fx_quant_conformance.conformance.ops.calls import MOVED, Shape, call, construct
from fx_quant_conformance.conformance.ops.op_model import Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord

_INDICES = Fixed(reason="the indices are a second, integer output, in addition to the same values")


def _list_shapes(rank: int) -> tuple[Shape, ...]:
    """A batch of images whose axes differ in length; one image without a batch; many channels; one channel."""
    return (
        (2, 9, 8, 7, 6)[: rank + 2],
        (7, 9, 8, 7)[: rank + 1],
        (1, 65, 5, 6, 5)[: rank + 2],
        (4, 1, 9, 5, 5)[: rank + 2],
    )


def _vary_windows(rank: int) -> dict[str, tuple[Any, ...]]:
    """The arguments of all pools; tuples have another number for each axis. Five along each axis is a large window."""
    return {
        "kernel_size": (3, (2, 3, 1)[:rank], 5),
        "stride": (None, 1, (2, 1, 2)[:rank]),
        "padding": (0, 1, (1, 0, 0)[:rank]),
        "ceil_mode": (False, True),
    }


_KNOWN: tuple[Arguments, ...] = (
    {"kernel_size": 2},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 5, "stride": 1, "padding": 2},
)
"""The windows of VGG, ResNet, GoogLeNet and SqueezeNet, and of spatial pyramid pooling."""


def _list_known(rank: int) -> list[Arguments]:
    """Known windows; rows longer than a register block; an image of one pixel is contiguous and channels_last."""
    usual = {"kernel_size": 3, "stride": 2, "padding": 1}
    one_pixel = {"kernel_size": 2, "stride": 1, "padding": 1, "shape": (2, 5, 1, 1, 1)[: rank + 2]}
    return [*_KNOWN, usual | {"shape": (*(1, 3, 5, 5)[: rank + 1], 67)}, one_pixel]


def _fits_windows(rank: int, arguments: Arguments) -> bool:
    """Along every axis the padding is at most half of the window, which fits into the padded input."""
    axes = _list_axes(rank, arguments)
    return all(2 * pad <= size and extent + 2 * pad > step * (size - 1) for extent, size, _, pad, step in axes)


def _list_axes(rank: int, arguments: Arguments) -> Iterator[tuple[int, ...]]:
    """Return extent, window, stride, padding and dilation of each axis."""
    stride = arguments["stride"] or arguments["kernel_size"]
    options = [arguments["kernel_size"], stride, arguments["padding"], arguments.get("dilation", 1)]
    by_axis = [(option,) * rank if isinstance(option, int) else option for option in options]
    return zip(arguments["shape"][-rank:], *by_axis, strict=True)


def _list_idle(rank: int, arguments: Arguments) -> tuple[str, ...]:
    """``ceil_mode`` changes nothing where no axis has a further window that begins before the padding at its end."""
    for extent, size, stride, pad, step in _list_axes(rank, arguments):
        span = extent + 2 * pad - step * (size - 1) - 1
        if span % stride and (span // stride + 1) * stride < extent + pad:
            return ()
    return ("ceil_mode",)


def _sample_max_pool(rank: int, *, is_module: bool) -> OpRecord:
    dilations = (1, 2, (1, 2, 2)[:rank])
    return OpRecord(
        arguments={
            **_vary_windows(rank),
            "dilation": dilations,
            "return_indices": _INDICES,
            "shape": _list_shapes(rank),
        },
        step=construct if is_module else call("kernel_size", stride=None, padding=0, dilation=1, ceil_mode=False),
        is_valid=partial(_fits_windows, rank),
        idle=partial(_list_idle, rank),
        known=tuple(_list_known(rank)),
        rule=MOVED,
    )


def _make_average_rule(rank: int) -> OpRule:
    source = f"torch.nn.functional.avg_pool{rank}d; NUM-04"
    return OpRule(arithmetic=RESCALE, bound=partial(bounds.bound_windows, rank), source=source)


def _sample_avg_pool(rank: int, *, is_module: bool) -> OpRecord:
    divisors: dict[str, tuple[Any, ...]] = {"divisor_override": (None, 7)} if rank > 1 else {}
    options = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True, **dict.fromkeys(divisors)}
    return OpRecord(
        arguments={**_vary_windows(rank), "count_include_pad": (True, False), **divisors, "shape": _list_shapes(rank)},
        step=construct if is_module else call("kernel_size", **options),
        is_valid=lambda arguments: _fits_windows(rank, arguments) and _is_counted(arguments),
        idle=partial(_list_idle, rank),
        known=tuple(_list_known(rank)[: -1 if rank == 3 else None]),  # in three axes padding does not help to fit
        rule=_make_average_rule(rank),
    )


def _is_counted(arguments: Arguments) -> bool:
    """What is counted matters only where there is padding and no other divisor."""
    has_divisor = arguments.get("divisor_override") is not None
    return arguments["count_include_pad"] or (arguments["padding"] != 0 and not has_divisor)


def _sample_adaptive_pool(rank: int, *, is_module: bool) -> OpRecord:
    """Output sizes that divide the extents or not, that exceed them, and that are kept (None); a large reduction."""
    with_none = () if rank == 1 else ((3, None, 2)[:rank],)
    large = (1, 3, *((1025,), (33, 31), (11, 10, 9))[rank - 1])
    return OpRecord(
        arguments={"output_size": (1, 3, (4, 2, 3)[:rank], 11, *with_none), "shape": (*_list_shapes(rank), large)},
        step=construct if is_module else call("output_size"),
        known=({"output_size": 3, "shape": (2, 5, 1, 1, 1)[: rank + 2]},),
        rule=_make_average_rule(rank),
    )


_RANK_OF_MODE = {"linear": 3, "bilinear": 4, "bicubic": 4, "trilinear": 5}
_FILTERED = ("bilinear", "bicubic")


def _is_valid_interpolation(arguments: Arguments) -> bool:
    mode, size, factor = arguments["mode"], arguments["size"], arguments["scale_factor"]
    rank = len(arguments["shape"])
    per_axis = [len(value) for value in (size, factor) if isinstance(value, tuple)]
    if _RANK_OF_MODE.get(mode, rank) != rank or any(length != rank - 2 for length in per_axis):
        return False
    if size is not None and (factor != 2 or arguments["recompute_scale_factor"]):
        return False
    if arguments["align_corners"] is not None and mode not in _RANK_OF_MODE:
        return False
    return not arguments.get("antialias") or mode in _FILTERED


def _interpolate(op: Any, arguments: Arguments) -> Step:
    """The factor is given where no size is: it is one or the other."""
    options = ("align_corners", "recompute_scale_factor", "antialias")
    keywords = {name: arguments[name] for name in options if arguments[name]}
    if arguments["align_corners"] is False:
        keywords["align_corners"] = False
    if arguments["mode"] != "nearest":
        keywords["mode"] = arguments["mode"]
    extent = "scale_factor" if arguments["size"] is None else "size"
    return Step(op=op, keywords=tuple({extent: arguments[extent], **keywords}.items()))


_INTERPOLATE = OpRecord(
    arguments={
        "size": (None, 5, (11, 3)),
        "scale_factor": (2, 1.5, (0.75, 3.0)),
        "mode": ("nearest", "nearest-exact", "area", "linear", "bilinear", "bicubic", "trilinear"),
        "align_corners": (None, True, False),
        "recompute_scale_factor": (None, True),
        "antialias": (False, True),
        "shape": ((2, 7, 5, 6), (2, 9, 7), (1, 3, 4, 5, 3), (1, 65, 4, 3)),
    },
    step=_interpolate,
    is_valid=_is_valid_interpolation,
    known=({"size": 5, "shape": (2, 5, 1, 1)},),
    rule=OpRule(arithmetic=RESCALE, bound=bounds.bound_interpolation, source="torch.nn.functional.interpolate"),
)


def _construct_upsample(op: Any, arguments: Arguments) -> Step:
    """The module with the factor, or with the size where one is given."""
    left_out = ("shape", "size" if arguments["size"] is None else "scale_factor")
    return Step(op=op(**{name: value for name, value in arguments.items() if name not in left_out}))


_UPSAMPLE = replace(
    _INTERPOLATE,
    arguments={name: values for name, values in _INTERPOLATE.arguments.items() if name != "antialias"},
    step=_construct_upsample,
)
_UPSAMPLE_2D = OpRecord(
    arguments={
        "size": (None, 5, (11, 3)),
        "scale_factor": (2, 1.5, (0.75, 3.0)),
        "shape": ((2, 7, 5, 6), (1, 65, 4, 3), (4, 1, 9, 5)),
    },
    step=_construct_upsample,
    is_valid=lambda arguments: arguments["size"] is None or arguments["scale_factor"] == 2,
    known=({"size": 5, "shape": (2, 5, 1, 1)},),
    rule=_INTERPOLATE.rule,
)
_UPSAMPLING: dict[Any, OpRecord] = {
    F.interpolate: _INTERPOLATE,
    nn.Upsample: _UPSAMPLE,
    **dict.fromkeys((nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), _UPSAMPLE_2D),
}

_MAX = ((nn.MaxPool1d, F.max_pool1d), (nn.MaxPool2d, F.max_pool2d), (nn.MaxPool3d, F.max_pool3d))
_AVG = ((nn.AvgPool1d, F.avg_pool1d), (nn.AvgPool2d, F.avg_pool2d), (nn.AvgPool3d, F.avg_pool3d))
_ADAPTIVE = (
    (nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d),
    (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
    (nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d),
)

RECORDS: dict[Any, OpRecord] = {
    op: sample(rank, is_module=isinstance(op, type))
    for sample, table in ((_sample_max_pool, _MAX), (_sample_avg_pool, _AVG), (_sample_adaptive_pool, _ADAPTIVE))
    for rank, ops in enumerate(table, start=1)
    for op in ops
} | _UPSAMPLING
