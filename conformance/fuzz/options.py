"""The op samples that fit a value of a given shape, for drawn graphs (`conformance.fuzz.graph`).

Op samples lead from arguments to shapes; here a shape leads to arguments, with the values of the samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from conformance.ops.calls import Shape
from conformance.ops.table import OP_SAMPLES, WEIGHTED
from conformance.ops.variants import Arguments, Fixed
from refimpl.patterns import leaf_name

OptionsFor = Callable[[Any, Shape], list[dict[str, Any]]]
Condition = Callable[[Shape, Arguments], bool]

PAIRS = (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul)
"""Ops of two tensors that are broadcast, or of a tensor and a number."""
JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
"""Ops of a list of tensors."""
_NOT_DRAWN = (operator.floordiv, torch.matmul, operator.matmul, "matmul", torch.bmm, "bmm", torch.addmm, "view",
              "resize_", "size", "shape")  # fmt: skip
"""Ops that do not take every value (but integers, matrices that fit, or contiguous memory), or return none."""
_RARE: Arguments = {"inplace": True, "training": True, "_unbatched": True, "_uneven": True}
"""Arguments that are not drawn: in place, an op would change what others read; unbatched, no other op would fit."""


@cache
def options_for(op: Any, shape: Shape) -> tuple[dict[str, Any], ...]:
    """List arguments with which an op takes a value of this shape, the base first; none: it does not take it.

    What depends on other values or is free to choose is left out: the sizes of a second operand, channels.
    """
    if op in _NOT_DRAWN or op not in OP_SAMPLES:
        return ()
    unique = {repr(arguments): arguments for arguments in _select_family(op)(op, shape)}
    return tuple(arguments for arguments in unique.values() if all(map(_is_plain, arguments.values())))


def _select_family(op: Any) -> OptionsFor:
    if op in PAIRS:
        return _list_pairs
    if op in JOINS:
        return _list_joins
    if op in WEIGHTED:
        return _list_linear if "linear" in leaf_name(op).lower() else _list_convolutions
    return _list_reshapes if op == "reshape" else _list_variants


def _is_plain(value: Any) -> bool:
    """Tell whether a value can be written as JSON."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (int, float, str, type(None)))


@cache
def _variants_of(op: Any) -> tuple[dict[str, Any], ...]:
    """Return the op's variants without those that are not drawn."""
    variants = (arguments for _, arguments in OP_SAMPLES[op].variants(known=False))
    return tuple(each for each in variants if not any(each.get(name) == value for name, value in _RARE.items()))


def _list_variants(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List the variants of an op of one tensor that are valid for the shape."""
    samples = OP_SAMPLES[op]
    shapes = samples.arguments.get("shape", ())
    ranks = () if isinstance(shapes, Fixed) else {len(each) for each in shapes}
    if len(shape) not in ranks:
        return []
    fits: Condition = _SPECIAL.get(op, lambda shape, arguments: True)
    variants = [{**arguments, "shape": shape} for arguments in _variants_of(op)]
    return [each for each in variants if samples.is_valid(each) and fits(shape, each)]


def _has_valid_groups(shape: Shape, arguments: Arguments) -> bool:
    """Groups have at least two elements; torch cannot train a bias without a weight."""
    is_trainable = arguments.get("weight", True) or not arguments["bias"]
    return is_trainable and shape[1] % arguments["num_groups"] == 0 and prod(shape[1:]) > arguments["num_groups"]


def _fits_along(name: str, rank: int) -> Condition:
    """Return what tells whether an argument is at most the image's extent, along each of its ``rank`` axes."""
    return lambda shape, arguments: all(map(operator.le, _along(arguments[name], shape[-rank:]), shape[-rank:]))


def _is_not_empty(shape: Shape, arguments: Arguments) -> bool:
    """Scaled down, an axis of one element would have none."""
    factors = arguments["scale_factor"] if isinstance(arguments["scale_factor"], tuple) else ()
    return all(int(extent * factor) > 0 for extent, factor in zip(shape[2:], factors, strict=False))


def _divides(name: str, power: Callable[[int], int], *axes: int) -> Condition:
    return lambda shape, arguments: all(shape[axis] % power(arguments[name]) == 0 for axis in axes)


_SPECIAL: dict[Any, Condition] = {
    # A normalisation over the elements of a channel needs two of them.
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm), lambda shape, _: prod(shape[2:]) > 1
    ),
    # A batch norm is trained on at least two elements of each channel.
    **dict.fromkeys((nn.BatchNorm2d, nn.BatchNorm3d), lambda shape, _: prod(shape) // shape[1] > 1),
    # No dilated window steps over the whole image, from padding to padding.
    **dict.fromkeys((nn.MaxPool1d, F.max_pool1d), _fits_along("dilation", 1)),
    **dict.fromkeys((nn.MaxPool2d, F.max_pool2d), _fits_along("dilation", 2)),
    **dict.fromkeys((nn.MaxPool3d, F.max_pool3d), _fits_along("dilation", 3)),
    # Torch requires that the window of avg_pool3d fits into the image without the padding.
    **dict.fromkeys((nn.AvgPool3d, F.avg_pool3d), _fits_along("kernel_size", 3)),
    **dict.fromkeys((F.group_norm, nn.GroupNorm), _has_valid_groups),
    **dict.fromkeys((F.interpolate, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), _is_not_empty),
    **dict.fromkeys((nn.PixelShuffle, torch.pixel_shuffle), _divides("upscale_factor", lambda factor: factor**2, -3)),
    **dict.fromkeys((nn.PixelUnshuffle, torch.pixel_unshuffle), _divides("downscale_factor", int, -1, -2)),
}
"""Further conditions on a shape, which all shapes of the op's samples meet."""


def _list_pairs(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List a second tensor, the same one twice, or a number, in either place."""
    values = OP_SAMPLES[op].arguments
    names = [name for name in ("other", "alpha", "_number_first") if name in values]
    options = [dict(zip(names, each, strict=True)) for each in product(*(values[name] for name in names))]  # type: ignore[arg-type]
    return [each for each in options if not (each["_number_first"] and isinstance(each["other"], str))]


def _list_joins(op: Any, shape: Shape) -> list[dict[str, Any]]:
    return [{"dim": dim} for dim in (1, 0, -1) if -len(shape) <= dim < len(shape)]


def _list_reshapes(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List: all in one row, all but the first or the first two axes joined, an axis of one element in front."""
    sizes = dict.fromkeys([(shape[0], -1), (-1,), (*shape[:2], -1), (1, *shape)])
    return [{"_input": shape, "shape": size, "_as_tuple": as_tuple} for size in sizes for as_tuple in (False, True)]


def _list_linear(op: Any, shape: Shape) -> list[dict[str, Any]]:
    biases = (True, False) if len(shape) > 1 else ()
    return [{"_leading": shape[:-1], "bias": bias, "_unbatched": False} for bias in biases]


def _list_convolutions(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """List the geometries whose window fits into the padded image.

    Padding by other values than zeros needs refimpl's modules, which a script of torch and the backend only lacks.
    """
    rank = int(leaf_name(op)[-2])
    if len(shape) != rank + 2:
        return []
    variants = [{**arguments, "_network": None} for arguments in _variants_of(op)]
    variants = [each for each in variants if each.get("padding_mode", "zeros") == "zeros"]
    return [each for each in variants if not each.get("output_size") and _has_window(each, shape[2:])]


def _has_window(arguments: Arguments, extents: Shape) -> bool:
    if "output_padding" in arguments:  # transposed: what is left after cropping is at least one element
        return all(extent > 2 * pad for extent, pad in zip(extents, _along(arguments["padding"], extents), strict=True))
    if arguments["padding"] == "same":
        return True
    padding = 0 if arguments["padding"] == "valid" else arguments["padding"]
    window = (arguments["kernel_size"], arguments["dilation"], padding)
    axes = zip(*(_along(each, extents) for each in window), extents, strict=True)
    return all(step * (size - 1) < extent + 2 * pad for size, step, pad, extent in axes)


def _along(value: Any, extents: Shape) -> Shape:
    return (value,) * len(extents) if isinstance(value, int) else tuple(value)
