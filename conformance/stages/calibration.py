"""Calibration: a case's model through prepare and calibration, in its claim's flow, to the grids of its value range."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.inputs import Batch, draw_calibration_inputs
from fx_quant_conformance.conformance.claims.kinds import Kind
from fx_quant_conformance.conformance.claims.qconfigs import qconfig_for, wide_qconfig_for
from fx_quant_conformance.conformance.stages.attribution import unravel_index
from fx_quant_conformance.refimpl import (
    BackendConfig,
    PrepareCustomConfig,
    QConfigMapping,
    explain,
    prepare_fx,
    prepare_qat_fx,
)
from fx_quant_conformance.refimpl.config.patterns import is_match_all


def mapping_for(claim: Claim, case: Case, config: BackendConfig) -> QConfigMapping:
    """Return the mapping that the claim is about. Fixed qparams are the pattern's alone: its input is measured."""
    qconfig = qconfig_for(claim, is_symmetric=case.value_range.is_symmetric)
    if claim.kind is not Kind.FIXED:
        return QConfigMapping().set_global(qconfig)
    mapping = QConfigMapping().set_global(wide_qconfig_for(claim, config))  # rule: OBS-14
    for op in claim.ops:
        if not is_match_all(op):
            mapping.set_object_type(op, qconfig)
    return mapping


def leaves_of(claim: Claim) -> PrepareCustomConfig:
    """Return the vendor's custom config, which also keeps tracing out of the pattern's own modules."""
    custom = copy.copy(claim.preparation.prepare)
    return custom.set_non_traceable_module_classes([*custom.non_traceable_module_classes, *claim.vendor_modules])


def prepare_case(
    claim: Claim,
    case: Case,
    model: nn.Module,
    config: BackendConfig,
    on_prepared: Callable[[GraphModule, tuple[Batch, ...]], object] = lambda *_: None,
    on_calibrated: Callable[[GraphModule, tuple[Batch, ...]], object] = lambda *_: None,
) -> GraphModule:
    """Return the prepared model, calibrated (in QAT: trained for a step, then calibrated), in eval mode.

    ``on_prepared`` gets the model, with its calibration batches, before it is run; in QAT it is in training mode.
    ``on_calibrated`` gets both before the ranges are moved to the grids of the value range.

    Ranges seen in training are forgotten: a batch norm's statistics move in it, and with them the weight that it is
    folded into, which would then fill a few of the steps of its earlier range. In a value range of ties, the parameters
    of ``model`` are changed first. Raises what prepare raises.
    """
    batches = draw_calibration_inputs(case)
    copies = tuple(tuple(each.clone() for each in inputs) for inputs in batches)  # ops in place change them
    if case.value_range.has_ties:
        _round_parameters(claim, model)
    mapping = mapping_for(claim, case, config)
    if claim.flow == "qat":
        prepared = prepare_qat_fx(copy.deepcopy(model).train(), mapping, None, leaves_of(claim), backend_config=config)
        on_prepared(prepared, copies)
        training = batches
        if any(isinstance(module, _BatchNorm) for module in prepared.modules()):  # more than one value per channel
            training = (tuple(torch.cat(parts) for parts in zip(*batches, strict=True)),)
        with torch.no_grad():
            for inputs in training:
                prepared(*inputs)
        prepared.eval()
        forget_ranges(prepared)
    else:
        prepared = prepare_fx(model, mapping, None, leaves_of(claim), backend_config=config)
        on_prepared(prepared, copies)
    with torch.no_grad():
        for inputs in batches:
            prepared(*inputs)
    on_calibrated(prepared, copies)
    if case.value_range.output != 1.0:
        _scale_output(prepared, case.value_range.output)
    if case.value_range.has_ties:
        _round_scales(prepared)
    return prepared


def forget_ranges(model: nn.Module) -> None:
    """Forget the ranges that a model's observers saw in training, while batch norms moved the weights."""
    for module in model.modules():
        forget: Any = getattr(module, "reset_min_max_vals", None)
        if forget is not None:
            forget()


def keeps_statistics(model: nn.Module) -> bool:
    """Tell whether a norm's statistics let training change what a model computes though no weight is trained."""
    return any(isinstance(module, _NormBase) and module.running_mean is not None for module in model.modules())


def _scale_output(prepared: GraphModule, factor: float) -> None:
    """Scale the observed range of the output, where no input shares its observer."""
    slots = explain(prepared).plan.slots
    inputs = {slot.group for slot in slots if slot.role == "input"}
    for slot in slots:
        if slot.role == "output" and slot.group not in inputs:
            for bound in _range_of(_observer_of(prepared, slot.name)):
                bound.mul_(factor)


def _round_parameters(claim: Claim, model: nn.Module) -> None:
    """Let each channel of weights reach both ends of a range whose scale is a power of two; round biases to one.

    Weights that stay in float are not changed.
    """
    observer: Any = qconfig_for(claim).weight()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            if kind.startswith("bias"):
                parameter.mul_(2.0**8).round_().mul_(2.0**-8)
            elif kind.startswith("weight") and parameter.dim() > 1 and observer.quant_min is not None:
                half = (observer.quant_max - observer.quant_min) / 2
                for channel in parameter.unbind(claim.weight_axis):
                    _reach_both_ends(channel, half)


def _reach_both_ends(channel: Tensor, half: float) -> None:
    """Set the smallest and the largest weight to ``half`` steps from zero, each step the next power of two."""
    reach = max(float(channel.abs().max()), 2.0**-12)
    end = half * 2.0 ** math.ceil(math.log2(reach / half))
    for place, value in ((channel.argmin(), -end), (channel.argmax(), end)):
        channel[tuple(unravel_index(int(place), channel.shape))] = value


def _round_scales(prepared: GraphModule) -> None:
    """Widen each observed range of activations until its scale is a power of two."""
    for slot in explain(prepared).plan.slots:
        if slot.role == "weight":
            continue
        observer = _observer_of(prepared, slot.name)
        ends = _range_of(observer)
        if ends and all(bound.numel() == 1 for bound in ends):
            scale, zero_point = map(float, observer.calculate_qparams())
            step = 2.0 ** math.ceil(math.log2(scale))
            half = (observer.quant_max - observer.quant_min) / 2  # of a symmetric range, whose zero point is fixed
            is_symmetric = observer.qscheme is torch.per_tensor_symmetric
            low, high = (
                (-half, half) if is_symmetric else (observer.quant_min - zero_point, observer.quant_max - zero_point)
            )
            for bound, value in zip(ends, (low, high), strict=True):
                bound.fill_(value * step)


def set_scales(prepared: GraphModule, x_scale: float, y_scale: float) -> None:
    """Set the grids of inputs and of outputs to these scales, with a zero point in the middle of the range."""
    for slot in explain(prepared).plan.slots:
        if slot.role == "weight":
            continue
        observer, scale = _observer_of(prepared, slot.name), x_scale if slot.role == "input" else y_scale
        middle = (observer.quant_min + observer.quant_max + 1) // 2
        ends = (observer.quant_min - middle, observer.quant_max - middle)
        for bound, end in zip(_range_of(observer), ends, strict=False):
            bound.fill_(end * scale)


def _observer_of(prepared: GraphModule, name: str) -> Any:
    """Return an observer of the model, or that of a fake quantize."""
    module = getattr(prepared, name)
    return getattr(module, "activation_post_process", module)


def _range_of(observer: Any) -> list[Tensor]:
    """Return the smallest and the largest value that an observer has seen; nothing where it keeps none."""
    bounds = [getattr(observer, end, None) for end in ("min_val", "max_val")]
    return [bound for bound in bounds if isinstance(bound, Tensor)]
