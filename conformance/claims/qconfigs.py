"""The QConfig that a claim is about: its dtypes, its bounds exactly, its weight scheme, for its flow."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.conv import _ConvTransposeNd

from conformance.claims.claim import Claim
from conformance.ops.fused_modules import root_of
from refimpl import (
    DTypeWithConstraints,
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    QConfig,
)
from refimpl.dtype_config import DTypeConfig
from refimpl.observers import dtype_range, is_quantized_dtype
from refimpl.patterns import leaves


class Kind(Enum):
    """How a dtype config quantizes."""

    STATIC = "static"
    """Activations are integers with qparams known before the run."""

    FIXED = "fixed qparams"
    """Static, with one scale and zero point that the dtype config prescribes."""

    DYNAMIC = "dynamic"
    """Activations are quantized by what each run brings; the result is float."""

    FLOAT16 = "float16"
    """Activations and weights in half precision."""

    WEIGHT_ONLY = "weight only"
    """Integers in the weight alone; float in and out."""

    OTHER = "other"
    """None of these: the suite has no QConfig for it."""


WEIGHT_OBSERVERS: dict[str, tuple[Any, torch.qscheme]] = {
    "per_tensor_symmetric": (MinMaxObserver, torch.per_tensor_symmetric),
    "per_channel_symmetric": (PerChannelMinMaxObserver, torch.per_channel_symmetric),
    "per_tensor_affine": (MinMaxObserver, torch.per_tensor_affine),
    "per_channel_affine": (PerChannelMinMaxObserver, torch.per_channel_affine),
    "per_channel_affine_float_qparams": (PerChannelMinMaxObserver, torch.per_channel_affine_float_qparams),
}
"""The observer and the qscheme of a weight, by weight scheme."""
INTEGERS = (Kind.STATIC, Kind.FIXED)
"""The kinds whose activations lie on grids that are known before the run."""


def kind_of(dtypes: DTypeConfig) -> Kind:
    """Tell how a dtype config quantizes."""
    if dtypes.input_dtype is torch.float16:
        return Kind.FLOAT16
    if dtypes.is_dynamic:
        return Kind.DYNAMIC
    if is_quantized_dtype(dtypes.input_dtype):
        ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
        return Kind.FIXED if any(end.scale_exact_match is not None for end in ends) else Kind.STATIC
    is_float = dtypes.input_dtype in (None, torch.float32)
    return Kind.WEIGHT_ONLY if is_float and is_quantized_dtype(dtypes.weight_dtype) else Kind.OTHER


def qconfig_for(claim: Claim, *, is_symmetric: bool = False) -> QConfig:
    """Return the QConfig that a claim is about; with `is_symmetric` activations are observed symmetrically."""
    return make_qconfig(
        claim.dtypes, claim.scheme, flow=claim.flow, axis=weight_axis(claim), is_symmetric=is_symmetric
    )  # fmt: skip


def make_qconfig(
    dtypes: DTypeConfig, scheme: str, *, flow: str = "ptq", axis: int = 0, is_symmetric: bool = False
) -> QConfig:
    """Return the QConfig of a dtype config, with its bounds exactly. ``axis``: that of per-channel weights."""
    kind, is_qat = kind_of(dtypes), flow == "qat"
    activation = _activation(dtypes, kind, is_qat, is_symmetric)
    return QConfig(activation=activation, weight=_weight(dtypes, kind, scheme, axis, is_qat))


def dynamic_range(claim: Claim) -> tuple[int, int] | None:
    """Return the integers that the claim's QConfig quantizes a dynamic input to; None: it is not dynamic."""
    if kind_of(claim.dtypes) is not Kind.DYNAMIC:
        return None
    arguments = _bounded(observer_arguments(claim.dtypes.input_dtype_with_constraints))
    return arguments["quant_min"], arguments["quant_max"]


def wide_qconfig(claim: Claim) -> QConfig:
    """Return the QConfig for what stands before a claim of fixed qparams: the dtype, with measured qparams."""
    arguments = observer_arguments(DTypeWithConstraints(dtype=claim.dtypes.input_dtype))
    activation: Any = MinMaxObserver.with_args(**arguments)
    if claim.flow == "qat":
        activation = FakeQuantize.with_args(observer=MinMaxObserver, **arguments)
    weight = _weight(claim.dtypes, Kind.STATIC, claim.scheme, weight_axis(claim), claim.flow == "qat")
    return QConfig(activation=activation, weight=weight)


def _activation(dtypes: DTypeConfig, kind: Kind, is_qat: bool, is_symmetric: bool) -> Any:
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    if kind is Kind.FLOAT16:
        return PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=dtypes.is_dynamic)
    if kind is Kind.WEIGHT_ONLY:
        return PlaceholderObserver.with_args(dtype=torch.float32)
    if kind is Kind.DYNAMIC:
        arguments = {"is_dynamic": True, "reduce_range": False} | _bounded(observer_arguments(ends[0]))  # on any engine
        if is_qat:
            return FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, averaging_constant=1, **arguments)
        return PlaceholderObserver.with_args(**arguments)
    if kind is Kind.FIXED:
        given = next(end for end in ends if end.scale_exact_match is not None)
        observer = FixedQParamsObserver.with_args(
            scale=given.scale_exact_match, zero_point=given.zero_point_exact_match,
            **{key: value for key, value in _bounded(observer_arguments(*ends)).items() if key != "eps"},
        )  # fmt: skip
        return FixedQParamsFakeQuantize.with_args(observer=observer) if is_qat else observer
    arguments = observer_arguments(*ends)
    arguments["qscheme"] = torch.per_tensor_symmetric if is_symmetric else torch.per_tensor_affine
    if is_qat:
        return FakeQuantize.with_args(observer=MinMaxObserver, **arguments)
    return MinMaxObserver.with_args(**arguments)


def _bounded(arguments: dict[str, Any]) -> dict[str, Any]:
    """With the dtype's range spelled out, for observers that have none by themselves."""
    low, high = dtype_range(arguments["dtype"])
    return {"quant_min": low, "quant_max": high} | arguments


class HalfWeight(PlaceholderObserver):
    """Asks for a weight in half precision; QAT modules make theirs with a keyword that other observers lack."""

    def __init__(self, dtype: torch.dtype = torch.float16, factory_kwargs: object = None, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)


def _weight(dtypes: DTypeConfig, kind: Kind, scheme: str, axis: int, is_qat: bool) -> Any:
    if kind is Kind.FLOAT16:
        return HalfWeight.with_args(dtype=torch.float16)
    if dtypes.weight_dtype is torch.float32:
        return PlaceholderObserver.with_args(dtype=torch.float32)
    observer, qscheme = WEIGHT_OBSERVERS.get(scheme, WEIGHT_OBSERVERS["per_tensor_symmetric"])
    constraints = dtypes.weight_dtype_with_constraints
    arguments: dict[str, Any] = {"dtype": torch.qint8}
    if is_quantized_dtype(constraints.dtype):
        arguments = observer_arguments(constraints)
    arguments["qscheme"] = qscheme
    if observer is PerChannelMinMaxObserver:
        arguments["ch_axis"] = axis
    return FakeQuantize.with_args(observer=observer, **arguments) if is_qat else observer.with_args(**arguments)


def weight_axis(claim: Claim) -> int:
    """Return the axis of a weight's output channels: 1 in transposed convolutions, else 0."""
    roots = (root_of(leaf) for leaf in leaves(claim.entry.normal_pattern))
    return int(any(is_transposed_convolution(root) for root in roots))


def is_transposed_convolution(op: Any) -> bool:
    """Tell whether an op is a transposed convolution, a module's class or a function."""
    is_class = isinstance(op, type) and issubclass(op, _ConvTransposeNd)
    return is_class or op in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def observer_arguments(first: DTypeWithConstraints, *others: DTypeWithConstraints) -> dict[str, Any]:
    """Return the dtype of the first, and the widest range and smallest scale that all of them allow."""
    assert first.dtype is not None
    low, high = dtype_range(first.dtype)
    lows, highs = [low], [high]
    floors = []
    for constraints in (first, *others):
        if constraints.quant_min_lower_bound is not None:
            lows.append(int(constraints.quant_min_lower_bound))
        if constraints.quant_max_upper_bound is not None:
            highs.append(int(constraints.quant_max_upper_bound))
        if constraints.scale_min_lower_bound is not None:
            floors.append(float(constraints.scale_min_lower_bound))
    arguments: dict[str, Any] = {"dtype": first.dtype}
    if (max(lows), min(highs)) != (low, high):
        arguments |= {"quant_min": max(lows), "quant_max": min(highs)}
    return arguments | ({"eps": max(*floors, torch.finfo(torch.float32).eps)} if floors else {})
