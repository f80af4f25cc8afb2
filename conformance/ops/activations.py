"""Samples of activation functions and normalisations (variants.py).

What quantized kernels commonly lack (a normalisation without statistics or parameters, an input without a batch) is
varied with few other arguments, so that a fallback to float does not hide the pairs of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.ops.calls import (
    INPLACE,
    PLACES,
    TENSOR,
    are_axes,
    call,
    construct,
    sample_elementwise,
)
from fx_quant_conformance.conformance.ops.op_model import Input, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpSamples
from fx_quant_conformance.refimpl.releases import format_lack, has

_CHANNELS = Fixed(reason="varied under shape, whose channels they are")
_MOMENTUM = Fixed(reason="of effect only in training, when statistics are kept")

# -- elementwise ------------------------------------------------------------------------------------------------------


_ALPHA = (1.0, 0.3, 2.5)
_SLOPE = (0.01, 0.3, -0.5, 1.5)
_IGNORED = Fixed(reason="of nn.Module's constructor, which takes none")


def _call_leaky_relu_(op: Any, arguments: Arguments) -> Step:
    """A builtin sees whether its slope has a name; functions in Python hand it on by name."""
    spell = call(negative_slope=0.01) if arguments["_by_name"] else call("negative_slope")
    return spell(op, arguments)


def _build_prelu(op: Any, arguments: Arguments) -> Step:
    """The first channel's slope is `init`; those of the others are less steep, so that a wrong channel's shows."""
    module = op(num_parameters=arguments["num_parameters"], init=arguments["init"])
    with torch.no_grad():
        module.weight.mul_(torch.linspace(1.0, 0.25, arguments["num_parameters"]))
    return Step(op=module)


_PRELU = OpSamples(
    arguments={
        "num_parameters": (1, 7, 65),
        "init": (0.25, 1.5, -0.5),
        "shape": ((2, 7, 3, 3), (65,), (4, 65), (1, 7, 63), (1, 7, 3, 4, 5)),
        **PLACES,
    },
    step=_build_prelu,
    is_valid=lambda a: a["num_parameters"] == 1 or a["num_parameters"] in a["shape"][1:2],
)


def _call_prelu(op: Any, arguments: Arguments) -> Step:
    """The function with the slopes of the module, given by position or by name."""
    module: Any = _build_prelu(nn.PReLU, arguments).op

    def call_by_name(x: Any, weight: Any) -> Any:
        return op(x, weight=weight)

    return Step(op=call_by_name if arguments["_by_name"] else op, parameters=(module.weight.detach(),))


_PRELU_FUNCTION = replace(
    _PRELU,
    arguments={
        **{name: values for name, values in _PRELU.arguments.items() if name not in PLACES},
        "input": TENSOR,
        "weight": Fixed(reason="a tensor: its size and values are num_parameters and init"),
        "_by_name": (False, True),
    },
    step=_call_prelu,
)


def _sample_softmax(step: Callable[[Any, Arguments], Step], *dims: int | None, **more: Any) -> OpSamples:
    return OpSamples(
        arguments={
            "dim": dims,
            # A sum of n equal terms near 2³² / n overflows 32 bits if rounded up: a little for 513, to zero for 1024.
            "shape": ((2, 7, 3, 3), (65,), (4, 64), (1, 8, 63), (1, 2, 3, 4, 5), (2, 513), (1, 1024)),
            **more,
        },
        step=step,
        is_valid=lambda a: are_axes(len(a["shape"]), a["dim"]),
    )


_FLOAT_DTYPE = Fixed(reason="asks for a float dtype, and the claim is about a quantized result")
_BETA: dict[str, Any] = {"beta": (1.0, 0.5, 3.0), "threshold": (20.0, 3.0)}
_ACTIVATIONS: dict[Any, OpSamples] = {
    nn.ELU: sample_elementwise(construct, alpha=_ALPHA, inplace=INPLACE),
    F.elu: sample_elementwise(call(alpha=1.0, inplace=False), input=TENSOR, alpha=_ALPHA, inplace=INPLACE),
    nn.LeakyReLU: sample_elementwise(construct, negative_slope=_SLOPE, inplace=INPLACE),
    F.leaky_relu: sample_elementwise(
        call(negative_slope=0.01, inplace=False), input=TENSOR, negative_slope=_SLOPE, inplace=INPLACE
    ),
    F.leaky_relu_: sample_elementwise(_call_leaky_relu_, negative_slope=_SLOPE, _by_name=(False, True)),
    nn.PReLU: _PRELU,
    **dict.fromkeys((nn.Hardswish, nn.Hardsigmoid), sample_elementwise(construct, inplace=INPLACE)),
    **dict.fromkeys(
        (F.hardswish, F.hardsigmoid), sample_elementwise(call(inplace=False), input=TENSOR, inplace=INPLACE)
    ),
    **dict.fromkeys((nn.Sigmoid, nn.Tanh), sample_elementwise(construct, args=_IGNORED, kwargs=_IGNORED)),
    **dict.fromkeys((torch.sigmoid, "sigmoid", "sigmoid_", torch.tanh, "tanh", "tanh_"), sample_elementwise(call())),
    nn.Softmax: _sample_softmax(construct, -1, 1, 0, None),
    F.softmax: _sample_softmax(
        call(dim=None), -1, 1, 0, None, input=TENSOR, dtype=_FLOAT_DTYPE, _stacklevel=Fixed(reason="of a warning")
    ),
    **dict.fromkeys((torch.softmax, "softmax"), _sample_softmax(call("dim"), -1, 1, 0, dtype=_FLOAT_DTYPE)),
    F.prelu: _PRELU_FUNCTION,
    **dict.fromkeys((nn.SiLU, nn.Mish), sample_elementwise(construct, inplace=INPLACE)),
    **dict.fromkeys((F.silu, F.mish), sample_elementwise(call(inplace=False), input=TENSOR, inplace=INPLACE)),
    nn.GELU: sample_elementwise(construct, approximate=("none", "tanh")),
    F.gelu: sample_elementwise(call(approximate="none"), approximate=("none", "tanh")),
    nn.Softplus: sample_elementwise(construct, **_BETA),
    F.softplus: sample_elementwise(call(beta=1.0, threshold=20.0), **_BETA),
}

# -- normalisations ---------------------------------------------------------------------------------------------------


def _draw_parameters(*shape: int) -> tuple[Tensor, Tensor]:
    """A weight of both signs and a bias, all different, in float32 from torch's generator."""
    signs = (1 - 2 * (torch.arange(int(torch.Size(shape).numel())) % 3 == 1).float()).reshape(shape)
    return torch.empty(shape).uniform_(0.5, 1.5) * signs, torch.empty(shape).uniform_(-1, 1)


def _draw_statistics(channels: int) -> tuple[Tensor, Tensor]:
    """A mean and a variance for each channel, as training would have left them."""
    return torch.empty(channels).normal_(), torch.empty(channels).uniform_(0.5, 2.0)


def _set_parameters(norm: Any) -> Step:
    """The normalisation with drawn parameters and statistics, as far as it has them."""
    with torch.no_grad():
        if norm.weight is not None:
            weight, bias = _draw_parameters(*norm.weight.shape)
            norm.weight.copy_(weight)
            if norm.bias is not None:
                norm.bias.copy_(bias)
        if getattr(norm, "running_mean", None) is not None:
            mean, variance = _draw_statistics(norm.num_features)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
    return Step(op=norm)


def _has_few_rare(common: Arguments, rare: tuple[str, ...], a: Arguments) -> bool:
    """Whether at most one of the `rare` arguments is away from `common`, and if one is, the shape is not.

    A missing bias is that of an affine normalisation.
    """
    away = [name for name in rare if name in a and a[name] != common[name]]
    if not a.get("bias", True) and not a.get("affine", True):
        return False
    return not away or (len(away) == 1 and a["shape"] == common["shape"])


_BIAS: Any = (True, False) if has("norm_bias") else Fixed(reason=format_lack("norm_bias"))


def _sample_channel_norm(rank: int, *, is_batch: bool) -> OpSamples:
    """Sample a batch or an instance norm, in eval mode; an instance may come without a batch."""
    extents = ((9,), (3, 5), (2, 3, 2))[rank - 1]
    large = ((1025,), (33, 17), (9, 8, 7))[rank - 1]
    varied: dict[str, tuple[Any, ...] | Fixed] = {
        "eps": (1e-5, 0.0625),
        "affine": (is_batch, not is_batch),
        "track_running_stats": (is_batch, not is_batch),
        "bias": _BIAS,
        "shape": ((2, 7, *extents), (1, 65, *extents), (4, 8, *extents), (1, 1, *large), (1, 64, *extents)),
    } | ({} if is_batch else {"_unbatched": (False, True)})
    common = {name: values[0] for name, values in varied.items() if not isinstance(values, Fixed)}
    named = ("eps", "affine", "track_running_stats", "bias")
    rare = ("track_running_stats", "bias", "affine" if is_batch else "_unbatched")
    return OpSamples(
        arguments={"num_features": _CHANNELS, "momentum": _MOMENTUM, **varied, **PLACES},
        inputs=lambda a: (Input(shape=a["shape"][1:] if a.get("_unbatched") else a["shape"]),),
        step=lambda op, a: _set_parameters(op(a["shape"][1], **{name: a[name] for name in named if name in a})),
        is_valid=partial(_has_few_rare, common, rare),
        derived=lambda a: {"num_features": a["shape"][1]},
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


def _derive_axes(a: Arguments) -> Arguments:
    return {"normalized_shape": a["shape"][-a["_axes"] :]}


def _build_layer_norm(op: Any, a: Arguments) -> Step:
    """One axis is given as a number, more as a tuple."""
    shape = a["shape"][-a["_axes"] :]
    options = {name: a[name] for name in ("eps", "elementwise_affine", "bias")}
    return _set_parameters(op(shape if len(shape) > 1 else shape[0], **options))


def _call_with_parameters(function: Callable[..., Any], a: Arguments, *shape: int) -> Step:
    """A function of x, weight and bias, with those of the two that are asked for."""
    weight, bias = _draw_parameters(*shape)
    return Step(op=function, parameters=(weight if a["weight"] else None, bias if a["bias"] else None))


def _call_layer_norm(op: Any, a: Arguments) -> Step:
    shape, eps = a["shape"][-a["_axes"] :], a["eps"]
    return _call_with_parameters(partial(_normalize, op, shape, eps), a, *shape)


def _call_group_norm(op: Any, a: Arguments) -> Step:
    groups, eps = a["num_groups"], a["eps"]
    return _call_with_parameters(partial(_normalize, op, groups, eps), a, a["shape"][1])


def _normalize(op: Any, parts: Any, eps: float, x: Any, weight: Any, bias: Any) -> Any:
    """Call layer_norm with its axes, or group_norm with its groups."""
    return op(x, parts, weight, bias, eps)


def _build_group_norm(op: Any, a: Arguments) -> Step:
    options = {name: a[name] for name in ("eps", "affine", "bias") if name in a}
    return _set_parameters(op(a["num_groups"], a["shape"][1], **options))


def _call_instance_norm(op: Any, a: Arguments) -> Step:
    channels, uses_input, eps = a["shape"][1], a["use_input_stats"], a["eps"]
    step = _call_with_parameters(partial(_normalize_instances, op, uses_input, eps), a, channels)
    return step if uses_input else replace(step, statistics=_draw_statistics(channels))


def _normalize_instances(op: Any, uses_input: bool, eps: float, x: Any, weight: Any, bias: Any, *given: Any) -> Any:
    return op(x, *(given or (None, None)), weight, bias, uses_input, eps=eps)


_STATISTICS = Fixed(reason="tensors, given where use_input_stats is False, and then they are needed")
_PARAMETERS: dict[str, Any] = {"input": TENSOR, "weight": (True, False), "bias": (True, False), "eps": (1e-5, 0.0625)}
_GROUPS: dict[str, Any] = {
    "num_groups": (2, 1, 8),
    "shape": ((2, 8, 3, 5), (1, 64, 9), (4, 16), (1, 8, 33, 17), (1, 8, 2, 3, 2)),
}
_NORMALISATIONS: dict[Any, OpSamples] = {
    nn.LayerNorm: OpSamples(
        arguments={**_LAYERS, "elementwise_affine": (True, False), **PLACES},
        step=_build_layer_norm,
        is_valid=_has_axes,
        derived=_derive_axes,
    ),
    F.layer_norm: OpSamples(
        arguments=_LAYERS | _PARAMETERS, step=_call_layer_norm, is_valid=_has_axes, derived=_derive_axes
    ),
    nn.GroupNorm: OpSamples(
        arguments={
            "num_channels": _CHANNELS,
            **_GROUPS,
            "eps": (1e-5, 0.0625),
            "affine": (True, False),
            "bias": _BIAS,
            **PLACES,
        },
        step=_build_group_norm,
        is_valid=lambda a: a.get("bias", True) or a["affine"],
    ),
    F.group_norm: OpSamples(arguments={**_PARAMETERS, **_GROUPS}, step=_call_group_norm),
    F.instance_norm: OpSamples(
        arguments={
            **_PARAMETERS,
            "running_mean": _STATISTICS,
            "running_var": _STATISTICS,
            "momentum": _MOMENTUM,
            "use_input_stats": (True, False),
            "shape": ((2, 7, 3, 5), (1, 65, 9), (4, 8, 3, 3), (1, 1, 33, 17), (1, 7, 2, 3, 2)),
        },
        step=_call_instance_norm,
    ),
    nn.InstanceNorm1d: _sample_channel_norm(1, is_batch=False),
    nn.InstanceNorm2d: _sample_channel_norm(2, is_batch=False),
    nn.InstanceNorm3d: _sample_channel_norm(3, is_batch=False),
    nn.BatchNorm2d: _sample_channel_norm(2, is_batch=True),
    nn.BatchNorm3d: _sample_channel_norm(3, is_batch=True),
}

OP_SAMPLES: dict[Any, OpSamples] = {**_ACTIVATIONS, **_NORMALISATIONS}
