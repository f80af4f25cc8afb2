"""The QConfig that a claim is about: its dtypes, its bounds exactly, its weight scheme, for its flow."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from fx_quant_conformance import refimpl
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import Kind, fixed_qparams_of, kind_of
from fx_quant_conformance.refimpl.config.dtype_config import DTypeConfig
from fx_quant_conformance.refimpl.legacy import qint8
from fx_quant_conformance.refimpl.observers.observers import dtype_range, is_quantized_dtype

WEIGHT_OBSERVERS: dict[str, tuple[Any, torch.qscheme]] = {
    "per_tensor_symmetric": (refimpl.MinMaxObserver, torch.per_tensor_symmetric),
    "per_channel_symmetric": (refimpl.PerChannelMinMaxObserver, torch.per_channel_symmetric),
    "per_tensor_affine": (refimpl.MinMaxObserver, torch.per_tensor_affine),
    "per_channel_affine": (refimpl.PerChannelMinMaxObserver, torch.per_channel_affine),
    "per_channel_affine_float_qparams": (refimpl.PerChannelMinMaxObserver, torch.per_channel_affine_float_qparams),
}
"""The observer and the qscheme of a weight, by weight scheme."""


def fixed_range_of(dtypes: DTypeConfig) -> tuple[float, float] | None:
    """Return the ends, as reals, of the widest range of the grid that a dtype config fixes; None: it fixes none."""
    fixed = fixed_qparams_of(dtypes)
    if fixed is None:
        return None
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    arguments = _add_bounds(observer_arguments_of(*ends))
    scale, zero_point = fixed
    return (arguments["quant_min"] - zero_point) * scale, (arguments["quant_max"] - zero_point) * scale


def qconfig_for(claim: Claim, *, is_symmetric: bool = False) -> refimpl.QConfig:
    """Return the QConfig that a claim is about: the vendor's own where it gives any, else the suite's.

    Qparams that the dtype config fixes leave no choice: if no QConfig of the vendor has them, the suite's observer of
    activations takes the place of the vendor's. With `is_symmetric` the suite's observes activations symmetrically.
    Raises QConfigError if no QConfig of the vendor fits.
    """
    suite = suite_qconfig_for(claim, is_symmetric=is_symmetric)
    if claim.preparation.qconfigs is None:
        return suite
    qscheme = WEIGHT_OBSERVERS[claim.scheme][1] if claim.scheme in WEIGHT_OBSERVERS else None
    choose = partial(
        claim.preparation.choose_qconfig,
        claim.dtypes,
        qscheme,
        has_weight=claim.scheme != NO_WEIGHT,
        is_qat=claim.flow == "qat",
    )
    if claim.kind is Kind.FIXED:
        with contextlib.suppress(refimpl.QConfigError):
            return choose()
        return choose(activation=suite.activation)
    return choose()


def format_misfit(claim: Claim) -> str | None:
    """Say why none of the QConfigs that a vendor gives fits a claim; None: one does, or the suite's are taken."""
    given = claim.preparation
    if given.qconfigs is None or claim.kind is Kind.OTHER:
        return None
    try:
        if claim.kind is Kind.FIXED:
            given.choose_input_qconfig(claim.dtypes)
        qconfig_for(claim)
    except refimpl.QConfigError as error:
        return str(error)
    return None


def suite_qconfig_for(claim: Claim, *, is_symmetric: bool = False) -> refimpl.QConfig:
    """Return the suite's own QConfig for a claim, exactly on the bounds of its dtype config."""
    return make_qconfig(claim.dtypes, claim.scheme, flow=claim.flow, axis=claim.weight_axis, is_symmetric=is_symmetric)


def make_qconfig(
    dtypes: DTypeConfig, scheme: str, *, flow: str = "ptq", axis: int = 0, is_symmetric: bool = False
) -> refimpl.QConfig:
    """Return the QConfig of a dtype config, with its bounds exactly. ``axis``: that of per-channel weights."""
    kind, is_qat = kind_of(dtypes), flow == "qat"
    activation = _make_activation(dtypes, kind, is_qat, is_symmetric)
    return refimpl.QConfig(activation=activation, weight=_make_weight(dtypes, kind, scheme, axis, is_qat))


def dynamic_range_of(claim: Claim) -> tuple[int, int] | None:
    """Return the integers that the claim's QConfig quantizes a dynamic input to; None: it is not dynamic."""
    if claim.kind is not Kind.DYNAMIC:
        return None
    arguments = _add_bounds(observer_arguments_of(claim.dtypes.input_dtype_with_constraints))
    return arguments["quant_min"], arguments["quant_max"]


def wide_qconfig_for(claim: Claim, config: refimpl.BackendConfig) -> refimpl.QConfig:
    """Return the QConfig of what stands before a claim of fixed qparams: its input's dtype and range, measured.

    No scale is smaller than the config lets another op's output have: a dtype config of fixed qparams cannot say so.
    Raises QConfigError if the vendor gives QConfigs and none observes that dtype.
    """
    if claim.preparation.qconfigs is not None:
        return claim.preparation.choose_input_qconfig(claim.dtypes, is_qat=claim.flow == "qat")
    arguments = observer_arguments_of(claim.dtypes.input_dtype_with_constraints)
    floor = max(arguments.pop("eps", 0.0), find_scale_floor(config, claim.dtypes.input_dtype))
    activation = make_min_max(claim.flow == "qat", arguments | ({"eps": floor} if floor else {}))
    weight = _make_weight(claim.dtypes, Kind.STATIC, claim.scheme, claim.weight_axis, claim.flow == "qat")
    return refimpl.QConfig(activation=activation, weight=weight)


def find_scale_floor(config: refimpl.BackendConfig, dtype: torch.dtype | None) -> float:
    """Return the largest of the smallest scales that a config claims for static outputs of a dtype; 0: there is none.

    A machine that asks it of some op may hold its scales in a form that knows no smaller one.
    """
    static = (dtypes for entry in config.configs for dtypes in entry.dtype_configs if not dtypes.is_dynamic)
    ends = (dtypes.output_dtype_with_constraints for dtypes in static)
    return max((float(end.scale_min_lower_bound or 0.0) for end in ends if end.dtype is dtype), default=0.0)


def make_min_max(is_qat: bool, arguments: dict[str, Any]) -> Any:
    """Return the constructor of an observer of the smallest and the largest value; in QAT, of a fake quantize by it."""
    if is_qat:
        return refimpl.FakeQuantize.with_args(observer=refimpl.MinMaxObserver, **arguments)
    return refimpl.MinMaxObserver.with_args(**arguments)


def _make_activation(dtypes: DTypeConfig, kind: Kind, is_qat: bool, is_symmetric: bool) -> Any:
    ends = (dtypes.input_dtype_with_constraints, dtypes.output_dtype_with_constraints)
    if kind is Kind.FLOAT16:
        return refimpl.PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=dtypes.is_dynamic)
    if kind is Kind.WEIGHT_ONLY:
        return refimpl.PlaceholderObserver.with_args(dtype=torch.float32)
    if kind is Kind.DYNAMIC:
        mode: dict[str, Any] = {"is_dynamic": True, "reduce_range": False}  # on any engine
        arguments = mode | _add_bounds(observer_arguments_of(ends[0]))
        if is_qat:
            return refimpl.FakeQuantize.with_args(
                observer=refimpl.MovingAverageMinMaxObserver, averaging_constant=1, **arguments
            )
        return refimpl.PlaceholderObserver.with_args(**arguments)
    if kind is Kind.FIXED:
        scale, zero_point = fixed_qparams_of(dtypes) or (1.0, 0)
        arguments = _add_bounds(observer_arguments_of(*ends))
        arguments.pop("eps", None)
        observer = refimpl.FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point, **arguments)
        return refimpl.FixedQParamsFakeQuantize.with_args(observer=observer) if is_qat else observer
    qscheme = torch.per_tensor_symmetric if is_symmetric else torch.per_tensor_affine
    return make_min_max(is_qat, observer_arguments_of(*ends) | {"qscheme": qscheme})


def _add_bounds(arguments: dict[str, Any]) -> dict[str, Any]:
    """Spell the dtype's range out, for observers that do not know it."""
    low, high = dtype_range(arguments["dtype"])
    return {"quant_min": low, "quant_max": high} | arguments


class HalfWeight(refimpl.PlaceholderObserver):
    """Asks for a weight in half precision; QAT modules pass it a keyword that other observers lack."""

    def __init__(self, dtype: torch.dtype = torch.float16, factory_kwargs: object = None, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)


def _make_weight(dtypes: DTypeConfig, kind: Kind, scheme: str, axis: int, is_qat: bool) -> Any:
    if kind is Kind.FLOAT16:
        return HalfWeight.with_args(dtype=torch.float16)
    if dtypes.weight_dtype is torch.float32:
        return refimpl.PlaceholderObserver.with_args(dtype=torch.float32)
    observer, qscheme = WEIGHT_OBSERVERS.get(scheme, WEIGHT_OBSERVERS["per_tensor_symmetric"])
    constraints = dtypes.weight_dtype_with_constraints
    is_bounded = is_quantized_dtype(constraints.dtype)
    arguments: dict[str, Any] = observer_arguments_of(constraints) if is_bounded else {"dtype": qint8}
    arguments["qscheme"] = qscheme
    if observer is refimpl.PerChannelMinMaxObserver:
        arguments["ch_axis"] = axis
    return refimpl.FakeQuantize.with_args(observer=observer, **arguments) if is_qat else observer.with_args(**arguments)


def observer_arguments_of(*ends: refimpl.DTypeWithConstraints) -> dict[str, Any]:
    """Return the dtype of the first end, and the widest range and smallest scale that all of them allow."""
    dtype = ends[0].dtype
    assert dtype is not None
    low, high = dtype_range(dtype)
    lows = [int(each.quant_min_lower_bound) for each in ends if each.quant_min_lower_bound is not None]
    highs = [int(each.quant_max_upper_bound) for each in ends if each.quant_max_upper_bound is not None]
    floors = [float(each.scale_min_lower_bound) for each in ends if each.scale_min_lower_bound is not None]
    arguments: dict[str, Any] = {"dtype": dtype}
    if (bounds := (max([low, *lows]), min([high, *highs]))) != (low, high):
        arguments |= {"quant_min": bounds[0], "quant_max": bounds[1]}
    return arguments | ({"eps": max(*floors, torch.finfo(torch.float32).eps)} if floors else {})
