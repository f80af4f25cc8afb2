"""Normalisations: how they are called and varied, and how far a right backend may be off (NUM-03, NUM-04).

What quantized kernels commonly lack (a normalisation without statistics or parameters, an input without a batch) is
varied with few other arguments, so that a fallback to float does not hide the pairs of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.bounds.error_bounds import (
    FUNCTION,
    Errors,
    OpCall,
    OpRule,
    Value,
    add_error,
    bound_dequantizing,
    error_of,
    gamma,
    make_aten_rule,
    share_out,
)
from fx_quant_conformance.conformance.ops.calls import PLACES, TENSOR
from fx_quant_conformance.conformance.ops.op_model import Input, Step
from fx_quant_conformance.conformance.ops.variants import Arguments, Fixed, OpRecord
from fx_quant_conformance.refimpl.releases import format_lack, has

# -- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalisation of x, then times a weight, plus a bias."""

    view: tuple[int, ...]
    """The shape in which x is normalised."""
    axes: tuple[int, ...]
    """The axes along which x is normalised."""
    eps: float
    weight: Value
    """It is broadcast to x's own shape."""
    bias: Value
    """It is broadcast to x's own shape."""
    statistics: tuple[Value, Value] | None = None
    """A mean and a variance that are given, broadcast to x's own shape; None: those of x."""


Deviation: TypeAlias = tuple[Tensor, Tensor]
"""How far (x − μ)·r is off, and that result itself."""


def bound_norm(read: Callable[[OpCall], Norm], call: OpCall) -> Errors:
    """z·w + b, z = (x − μ)·r, r = 1 / √(v + eps); `read` says what is normalized in a call.

    Of x, μ, v, w and b, with their errors of all causes together: with z off by δ, δ·(|w| + e_w) + |z|·e_w + e_b. Each
    cause has its share of it, by what it makes alone.
    """
    norm, x = read(call), call.values()[0]
    deviate = _deviate_from_own if norm.statistics is None else _deviate_from_given

    def find_moved(pick: Callable[[Value], Tensor]) -> Tensor:
        moved, result = deviate(norm, x, pick, is_evaluation=False)
        return moved * (norm.weight.real.abs() + pick(norm.weight)) + result.abs() * pick(norm.weight) + pick(norm.bias)

    errors = {cause: find_moved(error_of(cause)) for cause in call.causes()}
    if len(errors) > 1:
        errors = share_out(find_moved(Value.error), errors)
    evaluated, _ = deviate(norm, x, _dequantized, is_evaluation=True)
    return add_error(errors, "function", norm.weight.real.abs() * evaluated + gamma(2) * norm.bias.real.abs())


def _dequantized(value: Value) -> Tensor:
    return bound_dequantizing(value).expand_as(value.real)


def _deviate_from_given(norm: Norm, x: Value, pick: Callable[[Value], Tensor], is_evaluation: bool) -> Deviation:
    """With given μ ± e_μ and v ± e_v: (|x − μ|)·δr + (e + e_μ)·r⁺, r⁺ the largest r and δr the largest distance from r.

    An evaluation of a·x + (b − μ·a), a = r·w, makes seven roundings of (|x| + |μ|)·r: eps, v + eps, √,
    the quotient, w, the product, the last sum; b is in two of them.
    """
    assert norm.statistics is not None
    mean, variance = norm.statistics
    e_mean, e_variance = (torch.zeros(()) if is_evaluation else pick(statistic) for statistic in norm.statistics)
    exact, least, most = _bound_factors(norm.eps, variance.real, e_variance, e_variance)
    away = x.real - mean.real
    moved = away.abs() * torch.maximum(most - exact, exact - least) + (pick(x) + e_mean) * most
    rounding = gamma(7) if is_evaluation else 0.0
    return moved + rounding * (x.real.abs() + mean.real.abs()) * exact, away * exact


def _deviate_from_own(norm: Norm, x: Value, pick: Callable[[Value], Tensor], is_evaluation: bool) -> Deviation:
    """With the μ and v of x itself, n elements each of which is off by its own e ≤ E.

    Let σ = √v, and A = √(mean x²) + E, which bounds mean |x| and √(mean x²) of what is summed. σ moves by that of the
    errors, at most E. In an evaluation the mean is off by E and by δμ = γₙ·A: n − 1 additions, one
    division; and a variance as mean x² − μ² (two passes are better) has γₙ₊₁·A² from the squares, 2γₙ·A² from μ², two
    roundings more: δv = γ₃ₙ₊₃·A². So r lies between 1 / √((σ + E)² + δv + eps) and 1 / √((σ − E)² − δv + eps), nothing
    below zero in it; eps, the sum, the root and the quotient round: γ₄. With r⁺ the largest r and δr the largest
    distance from r, z is off by |x − μ|·δr + (e + E + δμ)·r⁺, and for x·a + (b − μ·a) by γ₃·(|x| + |μ|)·r⁺ more.
    """
    values, error = x.real.reshape(norm.view), pick(x).reshape(norm.view)
    n = int(torch.Size(values.shape[axis] for axis in norm.axes).numel())
    roundings = (n, 3 * n + 3, 4, 3)
    of_mean, of_variance, of_root, of_sums = (gamma(count) if is_evaluation else 0.0 for count in roundings)
    mean = values.mean(norm.axes, keepdim=True)
    variance = (values - mean).square().mean(norm.axes, keepdim=True)
    largest = error.amax(norm.axes, keepdim=True)
    size = values.square().mean(norm.axes, keepdim=True).sqrt() + largest
    down = variance - (variance.sqrt() - largest).clamp(min=0).square() + of_variance * size.square()
    up = (variance.sqrt() + largest).square() - variance + of_variance * size.square()
    exact, least, most = _bound_factors(norm.eps, variance, down, up)
    least, most = least * (1 - of_root), most * (1 + of_root)
    moved = (values - mean).abs() * torch.maximum(most - exact, exact - least)
    moved = moved + (error + largest + of_mean * size + of_sums * (values.abs() + mean.abs())) * most
    return moved.reshape(x.real.shape), ((values - mean) * exact).reshape(x.real.shape)


def _bound_factors(eps: float, variance: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 / √(v + eps), the least and the largest it is for variances from v − down (not below 0) to v + up."""
    low = (variance - down).clamp(min=0)
    return (variance + eps).rsqrt(), (variance + up + eps).rsqrt(), (low + eps).rsqrt()


def _read_parameter(call: OpCall, name: str, position: int, default: float, shape: tuple[int, ...]) -> Value:
    """A tensor argument or a module's parameter, in a shape that broadcasts to x; the default, where it is None."""
    parameter = call.option(name, position)
    if parameter is None:
        return Value(real=torch.tensor(default, dtype=torch.float64))
    if not isinstance(parameter, Value):
        return Value(real=parameter.detach().double().reshape(shape))
    errors = {cause: error.expand_as(parameter.real).reshape(shape) for cause, error in parameter.errors.items()}
    return Value(real=parameter.real.reshape(shape), errors=errors)


def _read_layer_norm(call: OpCall) -> Norm:
    x, shape = call.values()[0].real, tuple(call.option("normalized_shape", 1))
    return _read_affine_norm(call, tuple(x.shape), tuple(range(x.dim() - len(shape), x.dim())), shape)


def _read_group_norm(call: OpCall) -> Norm:
    x, groups = call.values()[0].real, call.option("num_groups", 1)
    return _read_affine_norm(call, (x.shape[0], groups, x[0].numel() // groups), (2,), (-1, *[1] * (x.dim() - 2)))


def _read_affine_norm(
    call: OpCall, view: tuple[int, ...], axes: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Norm:
    weight = _read_parameter(call, "weight", 2, 1.0, parameter_shape)
    bias = _read_parameter(call, "bias", 3, 0.0, parameter_shape)
    return Norm(view=view, axes=axes, eps=call.option("eps", 4, 1e-5), weight=weight, bias=bias)


def _read_instance_norm(call: OpCall) -> Norm:
    """Each channel of each instance; a module also takes one instance without a batch, and may use what it tracked."""
    x = call.values()[0].real
    function: Any = call.function
    is_module = isinstance(function, nn.Module)
    axis = x.dim() - 1 - int(type(function).__name__[-2]) if is_module else 1
    uses_input = not function.track_running_stats if is_module else call.option("use_input_stats", 5, True)
    return _read_channel_norm(call, axis, tuple(range(axis + 1, x.dim())), uses_input)


def _read_batch_norm(call: OpCall) -> Norm:
    """Each channel, with the statistics that training kept; a module that keeps none takes those of the batch."""
    x = call.values()[0].real
    uses_input = call.option("running_mean", 1) is None or bool(call.option("training", 5, False))
    return _read_channel_norm(call, 1, (0, *range(2, x.dim())), uses_input)


def _read_channel_norm(call: OpCall, axis: int, axes: tuple[int, ...], uses_input: bool) -> Norm:
    """The arguments of a function stand as in ``torch.nn.functional.instance_norm``."""
    x = call.values()[0].real
    names = (("running_mean", 0.0), ("running_var", 1.0), ("weight", 1.0), ("bias", 0.0))
    mean, variance, weight, bias = (
        _read_parameter(call, name, position, default, (-1, *[1] * (x.dim() - 1 - axis)))
        for position, (name, default) in enumerate(names, start=1)
    )
    statistics, eps = None if uses_input else (mean, variance), call.option("eps", 7, 1e-5)
    return Norm(view=tuple(x.shape), axes=axes, eps=eps, weight=weight, bias=bias, statistics=statistics)


def _make_rule(read: Callable[[OpCall], Norm], name: str) -> OpRule:
    return OpRule(arithmetic=FUNCTION, bound=partial(bound_norm, read), source=f"torch.nn.{name}; NUM-04")


def _bound_native_batch_norm(call: OpCall) -> tuple[Errors, ...]:
    """Batch norm of aten; of the statistics that it returns as well, where it is trained, no bound is known."""
    x, weight, bias, mean, variance, *training, _, eps = call.args
    uses_input = bool(training and training[0])
    own = replace(call, args=(x, mean, variance, weight, bias, uses_input, 0.0, eps), kwargs={})
    unknown = ({"function": torch.full(each.shape, torch.inf, dtype=torch.float64)} for each in call.result[1:])
    return bound_norm(_read_batch_norm, own), *unknown


NATIVE_BATCH_NORM = make_aten_rule(_bound_native_batch_norm)
_LAYER_NORM = _make_rule(_read_layer_norm, "LayerNorm")
_GROUP_NORM = _make_rule(_read_group_norm, "GroupNorm")
_INSTANCE_NORM = _make_rule(_read_instance_norm, "InstanceNorm2d")
_BATCH_NORM = _make_rule(_read_batch_norm, "BatchNorm2d")

# -- samples ----------------------------------------------------------------------------------------------------------

_CHANNELS = Fixed(reason="varied under shape, whose channels they are")
_MOMENTUM = Fixed(reason="of effect only in training, when statistics are kept")


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


def _sample_channel_norm(rank: int, *, is_batch: bool) -> OpRecord:
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
    return OpRecord(
        arguments={"num_features": _CHANNELS, "momentum": _MOMENTUM, **varied, **PLACES},
        inputs=lambda a: (Input(shape=a["shape"][1:] if a.get("_unbatched") else a["shape"]),),
        step=lambda op, a: _set_parameters(op(a["shape"][1], **{name: a[name] for name in named if name in a})),
        is_valid=partial(_has_few_rare, common, rare),
        derived=lambda a: {"num_features": a["shape"][1]},
        rule=_BATCH_NORM if is_batch else _INSTANCE_NORM,
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
RECORDS: dict[Any, OpRecord] = {
    nn.LayerNorm: OpRecord(
        arguments={**_LAYERS, "elementwise_affine": (True, False), **PLACES},
        rule=_LAYER_NORM,
        step=_build_layer_norm,
        is_valid=_has_axes,
        derived=_derive_axes,
    ),
    F.layer_norm: OpRecord(
        arguments=_LAYERS | _PARAMETERS,
        rule=_LAYER_NORM,
        step=_call_layer_norm,
        is_valid=_has_axes,
        derived=_derive_axes,
    ),
    nn.GroupNorm: OpRecord(
        arguments={
            "num_channels": _CHANNELS,
            **_GROUPS,
            "eps": (1e-5, 0.0625),
            "affine": (True, False),
            "bias": _BIAS,
            **PLACES,
        },
        rule=_GROUP_NORM,
        step=_build_group_norm,
        is_valid=lambda a: a.get("bias", True) or a["affine"],
    ),
    F.group_norm: OpRecord(arguments={**_PARAMETERS, **_GROUPS}, rule=_GROUP_NORM, step=_call_group_norm),
    F.instance_norm: OpRecord(
        arguments={
            **_PARAMETERS,
            "running_mean": _STATISTICS,
            "running_var": _STATISTICS,
            "momentum": _MOMENTUM,
            "use_input_stats": (True, False),
            "shape": ((2, 7, 3, 5), (1, 65, 9), (4, 8, 3, 3), (1, 1, 33, 17), (1, 7, 2, 3, 2)),
        },
        rule=_INSTANCE_NORM,
        step=_call_instance_norm,
    ),
    nn.InstanceNorm1d: _sample_channel_norm(1, is_batch=False),
    nn.InstanceNorm2d: _sample_channel_norm(2, is_batch=False),
    nn.InstanceNorm3d: _sample_channel_norm(3, is_batch=False),
    nn.BatchNorm2d: _sample_channel_norm(2, is_batch=True),
    nn.BatchNorm3d: _sample_channel_norm(3, is_batch=True),
}
UNSAMPLED: dict[Any, OpRule] = dict.fromkeys((nn.BatchNorm1d, F.batch_norm), _BATCH_NORM)
"""Rules of what is the root of no pattern."""
