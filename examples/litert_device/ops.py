"""What each op of a plain graph is in TFLite: images get its layout by TRANSPOSE, padding is SAME, VALID or a PAD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from writer import Array, Grid, Value, Writer

Arguments: TypeAlias = Mapping[str, Any]
Op: TypeAlias = Callable[[Writer, Arguments, Grid, int], Value]
"""Adds an op to a file, by its arguments, the grid of its result, and an activation that is fused."""
Pads: TypeAlias = tuple[tuple[int, int], ...]
SIGNATURES = {
    "conv1d": "input weight bias stride padding dilation groups",
    "conv2d": "input weight bias stride padding dilation groups",
    "linear": "input weight bias",
    "maxpool2d": "input kernel_size stride padding dilation ceil_mode",
    "avgpool2d": "input kernel_size stride padding ceil_mode",
    "adaptiveavgpool2d": "input output_size",
    "mean": "input dim keepdim",
    "leakyrelu": "input negative_slope",
    "flatten": "input start_dim end_dim",
    "transpose": "input dim0 dim1",
    "squeeze": "input dim",
    "unsqueeze": "input dim",
    "cat": "tensors dim",
    "add": "input other",
    "mul": "input other",
}
"""The arguments of an op in their order; all other ops have an ``input`` and ``sizes``."""
NHWC, NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


class Declined(Exception):
    """What the device does not do."""


@dataclass(frozen=True)
class Layer:
    """The constants of a layer: the integers of its weight with their grid, and its bias in reals."""

    weight: Array
    grid: Grid
    bias: Array | None

    def add(self, writer: Writer, x: Value, order: Sequence[int], axis: int = 0) -> list[Value]:
        """Add the weight, its axes in an order and its channels on one of them, and the bias as int32 of s_x * s_w."""
        assert x.grid is not None
        scale = np.float64(x.grid.scale) * self.grid.scale
        bias = np.zeros(len(self.weight)) if self.bias is None else self.bias.astype(np.float64)
        ends = np.iinfo(np.int32)
        integers = np.clip(np.rint(bias / scale), ends.min, ends.max).astype(np.int32)
        weight = self.weight.reshape(*self.weight.shape[:2], 1, -1) if len(order) > self.weight.ndim else self.weight
        return [
            writer.add_constant(weight.transpose(order), Grid(self.grid.scale, self.grid.zero_point, axis)),
            writer.add_constant(integers, Grid(scale, np.zeros(len(scale)))),
        ]


# -- ops that move values ---------------------------------------------------------------------------------------------


def reshape(writer: Writer, x: Value, shape: Sequence[int]) -> Value:
    return writer.add_op("RESHAPE", [x, writer.add_constant(shape)], shape, x.grid)


def transpose(writer: Writer, x: Value, order: Sequence[int]) -> Value:
    return writer.add_op("TRANSPOSE", [x, writer.add_constant(order)], [x.shape[axis] for axis in order], x.grid)


def change_shape(change: Callable[[Array, Arguments], Array]) -> Op:
    """Return a RESHAPE to the shape that a function of NumPy gives."""
    return lambda writer, given, grid, relu: reshape(
        writer, given["input"], change(np.empty(given["input"].shape, np.int8), given).shape
    )


def change_order(change: Callable[[Array, Arguments], Array]) -> Op:
    """Return a TRANSPOSE to the order in which a function of NumPy puts axes; it is told by their sizes."""

    def add(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
        sizes = range(1, 1 + len(given["input"].shape))
        return transpose(writer, given["input"], [size - 1 for size in change(np.empty(sizes, np.int8), given).shape])

    return add


def flatten(x: Array, given: Arguments) -> Array:
    axes = range(x.ndim)
    first, last = axes[given.get("start_dim", 0)], axes[given.get("end_dim", -1)]
    return x.reshape(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])


def squeeze(x: Array, given: Arguments) -> Array:
    return x.squeeze(tuple(axis for axis in list_axes(given.get("dim"), x.ndim) if x.shape[axis] == 1))


def list_axes(named: Any, rank: int) -> list[int]:
    """Return the axes that an argument names, from the first on: one, several, or for None all."""
    axes = range(rank)
    return sorted({axes[axis] for axis in (axes if named is None else np.atleast_1d(named))})


def add_cat(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
    parts = given["tensors"]
    (axis,) = list_axes(given.get("dim", 0), len(parts[0].shape))
    shape = np.concatenate([np.empty(part.shape, np.int8) for part in parts], axis).shape
    return writer.add_op("CONCATENATION", parts, shape, grid, axis=axis)


# -- convolutions and pools -------------------------------------------------------------------------------------------


def pair(value: Any, filler: int) -> tuple[int, int]:
    """Return height and width of an argument: one number is both, and a list of one is a width."""
    height, width = [filler, *value][-2:] if isinstance(value, (list, tuple)) else (value, value)
    return int(height), int(width)


def find_pads(given: Arguments, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> Pads:
    """Return how far height and width are padded, before and after."""
    amount = given.get("padding", 0)
    if amount == "same":
        return tuple(((span - 1) // 2, span // 2) for span in kernel)
    pads = [(one, one) for one in pair(0 if amount == "valid" else amount, 0)]
    if not given.get("ceil_mode"):
        return tuple(pads)
    return tuple(
        (before, before + max(extend(whole + 2 * before - span, step, whole + before), 0))
        for whole, (before, _), span, step in zip(size, pads, kernel, stride, strict=True)
    )


def extend(rest: int, step: int, end: int) -> int:
    """Return how far the last window of ``ceil_mode`` reaches beyond the padding; it begins before the image's end."""
    last = math.ceil(rest / step)
    return (last - (last * step >= end)) * step - rest


def slide(
    writer: Writer, name: str, x: Value, given: Arguments, kernel: tuple[int, int], grid: Grid, **more: Any
) -> Value:
    """Add a convolution or pool of an image of torch's layout, with 3 or 4 axes.

    ``more``: options of its own, ``layer``: its weight and bias, and ``channels``: those of the result.
    """
    is_line = "layer" in more and len(x.shape) == 3
    image = (*x.shape[:2], 1, x.shape[2]) if is_line else (1, *x.shape)[-4:]
    stride, dilation = pair(given["stride"], 1), pair(given.get("dilation", 1), 1)
    spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    pads = find_pads(given, image[2:], spans, stride)
    pads = ((0, 0), pads[1]) if is_line else pads
    sizes = [
        (size + sum(pad) - span) // step + 1
        for size, pad, span, step in zip(image[2:], pads, spans, stride, strict=True)
    ]
    value = transpose(writer, x if image == x.shape else reshape(writer, x, image), NHWC)
    needs = [
        max((math.ceil(size / step) - 1) * step + span - size, 0)
        for size, span, step in zip(image[2:], spans, stride, strict=True)
    ]
    # TFLite's SAME; an average counts no padding of it
    is_same = pads == tuple((need // 2, need - need // 2) for need in needs) and name != "AVERAGE_POOL_2D"
    if any(map(any, pads)) and not is_same:
        rows = [(0, 0), *pads, (0, 0)]
        shape = [size + sum(row) for size, row in zip(value.shape, rows, strict=True)]
        lowest = [writer.add_constant(np.array([-128], np.int8), x.grid)] if name == "MAX_POOL_2D" else []
        value = writer.add_op("PADV2" if lowest else "PAD", [value, writer.add_constant(rows), *lowest], shape, x.grid)
    inputs, channels = [value, *more.pop("layer", [])], more.pop("channels", image[1])
    padding = schema.Padding.SAME if is_same else schema.Padding.VALID
    options = {"padding": padding, "strideH": stride[0], "strideW": stride[1], **more}
    made = transpose(writer, writer.add_op(name, inputs, (image[0], *sizes, channels), grid, **options), NCHW)
    result = (image[0], channels, sizes[1]) if is_line else made.shape[-len(x.shape) :]
    return made if result == made.shape else reshape(writer, made, result)


def add_convolution(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
    """Add a CONV_2D, or a DEPTHWISE_CONV_2D where each channel of the input has a group of its own."""
    x, layer, groups = given["input"], given["layer"], given.get("groups", 1)
    if len(x.shape) != layer.weight.ndim:
        raise Declined("an image without a batch")
    is_depthwise = groups > 1 and layer.weight.shape[1] == 1
    dilation = pair(given.get("dilation", 1), 1)
    options = {"dilationHFactor": dilation[0], "dilationWFactor": dilation[1], "fusedActivationFunction": relu}
    options |= {"channels": len(layer.weight)}
    if is_depthwise:
        name, options["depthMultiplier"] = "DEPTHWISE_CONV_2D", len(layer.weight) // groups
        options["layer"] = layer.add(writer, x, (1, 2, 3, 0), axis=3)
    else:
        name, options["layer"] = "CONV_2D", layer.add(writer, x, (0, 2, 3, 1))
    kernel = pair(layer.weight.shape[2:], 1)
    return slide(writer, name, x, {"stride": 1, **given}, kernel, grid, **options)


def add_pool(name: str) -> Op:
    def add(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
        kernel = pair(given["kernel_size"], 1)
        if pair(given.get("dilation", 1), 1) != (1, 1) or (given.get("ceil_mode") and name == "AVERAGE_POOL_2D"):
            raise Declined("a pool with gaps, or an average beyond the end")
        window = {**given, "stride": given.get("stride") or kernel}
        options = {"filterHeight": kernel[0], "filterWidth": kernel[1]}
        return slide(writer, name, given["input"], window, kernel, grid, **options)

    return add


# -- other ops --------------------------------------------------------------------------------------------------------


def add_linear(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
    x, layer = given["input"], given["layer"]
    inputs, shape = [x, *layer.add(writer, x, (0, 1))], (*x.shape[:-1], len(layer.weight))
    return writer.add_op("FULLY_CONNECTED", inputs, shape, grid, fusedActivationFunction=relu, keepNumDims=True)


def add_binary(name: str) -> Op:
    def add(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
        operands = [given["input"], given["other"]]
        if not isinstance(operands[1], Value) or given.get("alpha", 1) != 1:
            raise Declined("a number among the operands")
        shape = np.broadcast_shapes(*(each.shape for each in operands))
        return writer.add_op(name, operands, shape, grid, fusedActivationFunction=relu)

    return add


def add_unary(name: str, options_of: Callable[[Arguments], Arguments] = lambda given: {}) -> Op:
    return lambda writer, given, grid, relu: writer.add_op(
        name, [given["input"]], given["input"].shape, grid, **options_of(given)
    )


def read_softmax(given: Arguments) -> Arguments:
    if given["dim"] not in (-1, len(given["input"].shape) - 1):
        raise Declined("a softmax along another axis than the last")
    return {"beta": 1.0}


def add_mean(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
    x, keeps = given["input"], bool(given.get("keepdim", False))
    axes = list_axes(given.get("dim"), len(x.shape))
    shape = np.empty(x.shape, np.int8).any(tuple(axes), keepdims=keeps).shape
    return writer.add_op("MEAN", [x, writer.add_constant(axes)], shape, grid, keepDims=keeps)


def add_average(writer: Writer, given: Arguments, grid: Grid, relu: int) -> Value:
    """Add the average of an image, which is a MEAN."""
    if pair(given["output_size"], 1) != (1, 1):
        raise Declined("an adaptive average of more than one pixel")
    return add_mean(writer, {"input": given["input"], "dim": [-2, -1], "keepdim": True}, grid, relu)


OPS: dict[str, Op] = {
    "conv1d": add_convolution,
    "conv2d": add_convolution,
    "linear": add_linear,
    "maxpool2d": add_pool("MAX_POOL_2D"),
    "avgpool2d": add_pool("AVERAGE_POOL_2D"),
    "adaptiveavgpool2d": add_average,
    "mean": add_mean,
    "add": add_binary("ADD"),
    "mul": add_binary("MUL"),
    "cat": add_cat,
    "relu": add_unary("RELU"),
    "relu6": add_unary("RELU6"),
    "leakyrelu": add_unary("LEAKY_RELU", lambda given: {"alpha": given.get("negative_slope", 0.01)}),
    "sigmoid": add_unary("LOGISTIC"),
    "tanh": add_unary("TANH"),
    "softmax": add_unary("SOFTMAX", read_softmax),
    "flatten": change_shape(flatten),
    "squeeze": change_shape(squeeze),
    "unsqueeze": change_shape(lambda x, given: np.expand_dims(x, given["dim"])),
    "reshape": change_shape(lambda x, given: x.reshape(given["sizes"])),
    "view": change_shape(lambda x, given: x.reshape(given["sizes"])),
    "transpose": change_order(lambda x, given: x.swapaxes(given["dim0"], given["dim1"])),
    "permute": change_order(lambda x, given: x.transpose(given["sizes"])),
}
WITH_RELU = {"conv1d", "conv2d", "linear", "add", "mul"}
"""The ops in which a relu behind them is fused."""
