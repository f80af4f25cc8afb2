"""Samples of activation functions and normalisations (variants.py).

What quantized kernels commonly lack (a normalisation without statistics or parameters, an input without a batch) is
varied with few other arguments, so that a fall back to float does not hide the pairs of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.ops.calls import ANY_SHAPE, LARGE, are_axes, call, module, one_input
from conformance.ops.op_model import Input, Step
from conformance.ops.variants import Arguments, Fixed, OpSamples

_INPLACE = (False, True)
_PLACE = Fixed(reason="the suite runs on the CPU, in float32")
_IN_MODULES = {"device": _PLACE, "dtype": _PLACE}
_TENSOR = Fixed(reason="a tensor: its sizes are varied under shape")
_CHANNELS = Fixed(reason="varied under shape, whose channels they are")
_MOMENTUM = Fixed(reason="of effect in training alone, when statistics are kept")

# -- elementwise ------------------------------------------------------------------------------------------------------


def _elementwise(step: Callable[[Any, Arguments], Step], **arguments: Any) -> OpSamples:
    return OpSamples(arguments={**arguments, "shape": ANY_SHAPE}, inputs=one_input, step=step, known=(LARGE,))


_ALPHA = (1.0, 0.3, 2.5)
_SLOPE = (0.01, 0.3, -0.5, 1.5)
_IGNORED = Fixed(reason="of nn.Module's constructor, which takes none")


def _leaky_relu_(op: Any, arguments: Arguments) -> Step:
    """A builtin sees whether its slope has a name; functions in Python hand it on by name."""
    spelled = call(negative_slope=0.01) if arguments["_by_name"] else call("negative_slope")
    return spelled(op, arguments)


def _prelu(op: Any, arguments: Arguments) -> Step:
    """The first channel's slope is `init`; those of the others are less steep, so that a wrong channel's shows."""
    made = op(num_parameters=arguments["num_parameters"], init=arguments["init"])
    with torch.no_grad():
        made.weight.mul_(torch.linspace(1.0, 0.25, arguments["num_parameters"]))
    return Step(op=made)


_PRELU = OpSamples(
    arguments={
        "num_parameters": (1, 7, 65), "init": (0.25, 1.5, -0.5),
        "shape": ((2, 7, 3, 3), (65,), (4, 65), (1, 7, 63), (1, 7, 3, 4, 5)), **_IN_MODULES,
    },
    inputs=one_input,
    step=_prelu,
    is_valid=lambda a: a["num_parameters"] == 1 or a["num_parameters"] in a["shape"][1:2],
)  # fmt: skip
_SOFTMAX = OpSamples(
    arguments={
        "dim": (-1, 1, 0, None),
        # A sum of n equal terms near 2³² / n overflows 32 bits if rounded up: by a little for 513, to zero for 1024.
        "shape": ((2, 7, 3, 3), (65,), (4, 64), (1, 8, 63), (1, 2, 3, 4, 5), (2, 513), (1, 1024)),
    },
    inputs=one_input,
    step=module,
    is_valid=lambda a: are_axes(len(a["shape"]), a["dim"]),
)
_ACTIVATIONS: dict[Any, OpSamples] = {
    nn.ELU: _elementwise(module, alpha=_ALPHA, inplace=_INPLACE),
    F.elu: _elementwise(call(alpha=1.0, inplace=False), input=_TENSOR, alpha=_ALPHA, inplace=_INPLACE),
    nn.LeakyReLU: _elementwise(module, negative_slope=_SLOPE, inplace=_INPLACE),
    F.leaky_relu: _elementwise(
        call(negative_slope=0.01, inplace=False), input=_TENSOR, negative_slope=_SLOPE, inplace=_INPLACE
    ),
    F.leaky_relu_: _elementwise(_leaky_relu_, negative_slope=_SLOPE, _by_name=(False, True)),
    nn.PReLU: _PRELU,
    **dict.fromkeys((nn.Hardswish, nn.Hardsigmoid), _elementwise(module, inplace=_INPLACE)),
    **dict.fromkeys(
        (F.hardswish, F.hardsigmoid), _elementwise(call(inplace=False), input=_TENSOR, inplace=_INPLACE)
    ),
    **dict.fromkeys((nn.Sigmoid, nn.Tanh), _elementwise(module, args=_IGNORED, kwargs=_IGNORED)),
    **dict.fromkeys(
        (torch.sigmoid, "sigmoid", "sigmoid_", torch.tanh, "tanh", "tanh_"), _elementwise(call())
    ),
    nn.Softmax: _SOFTMAX,
}  # fmt: skip

# -- normalisations ---------------------------------------------------------------------------------------------------


def _drawn(*shape: int) -> tuple[Tensor, Tensor]:
    """A weight of both signs and a bias, all different, in float32 from torch's generator."""
    signs = (1 - 2 * (torch.arange(int(torch.Size(shape).numel())) % 3 == 1).float()).reshape(shape)
    return torch.empty(shape).uniform_(0.5, 1.5) * signs, torch.empty(shape).uniform_(-1, 1)


def _statistics(channels: int) -> tuple[Tensor, Tensor]:
    """A mean and a variance for each channel, as training would have left them."""
    return torch.empty(channels).normal_(), torch.empty(channels).uniform_(0.5, 2.0)


def _with_parameters(made: Any) -> Step:
    """The normalisation with drawn parameters and statistics, as far as it has them."""
    with torch.no_grad():
        if made.weight is not None:
            weight, bias = _drawn(*made.weight.shape)
            made.weight.copy_(weight)
            if made.bias is not None:
                made.bias.copy_(bias)
        if getattr(made, "running_mean", None) is not None:
            for kept, drawn in zip((made.running_mean, made.running_var), _statistics(made.num_features), strict=True):
                kept.copy_(drawn)
    return Step(op=made)


def _apart(common: Arguments, *rare: str) -> Callable[[Arguments], bool]:
    """Return what tells whether at most one of the `rare` arguments is away from `common`, and if one is, no shape is.

    A missing bias is that of an affine normalisation.
    """

    def is_valid(a: Arguments) -> bool:
        away = [name for name in rare if a[name] != common[name]]
        if not a["bias"] and not a.get("affine", True):
            return False
        return not away or (len(away) == 1 and a["shape"] == common["shape"])

    return is_valid


def _channels(rank: int, *, is_batch: bool) -> OpSamples:
    """The recipe of a batch or an instance norm, in eval mode; an instance may come without a batch."""
    extents = ((9,), (3, 5), (2, 3, 2))[rank - 1]
    large = ((1025,), (33, 17), (9, 8, 7))[rank - 1]
    images = (
        (2, 7, *extents),
        (1, 65, *extents),
        (4, 8, *extents),
        (1, 1, *large),
        (1, 64, *extents),
    )
    varied: dict[str, tuple[Any, ...]] = {
        "eps": (1e-5, 0.0625), "affine": (is_batch, not is_batch), "track_running_stats": (is_batch, not is_batch),
        "bias": (True, False), "shape": images,
    }  # fmt: skip
    if not is_batch:
        varied["_unbatched"] = (False, True)

    def step(op: Any, a: Arguments) -> Step:
        return _with_parameters(op(a["shape"][1], **{name: a[name] for name in tuple(varied)[:4]}))

    rare = ("track_running_stats", "bias", "affine" if is_batch else "_unbatched")
    return OpSamples(
        arguments={"num_features": _CHANNELS, "momentum": _MOMENTUM, **varied, **_IN_MODULES},
        inputs=lambda a: (Input(shape=a["shape"][1:] if a.get("_unbatched") else a["shape"]),),
        step=step,
        is_valid=_apart({name: values[0] for name, values in varied.items()}, *rare),
    )


_LAYERS: dict[str, Any] = {
    "normalized_shape": Fixed(reason="the last axes: varied under shape, and under _axes, how many"),
    "eps": (1e-5, 0.0625),
    "bias": (True, False),
    "_axes": (1, 2, 3),
    "shape": ((2, 7, 9), (4, 65), (1, 8, 3, 5), (65,), (3, 1025), (2, 1, 3, 4, 5)),
}


def _has_axes(a: Arguments) -> bool:
    has_bias = a["bias"] or a.get("elementwise_affine", True)
    return bool(has_bias) and a["_axes"] <= len(a["shape"])


def _layer_norm_module(op: Any, a: Arguments) -> Step:
    """One axis is given as a number, more as a tuple."""
    shape = a["shape"][-a["_axes"] :]
    options = {name: a[name] for name in ("eps", "elementwise_affine", "bias")}
    return _with_parameters(op(shape if len(shape) > 1 else shape[0], **options))


def _parametrized(function: Callable[..., Any], a: Arguments, *shape: int) -> Step:
    """A function of x, weight and bias, with those of the two that are asked for."""
    drawn = zip(_drawn(*shape), (a["weight"], a["bias"]), strict=True)
    return Step(op=function, parameters=tuple(each if is_given else None for each, is_given in drawn))


def _layer_norm(op: Any, a: Arguments) -> Step:
    shape, eps = a["shape"][-a["_axes"] :], a["eps"]
    return _parametrized(lambda x, weight, bias: op(x, shape, weight, bias, eps), a, *shape)


def _group_norm(op: Any, a: Arguments) -> Step:
    groups, eps = a["num_groups"], a["eps"]
    return _parametrized(lambda x, weight, bias: op(x, groups, weight, bias, eps), a, a["shape"][1])


def _instance_norm(op: Any, a: Arguments) -> Step:
    channels, uses_input, eps = a["shape"][1], a["use_input_stats"], a["eps"]
    mean, variance = (None, None) if uses_input else _statistics(channels)

    def function(x: Any, weight: Any, bias: Any) -> Any:
        return op(x, mean, variance, weight, bias, uses_input, eps=eps)

    return _parametrized(function, a, channels)


_STATISTICS = Fixed(reason="tensors, given where use_input_stats is False, and then they are needed")
_PARAMETERS: dict[str, Any] = {
    "input": _TENSOR, "weight": (True, False), "bias": (True, False), "eps": (1e-5, 0.0625)
}  # fmt: skip
_NORMALISATIONS: dict[Any, OpSamples] = {
    nn.LayerNorm: OpSamples(
        arguments=_LAYERS | {"elementwise_affine": (True, False)} | _IN_MODULES,
        inputs=one_input,
        step=_layer_norm_module,
        is_valid=_has_axes,
    ),
    F.layer_norm: OpSamples(
        arguments=_LAYERS | _PARAMETERS, inputs=one_input, step=_layer_norm, is_valid=_has_axes
    ),
    F.group_norm: OpSamples(
        arguments={
            **_PARAMETERS, "num_groups": (2, 1, 8),
            "shape": ((2, 8, 3, 5), (1, 64, 9), (4, 16), (1, 8, 33, 17), (1, 8, 2, 3, 2)),
        },
        inputs=one_input,
        step=_group_norm,
    ),
    F.instance_norm: OpSamples(
        arguments={
            **_PARAMETERS, "running_mean": _STATISTICS, "running_var": _STATISTICS, "momentum": _MOMENTUM,
            "use_input_stats": (True, False),
            "shape": ((2, 7, 3, 5), (1, 65, 9), (4, 8, 3, 3), (1, 1, 33, 17), (1, 7, 2, 3, 2)),
        },
        inputs=one_input,
        step=_instance_norm,
    ),
    nn.InstanceNorm1d: _channels(1, is_batch=False),
    nn.InstanceNorm2d: _channels(2, is_batch=False),
    nn.InstanceNorm3d: _channels(3, is_batch=False),
    nn.BatchNorm2d: _channels(2, is_batch=True),
    nn.BatchNorm3d: _channels(3, is_batch=True),
}  # fmt: skip

OP_SAMPLES: dict[Any, OpSamples] = {**_ACTIVATIONS, **_NORMALISATIONS}
