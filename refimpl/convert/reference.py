"""The reference modules that convert puts in the place of the model's (rules CVT-02, OBS-13).

The classes come from the BackendConfig: a reference class has ``from_float(module, qparams)``. Nothing here changes the
module that it is given; tensors are shared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fx_quant_conformance.refimpl.config.fusers import copy_plain, find_computed
from fx_quant_conformance.refimpl.convert.reference_build import build_reference
from fx_quant_conformance.refimpl.convert.reference_convs import settle_padding
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, QConfigError, blame
from fx_quant_conformance.refimpl.graph.modules import float_module_of, put_root, root_of
from fx_quant_conformance.refimpl.graph.tracing import class_of
from fx_quant_conformance.refimpl.observers.qparams import (
    PER_CHANNEL,
    QParams,
    check_axis,
    compute_ranges_qparams,
    is_plain,
    is_quantized_dtype,
    measure_channels,
    read_qparams,
)
from fx_quant_conformance.refimpl.prepare.dtype_choice import is_observed_dtype


def make_reference(
    module: nn.Module,
    qconfig: Any,
    references: Mapping[type[nn.Module], type[nn.Module]],
    *,
    is_decomposed: bool,
    where: str,
    weight_dtype: torch.dtype | None = None,
    weight_qparams: QParams | None = None,
) -> nn.Module:
    """Return the reference module of an accepted pattern's root, in its mode: its float weight, with qparams. (CVT-02)

    `module`: a float module, a fused one (its first part is replaced, in a copy) or a QAT module. `references` maps
    root classes to reference classes (CFG-11). `weight_dtype`: the dtype config's. `weight_qparams`: measured ones
    (`measure_weights`).
    A module without weight, or whose weight the QConfig leaves in float32, is returned in float (CVT-11). Raises
    ConfigError where a weight has no reference class or that class fails, QConfigError for the weight's observer.
    """
    floating: Any = float_module_of(module, where=where)
    root = copy_plain(layer) if find_computed(layer := root_of(floating)) else layer
    reference: Any = references.get(class_of(root))
    if reference is None and _weight_names_of(root) and is_observed_dtype(weight_dtype):
        raise ConfigError(  # rule: CVT-10
            f"{where!r}: prepare accepted a weight of {weight_dtype}, but no entry gives a reference module for root "
            f"{class_of(root).__name__}: set root_module and reference_quantized_module together; if they are set, and "
            "the model was loaded, give convert the backend_config: a class that is made in a function is not saved"
        )
    trained = getattr(module, "weight_fake_quant", None)  # rule: QAT-03
    with blame(QConfigError, repr(where), "the weight's observer"):
        if weight_qparams is not None and reference is not None:
            measured = {"weight": weight_qparams.weight_dict(is_decomposed=is_decomposed)}
        else:
            names = _weight_names_of(root) if reference else []
            observers = {name: qconfig.weight() if trained is None else copy.deepcopy(trained) for name in names}
            if not any(is_observed_dtype(observer.dtype) for observer in observers.values()):
                return floating  # type: ignore[no-any-return]
            measured = {name: _measure_weight(o, getattr(root, name), is_decomposed) for name, o in observers.items()}
    with blame(ConfigError, repr(where), f"{reference.__name__}.from_float"):
        quantized: nn.Module = build_reference(reference, root, _lay_out(root, measured, is_decomposed))
    settle_padding(quantized)
    if quantized.training != root.training:
        quantized.train(root.training)
    for name, qparams in measured.items():
        if qparams["dtype"] == torch.float16:
            _round_weight(quantized, name)
    return put_root(floating, quantized)  # rule: CVT-02


def measure_weights(modules: Iterable[tuple[nn.Module, Any]]) -> dict[int, QParams]:
    """Measure at once the weights that plain min/max observers see, keyed by the ``id`` of the module. (OBS-13)

    `modules`: with their QConfigs. Trained, recurrent and other weights, and those without the axis that is asked for,
    are left to `make_reference`.
    """
    makers: dict[Any, tuple[Any, dict[int, tuple[Tensor, Tensor]]]] = {}
    for module, qconfig in modules:
        root = root_of(module)
        weight = getattr(root, "weight", None)
        if not isinstance(weight, Tensor) or not weight.numel() or hasattr(module, "weight_fake_quant"):
            continue
        if qconfig.weight not in makers:
            makers[qconfig.weight] = (qconfig.weight(), {})
        observer, ranges = makers[qconfig.weight]
        if is_plain(observer) and weight.dtype == torch.float32 and weight.device.type == "cpu":
            axis = observer.ch_axis if observer.qscheme in PER_CHANNEL else None
            values = weight.detach()
            if axis is not None and (type(axis) is not int or axis not in range(values.dim())):
                continue
            ranges[id(module)] = torch.aminmax(values) if axis is None else measure_channels(values, axis)
    measured = (compute_ranges_qparams(observer, ranges) for observer, ranges in makers.values())
    return {key: qparams for weights in measured for key, qparams in weights.items()}


def _weight_names_of(root: nn.Module) -> list[str]:
    """Return the names of the weights to be quantized: one, or a recurrent module's or cell's."""
    if isinstance(root, nn.RNNBase | nn.RNNCellBase):
        return [name for name, _ in root.named_parameters() if name.startswith("weight")]
    return ["weight"] if isinstance(getattr(root, "weight", None), Tensor) else []


def _measure_weight(observer: Any, weight: Tensor, is_decomposed: bool) -> dict[str, Any]:
    """Let the observer see the weight, and return its qparams with the keys that reference modules take. (OBS-13)"""
    if not is_quantized_dtype(observer.dtype):
        return {"qscheme": None, "dtype": observer.dtype, "is_decomposed": is_decomposed}  # float16: nothing to measure
    refuse_nan(weight)
    if getattr(observer, "qscheme", None) in PER_CHANNEL:
        check_axis(weight, observer.ch_axis)
    with torch.no_grad():
        (observer if weight.device.type == "cpu" else observer.to(weight.device))(weight)  # rule: OBS-13
    qparams = read_qparams(observer)  # decomposed ops truncate a real zero point: such weights have one form
    if qparams.axis is not None:
        qparams = replace(qparams, axis=qparams.axis % weight.dim())
    return qparams.weight_dict(is_decomposed=is_decomposed and not qparams.zero_point.is_floating_point())


def refuse_nan(weight: Tensor) -> None:
    """Raise ModelError for a weight that has no integers. (OBS-18)"""
    if weight.isnan().any():  # rule: OBS-18
        raise ModelError(f"{int(weight.isnan().sum())} of the {weight.numel()} values of the weight are NaN")


def _lay_out(root: nn.Module, measured: dict[str, dict[str, Any]], is_decomposed: bool) -> dict[str, Any]:
    """Lay qparams out for ``from_float``: flat for one weight, nested by name for recurrent modules. (CVT-02)"""
    if isinstance(root, nn.RNNBase):  # makes tensors of numbers, and warns of tensors
        if root.proj_size:
            raise ConfigError(f"proj_size={root.proj_size}: the reference module has no projection; give it no QConfig")
        for qparams in measured.values():
            qparams |= {name: value.tolist() for name, value in qparams.items() if isinstance(value, Tensor)}
    return measured.get("weight") or {**measured, "is_decomposed": is_decomposed}


def _round_weight(module: nn.Module, name: str) -> None:
    """Round a float16 weight to the values that it is computed with; the reference module does not."""
    weight = getattr(module, name)
    rounded = weight.detach().half().to(weight.dtype)  # rule: CVT-04
    setattr(module, name, nn.Parameter(rounded, weight.requires_grad))
