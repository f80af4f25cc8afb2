"""Ops that put values in another order, select, repeat or reshape them: their samples; nothing may differ (NUM-05)."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import OpRule
from fx_quant_conformance.conformance.ops.calls import ANY_SHAPE, MOVED, Shape, are_axes, call, construct, move_copy
from fx_quant_conformance.conformance.ops.op_model import Input, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord

# -- axes -------------------------------------------------------------------------------------------------------------


def _sample_flatten(*starts: int, is_module: bool) -> OpRecord:
    shapes = ((2, 7, 3, 3), (65,), (4, 9), (1, 2, 3, 4, 5))
    return OpRecord(
        arguments={"start_dim": starts, "end_dim": (-1, 1, -2), "shape": shapes},
        step=construct if is_module else call(start_dim=0, end_dim=-1),
        is_valid=_can_flatten,
    )


def _can_flatten(arguments: Arguments) -> bool:
    rank, start, end = len(arguments["shape"]), arguments["start_dim"], arguments["end_dim"]
    return are_axes(rank, start, end) and start % rank <= end % rank


_TRANSPOSE = OpRecord(
    arguments={"dim0": (1, 0, -2), "dim1": (0, 2, -1), "shape": ((2, 7, 3, 4), (9, 65), (1, 8, 7), (1, 2, 3, 4, 5))},
    step=call("dim0", "dim1"),
    is_valid=lambda arguments: are_axes(len(arguments["shape"]), arguments["dim0"], arguments["dim1"]),
)


def _spread(name: str, op: Any, arguments: Arguments) -> Step:
    """A method that takes numbers one by one, or as one tuple."""
    numbers: tuple[Any, ...] = arguments[name]
    return Step(op=op, arguments=(numbers,) if arguments["_as_tuple"] else numbers)


def _sample_permute(*, is_method: bool) -> OpRecord:
    """Axes in another order, which name each of them once."""
    dims = ((0, 2, 3, 1), (1, 0), (-1, 0, 1), (0, -1, -2, -3), (4, 0, 3, 1, 2), (0,))
    spelling = {"_as_tuple": (False, True)} if is_method else {}
    return OpRecord(
        arguments={"dims": dims, "shape": ((2, 7, 3, 4), (9, 65), (1, 8, 7), (1, 2, 3, 4, 5), (63,)), **spelling},
        step=partial(_spread, "dims") if is_method else call("dims"),
        is_valid=lambda arguments: len(arguments["dims"]) == len(arguments["shape"]),
    )


def _can_squeeze(arguments: Arguments) -> bool:
    """All axes exist, and each is named once."""
    dim, rank = arguments["dim"], len(arguments["shape"])
    dims = dim if isinstance(dim, tuple) else (dim,)
    return are_axes(rank, *dims) and (None in dims or len({axis % rank for axis in dims}) == len(dims))


_SQUEEZE = OpRecord(
    arguments={"dim": (None, 1, -2, (1, -1), 0), "shape": ((2, 1, 9), (1,), (4, 1), (1, 1, 63, 1), (2, 1, 3, 1, 4))},
    step=lambda op, arguments: call(*([] if arguments["dim"] is None else ["dim"]))(op, arguments),
    is_valid=_can_squeeze,
)
_UNSQUEEZE = OpRecord(
    arguments={"dim": (1, 0, -1, -2), "shape": ((2, 9), (65,), (1, 8, 7), (2, 7, 3, 3))},
    step=call("dim"),
)

# -- selecting, repeating, reshaping ----------------------------------------------------------------------------------


def _can_narrow(arguments: Arguments) -> bool:
    if not are_axes(len(arguments["shape"]), arguments["dim"]):
        return False
    extent, start = arguments["shape"][arguments["dim"]], arguments["start"]
    first = start + extent if start < 0 else start
    return bool(0 <= first <= extent - arguments["length"])


_NARROW = OpRecord(
    arguments={
        "dim": (1, 0, -1, -2),
        "start": (2, 0, -3),
        "length": (3, 1, 7),
        "shape": ((2, 9), (65,), (8, 7, 9), (3, 7, 8, 9), (1, 8, 3, 7, 10)),
    },
    step=call("dim", "start", "length"),
    is_valid=_can_narrow,
)

_INDEXES: dict[str, tuple[Any, int]] = {
    "[:, 1:]": ((slice(None), slice(1, None)), 2),
    "[-1]": (-1, 1),
    "[::3]": (slice(None, None, 3), 1),
    "[..., 2:-1]": ((..., slice(2, -1)), 1),
    "[:, None]": ((slice(None), None), 1),
    "[0, :, -2]": ((0, slice(None), -2), 3),
    "[:, [2, 0, 2]]": ((slice(None), [2, 0, 2]), 2),
}
"""Each index as it is written, and the axes that a tensor needs for it."""
_GETITEM = OpRecord(
    arguments={
        "other": Fixed(reason="the index is varied under _index"),
        "_index": tuple(_INDEXES),
        "shape": ((2, 9), (65,), (8, 7, 9), (3, 7, 8, 9), (1, 8, 3, 7, 10)),
    },
    step=lambda op, arguments: Step(op=op, arguments=(_INDEXES[arguments["_index"]][0],)),
    is_valid=lambda arguments: _INDEXES[arguments["_index"]][1] <= len(arguments["shape"]),
)


def _repeat_each(op: Any, arguments: Arguments) -> Step:
    """Each element as often as the others, or each of an axis as often as a tensor says: 2, 0, 1 times, and again."""
    shape, dim, repeats = arguments["shape"], arguments["dim"], arguments["repeats"]
    extent = prod(shape) if dim is None else shape[dim]
    counts = (2 - 2 * torch.arange(extent) % 3) if repeats == "tensor" else torch.full((extent,), repeats)
    keywords = (("output_size", int(counts.sum())),) if arguments["output_size"] else ()
    first = counts if repeats == "tensor" else repeats
    return Step(op=op, arguments=(first,) if dim is None else (first, dim), keywords=keywords)


_REPEAT_INTERLEAVE = OpRecord(
    arguments={
        "repeats": (2, "tensor", 1),
        "dim": (None, 1, 0, -1),
        "output_size": (None, True),
        "shape": ((2, 9), (65,), (4, 1, 7), (2, 7, 3, 3), (1, 2, 3, 4, 5)),
    },
    step=_repeat_each,
    is_valid=lambda arguments: are_axes(len(arguments["shape"]), arguments["dim"]),
)
_REPEAT = OpRecord(
    arguments={
        "repeats": ((2, 1, 3), (2, 2), (1, 3, 1, 2), (2, 1, 1, 3, 2), (3,)),
        "shape": ((2, 9), (65,), (1, 8, 7), (2, 1, 3, 3), (1, 2, 3, 1, 4)),
        "_as_tuple": (False, True),
    },
    step=partial(_spread, "repeats"),
    is_valid=lambda arguments: len(arguments["repeats"]) >= len(arguments["shape"]),
)
_SIZES: tuple[Shape, ...] = ((2, 63), (5, 13), (-1, 3, 7), (2, 3, 2, -1), (1, 1, 3, 2, -1), (-1,))
_SIZED: tuple[Shape, ...] = ((2, 7, 3, 3), (65,), (4, 63), (1, 7, 6), (1, 2, 3, 4, 5))


def _can_reshape(size: Shape, shape: Shape) -> bool:
    return prod(shape) % -prod(size) == 0 if -1 in size else prod(shape) == prod(size)


_VIEW = OpRecord(
    arguments={
        "size": _SIZES,
        "dtype": Fixed(reason="reads the same bits as another dtype: another op of that name"),
        "shape": _SIZED,
        "_as_tuple": (False, True),
    },
    step=partial(_spread, "size"),
    is_valid=lambda arguments: _can_reshape(arguments["size"], arguments["shape"]),
)
_RESHAPE = OpRecord(
    arguments={"shape": _SIZES, "_input": _SIZED, "_as_tuple": (False, True)},
    inputs=lambda arguments: (Input(shape=arguments["_input"]),),
    step=partial(_spread, "shape"),
    is_valid=lambda arguments: _can_reshape(arguments["shape"], arguments["_input"]),
)
_RESIZE = OpRecord(
    arguments={
        "size": ((2, 63), (5, 13), (1,), (7, 3, 3), (1, 4, 3, 5), (1, 2, 3, 2, 5)),
        "memory_format": (None, torch.channels_last),
        "shape": ((2, 7, 3, 3), (65,), (4, 63), (1, 7, 9), (1, 2, 3, 4, 5)),
    },
    step=lambda op, a: replace(call(memory_format=None)(op, a), arguments=a["size"]),
    is_valid=lambda arguments: (
        prod(arguments["size"]) <= prod(arguments["shape"])
        and (arguments["memory_format"] is None or len(arguments["size"]) == 4)
    ),
)
"""To a size that is not larger: what a larger one holds is undefined."""

_LAYOUT_RANK = {torch.channels_last: 4, torch.channels_last_3d: 5}
_CONTIGUOUS = OpRecord(
    arguments={"memory_format": (torch.contiguous_format, *_LAYOUT_RANK), "shape": ANY_SHAPE},
    step=call(memory_format=torch.contiguous_format),
    is_valid=lambda a: _LAYOUT_RANK.get(a["memory_format"], len(a["shape"])) == len(a["shape"]),
)


def _sample_shuffle(name: str, *shapes: Shape, is_module: bool) -> OpRecord:
    """Channels into pixels, or pixels into channels; 36 of either are divisible by the squares of 1, 2 and 3."""
    step = construct if is_module else call(name)
    return OpRecord(arguments={name: (2, 3, 1), "shape": shapes}, step=step)


_UP = partial(_sample_shuffle, "upscale_factor", (2, 36, 3, 3), (1, 36, 1, 7), (36, 2, 5), (1, 2, 72, 2, 3))
_DOWN = partial(_sample_shuffle, "downscale_factor", (2, 3, 6, 6), (1, 1, 12, 6), (7, 6, 12), (1, 2, 3, 6, 6))

# -- reading a shape --------------------------------------------------------------------------------------------------


def _reshape_by_size(op: Any, arguments: Arguments) -> Step:
    """A quantized tensor that is reshaped by what is read: all sizes, or that of one axis, with the others joined."""
    return Step(op=partial(_reshape_to_size, arguments["dim"]))


def _reshape_to_size(dim: int | None, x: Any) -> Any:
    return x.reshape(x.size()) if dim is None else x.reshape(x.size(dim), -1)


def _reshape_by_shape(op: Any, arguments: Arguments) -> Step:
    """The same by the attribute, which is no call in a graph but ``getattr``."""
    return Step(op=partial(_reshape_to_shape, arguments["_axis"]))


def _reshape_to_shape(axis: int, x: Any) -> Any:
    return x.reshape(x.shape[axis], -1)


_READ_SHAPES: tuple[Shape, ...] = ((2, 7, 3, 3), (65,), (4, 9), (1, 8, 7), (1, 2, 3, 4, 5))
_SIZE = OpRecord(
    arguments={"dim": (0, None, 1, -1), "shape": _READ_SHAPES},
    step=_reshape_by_size,
    is_valid=lambda arguments: are_axes(len(arguments["shape"]), arguments["dim"]),
)
_SHAPE = OpRecord(
    arguments={"_axis": (0, 1, -1), "shape": _READ_SHAPES},
    step=_reshape_by_shape,
    is_valid=lambda arguments: are_axes(len(arguments["shape"]), arguments["_axis"]),
)


def view_in_any_layout(x: Tensor, *shape: Any) -> Tensor:
    """Return the values of x in another shape: in float64 they may lie in memory as the model's do not."""
    return x.view(*shape) if len(shape) == 1 and isinstance(shape[0], torch.dtype) else x.reshape(*shape)


_MOVING: dict[Any, OpRecord] = {
    torch.flatten: _sample_flatten(0, 1, -2, is_module=False),
    nn.Flatten: _sample_flatten(1, 0, -2, is_module=True),
    **dict.fromkeys((torch.transpose, "transpose"), _TRANSPOSE),
    **dict.fromkeys((torch.permute, torch.permute_copy), _sample_permute(is_method=False)),
    "permute": _sample_permute(is_method=True),
    **dict.fromkeys((torch.squeeze, "squeeze"), _SQUEEZE),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), _UNSQUEEZE),
    torch.narrow: _NARROW,
    operator.getitem: _GETITEM,
    **dict.fromkeys((torch.repeat_interleave, "repeat_interleave"), _REPEAT_INTERLEAVE),
    "repeat": _REPEAT,
    "reshape": _RESHAPE,
    "contiguous": _CONTIGUOUS,
    nn.PixelShuffle: _UP(is_module=True),
    torch.pixel_shuffle: _UP(is_module=False),
    nn.PixelUnshuffle: _DOWN(is_module=True),
    torch.pixel_unshuffle: _DOWN(is_module=False),
}
_IN_PLACE = {"squeeze_": _SQUEEZE, "unsqueeze_": _UNSQUEEZE, "resize_": _RESIZE}
RECORDS: dict[Any, OpRecord] = {
    **{op: replace(record, rule=MOVED) for op, record in _MOVING.items()},
    **{op: replace(record, rule=move_copy(op)) for op, record in _IN_PLACE.items()},
    "view": replace(_VIEW, rule=replace(MOVED, exact=view_in_any_layout)),
    "size": _SIZE,
    "shape": _SHAPE,
}
UNSAMPLED: dict[Any, OpRule] = dict.fromkeys((torch.chunk, torch.split, "chunk", "expand", "flatten", "unbind"), MOVED)
"""Rules of what is the root of no pattern."""
