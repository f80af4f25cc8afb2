"""What can be put behind a value of a given shape: the variants of the recipes that fit it (fuzz_graphs.py).

Recipes go from arguments to shapes; here it is the other way round. The values of the arguments are theirs.
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

Fits = Callable[[Any, Shape], list[dict[str, Any]]]
Condition = Callable[[Shape, Arguments], bool]

PAIRS = (operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul)
"""Ops of two tensors that are broadcast, or of a tensor and a number."""
JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
"""Ops of a list of tensors."""
_NOT_DRAWN = (operator.floordiv, torch.matmul, torch.addmm, "view", "resize_", "size", "shape")
"""Ops that take no value as it comes: of integers, of matrices that fit, of contiguous memory; or give none."""
_RARE: Arguments = {"inplace": True, "training": True, "_unbatched": True, "_uneven": True}
"""Arguments that are not drawn: in place, an op would change what others read; unbatched, nothing else would fit."""


@cache
def options_for(op: Any, shape: Shape) -> tuple[dict[str, Any], ...]:
    """List arguments with which an op takes a value of this shape, the base first; none: it does not take it.

    What depends on other values or is free to choose is left out: the sizes of a second operand, channels.
    """
    if op in _NOT_DRAWN or op not in OP_SAMPLES:
        return ()
    unique = {repr(found): found for found in _family(op)(op, shape)}
    return tuple(found for found in unique.values() if all(map(_is_plain, found.values())))


def _family(op: Any) -> Fits:
    if op in PAIRS:
        return _pairs
    if op in JOINS:
        return _joins
    if op in WEIGHTED:
        return _linear if "linear" in leaf_name(op).lower() else _convolution
    return _reshapes if op == "reshape" else _alone


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as JSON."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (int, float, str, type(None)))


@cache
def _variants(op: Any) -> tuple[dict[str, Any], ...]:
    """The variants of a recipe, without those that are not drawn."""
    found = (arguments for _, arguments in OP_SAMPLES[op].variants(known=False))
    return tuple(each for each in found if not any(each.get(name) == value for name, value in _RARE.items()))


def _alone(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """An op of one tensor: all its variants that are valid for the shape."""
    samples = OP_SAMPLES[op]
    shapes = samples.arguments.get("shape", ())
    ranks = () if isinstance(shapes, Fixed) else {len(each) for each in shapes}
    if len(shape) not in ranks:
        return []
    fits: Condition = _SPECIAL.get(op, lambda shape, arguments: True)
    found = [{**arguments, "shape": shape} for arguments in _variants(op)]
    return [each for each in found if samples.is_valid(each) and fits(shape, each)]


def _has_space(shape: Shape, arguments: Arguments) -> bool:
    """A normalisation over the elements of a channel needs two of them."""
    return prod(shape[2:]) > 1


def _many(shape: Shape, arguments: Arguments) -> bool:
    """A batch norm is trained on two elements of each channel at least."""
    return prod(shape) // shape[1] > 1


def _groups(shape: Shape, arguments: Arguments) -> bool:
    """Groups of two elements at least; torch cannot train a bias without a weight."""
    is_trainable = arguments["weight"] or not arguments["bias"]
    return is_trainable and shape[1] % arguments["num_groups"] == 0 and prod(shape[1:]) > arguments["num_groups"]


def _meets(rank: int) -> Condition:
    """Return what tells that no dilated window steps over the whole image, from padding to padding."""

    def meets(shape: Shape, arguments: Arguments) -> bool:
        return all(map(operator.le, _along(arguments["dilation"], shape[-rank:]), shape[-rank:]))

    return meets


def _not_padded(shape: Shape, arguments: Arguments) -> bool:
    """Torch asks of avg_pool3d that its window fits into the image without the padding."""
    extents = shape[-3:]
    return all(size <= extent for size, extent in zip(_along(arguments["kernel_size"], extents), extents, strict=True))


def _leaves_something(shape: Shape, arguments: Arguments) -> bool:
    """Scaled down, an axis of one element would have none."""
    factors = arguments["scale_factor"] if isinstance(arguments["scale_factor"], tuple) else ()
    return all(int(extent * factor) > 0 for extent, factor in zip(shape[2:], factors, strict=False))


def _divides(name: str, power: Callable[[int], int], *axes: int) -> Condition:
    return lambda shape, arguments: all(shape[axis] % power(arguments[name]) == 0 for axis in axes)


_SPECIAL: dict[Any, Condition] = {
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm), _has_space),
    **dict.fromkeys((nn.BatchNorm2d, nn.BatchNorm3d), _many),
    **dict.fromkeys((nn.MaxPool1d, F.max_pool1d), _meets(1)),
    **dict.fromkeys((nn.MaxPool2d, F.max_pool2d), _meets(2)),
    **dict.fromkeys((nn.MaxPool3d, F.max_pool3d), _meets(3)),
    **dict.fromkeys((nn.AvgPool3d, F.avg_pool3d), _not_padded),
    F.group_norm: _groups,
    F.interpolate: _leaves_something,
    **dict.fromkeys(
        (nn.PixelShuffle, torch.pixel_shuffle), _divides("upscale_factor", lambda factor: factor**2, -3)
    ),
    **dict.fromkeys(
        (nn.PixelUnshuffle, torch.pixel_unshuffle), _divides("downscale_factor", int, -1, -2)
    ),
}  # fmt: skip
"""What else a shape must have, where the recipe's own shapes all have it."""


def _pairs(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """A second tensor, the same one twice, or a number, in either place."""
    values = OP_SAMPLES[op].arguments
    names = [name for name in ("other", "alpha", "_number_first") if name in values]
    found = [dict(zip(names, each, strict=True)) for each in product(*(values[name] for name in names))]  # type: ignore[arg-type]
    return [each for each in found if not (each["_number_first"] and isinstance(each["other"], str))]


def _joins(op: Any, shape: Shape) -> list[dict[str, Any]]:
    return [{"dim": dim} for dim in (1, 0, -1) if -len(shape) <= dim < len(shape)]


def _reshapes(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """All in one row, all but the first or the first two axes joined, an axis of one element in front."""
    sizes = dict.fromkeys([(shape[0], -1), (-1,), (*shape[:2], -1), (1, *shape)])
    return [{"_input": shape, "shape": size, "_as_tuple": as_tuple} for size in sizes for as_tuple in (False, True)]


def _linear(op: Any, shape: Shape) -> list[dict[str, Any]]:
    has_base = len(shape) > 1
    return [{"_leading": shape[:-1], "bias": bias, "_unbatched": False} for bias in (True, False)] if has_base else []


def _convolution(op: Any, shape: Shape) -> list[dict[str, Any]]:
    """All geometries whose window fits into the padded image.

    Other padding than by zeros is done by refimpl's modules, which a script of torch and the backend alone does not
    have.
    """
    rank = int(leaf_name(op)[-2])
    if len(shape) != rank + 2:
        return []
    found = [{**arguments, "_network": None} for arguments in _variants(op)]
    found = [each for each in found if each.get("padding_mode", "zeros") == "zeros" and not each.get("output_size")]
    return [each for each in found if _has_window(each, shape[2:])]


def _has_window(arguments: Arguments, extents: Shape) -> bool:
    if "output_padding" in arguments:  # transposed: what is left after cropping is at least one element
        return all(extent > 2 * pad for extent, pad in zip(extents, _along(arguments["padding"], extents), strict=True))
    if isinstance(arguments["padding"], str):
        return arguments["padding"] == "same" or _reaches(arguments, (0,) * len(extents), extents)
    return _reaches(arguments, _along(arguments["padding"], extents), extents)


def _reaches(arguments: Arguments, pads: Shape, extents: Shape) -> bool:
    kernel, dilation = (_along(arguments[name], extents) for name in ("kernel_size", "dilation"))
    axes = zip(kernel, dilation, pads, extents, strict=True)
    return all(step * (size - 1) < extent + 2 * pad for size, step, pad, extent in axes)


def _along(value: Any, extents: Shape) -> Shape:
    return (value,) * len(extents) if isinstance(value, int) else tuple(value)
