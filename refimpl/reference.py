"""The modules that prepare and convert put in the place of the model's own (rules CVT-02, OBS-13, QAT-01, CUS-01).

The classes come from the BackendConfig; what they must have is a protocol: a reference class ``from_float(module,
qparams)``, a QAT class ``from_float(module)``, ``to_float()`` and ``weight_fake_quant``, the classes of custom modules
``from_float`` and ``from_observed``. Nothing here changes the module that it is given; tensors are shared with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.ao.nn.intrinsic as nni
from torch import Tensor, nn

from refimpl.bounded import bound_weight
from refimpl.dtype_choice import is_observed_dtype
from refimpl.errors import ConfigError, QConfigError, blaming
from refimpl.qparams import (
    PER_CHANNEL,
    QParams,
    channel_bounds,
    dtype_range,
    is_plain,
    is_quantized_dtype,
    ranges_qparams,
    read_qparams,
)
from refimpl.reference_build import built
from refimpl.reference_convs import settle_padding
from refimpl.tracing import module_type

Model = TypeVar("Model", bound=nn.Module)

_HOOK_DICTS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


def reference_module(
    module: nn.Module,
    qconfig: Any,
    references: Mapping[type[nn.Module], type[nn.Module]],
    *,
    is_decomposed: bool,
    where: str,
    is_bounded: bool = False,
    weight_dtype: torch.dtype | None = None,
    known: QParams | None = None,
) -> nn.Module:
    """Return the reference module of an accepted pattern's root, in its mode: its float weight, with qparams. (CVT-02)

    `module` is a float module, a fused one (its first part is replaced, in a copy) or a QAT module; `references` maps
    root classes to reference classes (CFG-11); `is_bounded` keeps weights in a range narrower than the dtype's, which
    quantized tensors do not; `weight_dtype` is what the dtype config names; `known` are the weight's
    qparams, if they were measured (`plain_weights`). A module without weight, or whose weight the QConfig leaves in
    float32, comes back as float (CVT-11). Raises ConfigError where a weight has no reference class or that class fails,
    QConfigError for the weight's observer.
    """
    floating: Any = float_module(module, where=where)
    is_fused = isinstance(floating, nni._FusedModule)  # type: ignore[attr-defined]
    root = floating[0] if is_fused else floating
    reference: Any = references.get(module_type(root))
    if reference is None and _weights(root) and is_observed_dtype(weight_dtype):
        raise ConfigError(  # rule: CVT-10
            f"{where!r}: prepare accepted a weight of {weight_dtype}, but no entry gives a reference module for root "
            f"{module_type(root).__name__}: set root_module and reference_quantized_module together"
        )
    trained = getattr(module, "weight_fake_quant", None)  # rule: QAT-03
    with blaming(QConfigError, repr(where), "the weight's observer"):
        if known is not None and reference is not None:
            measured = {"weight": known.weight_dict(is_decomposed=is_decomposed)}
        else:
            names = _weights(root) if reference else []
            observers = {name: qconfig.weight() if trained is None else copy.deepcopy(trained) for name in names}
            if not any(is_observed_dtype(made.dtype) for made in observers.values()):
                return floating  # type: ignore[no-any-return]
            measured = {name: _measured(made, getattr(root, name), is_decomposed) for name, made in observers.items()}
    with blaming(ConfigError, repr(where), f"{reference.__name__}.from_float"):
        made: nn.Module = built(reference, root, _arguments(root, measured, is_decomposed))
    settle_padding(made)
    if made.training != root.training:
        made.train(root.training)
    for name, qparams in measured.items():
        if qparams["dtype"] == torch.float16:
            _round_weight(made, name)
        elif is_bounded and (qparams["quant_min"], qparams["quant_max"]) != dtype_range(qparams["dtype"]):
            bound_weight(made, name, qparams)
    if not is_fused:
        return made
    floating = _shallow(floating)
    floating[0] = made  # rule: CVT-02
    return floating  # type: ignore[no-any-return]


def plain_weights(asked: Iterable[tuple[nn.Module, Any]]) -> dict[int, QParams]:
    """Measure at once the weights that plain min/max observers see, keyed by the ``id`` of the module. (OBS-13)

    `asked`: modules with their QConfigs. Trained, recurrent and other weights are left to `reference_module`.
    """
    makers: dict[Any, tuple[Any, dict[int, tuple[Tensor, Tensor]]]] = {}
    for module, qconfig in asked:
        root: Any = module[0] if isinstance(module, nni._FusedModule) else module  # type: ignore[attr-defined]
        weight = getattr(root, "weight", None)
        if not isinstance(weight, Tensor) or not weight.numel() or hasattr(module, "weight_fake_quant"):
            continue
        if qconfig.weight not in makers:
            makers[qconfig.weight] = (qconfig.weight(), {})
        observer, ranges = makers[qconfig.weight]
        if is_plain(observer) and weight.dtype == torch.float32 and weight.device.type == "cpu":
            axis = observer.ch_axis if observer.qscheme in PER_CHANNEL else None
            values = weight.detach()
            low, high = torch.aminmax(values) if axis is None else channel_bounds(values, axis)
            ranges[id(module)] = (low, high)
    measured = (ranges_qparams(observer, ranges) for observer, ranges in makers.values())
    return {key: qparams for found in measured for key, qparams in found.items()}


def float_module(module: nn.Module, *, where: str) -> nn.Module:
    """Return a QAT module's float module, batch norm folded, in its mode; another module as it is. (QAT-02)

    Raises ConfigError if ``to_float`` fails.
    """
    if not hasattr(module, "weight_fake_quant") or not hasattr(module, "to_float"):
        return module
    with blaming(ConfigError, repr(where), f"{type(module).__name__}.to_float"):
        made: nn.Module = module.to_float()  # type: ignore[operator]  # rule: QAT-02
    return made.train(module.training)


def qat_module(module: nn.Module, qconfig: Any, qat_class: type[nn.Module], *, where: str) -> nn.Module:
    """Return `module`, a float or fused one, as a `qat_class`, on the same device and in the same mode. (QAT-01)

    Its parameters and batch norm statistics are the module's own tensors: training it trains the user's model. Hooks
    move over. Raises ConfigError if ``from_float`` fails.
    """
    made = swapped(module, qconfig, qat_class, where=where).train(module.training)  # rule: QAT-01
    for name in _HOOK_DICTS:
        getattr(made, name).update(getattr(module, name))
    return made.to(next(module.parameters()).device)


def swapped(module: nn.Module, qconfig: Any, to: type[nn.Module], *, how: str = "from_float", where: str) -> nn.Module:
    """Return ``to.<how>(module)``, where the module has the QConfig as ``qconfig``. (CUS-01)

    `how` is ``from_float`` for what prepare puts in, ``from_observed`` for the custom modules of convert.
    """
    with blaming(ConfigError, repr(where), f"{to.__name__}.{how}({module_type(module).__name__})"):
        made: nn.Module = getattr(to, how)(with_qconfig(module, qconfig))  # rule: CUS-01
    return made


def with_qconfig(module: Model, qconfig: Any) -> Model:
    """Return a copy of a module, and of what is in it, with ``qconfig`` set. Its tensors are shared. (QCM-01)"""
    made = _shallow(module)
    made._modules |= {name: with_qconfig(part, qconfig) for name, part in made._modules.items() if part is not None}
    made.qconfig = qconfig
    return made


def without_qconfig(model: Model) -> Model:
    """Put copies without ``qconfig`` in the place of the modules of `model` that have one; return `model`. (CVT-08)

    `model` alone is changed: the modules may be those of a prepared model, which keeps its own.
    """
    model.__dict__.pop("qconfig", None)
    known: dict[nn.Module, nn.Module] = {}  # one module under two names stays one
    for name, part in model._modules.items():
        if part is not None and any("qconfig" in inner.__dict__ for inner in part.modules()):
            known[part] = known[part] if part in known else without_qconfig(_shallow(part))
            model._modules[name] = known[part]  # rule: CVT-08
    return model


def _shallow(module: Model) -> Model:
    """Copy a module: its own dicts, the same parts in them. copy.copy shares the dicts and refuses parametrizations."""
    made = type(module).__new__(type(module))
    made.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return made


def twin(module: Model) -> Model:
    """Copy a module that holds plain values, and copies of its buffers and parts."""
    made = _shallow(module)
    made._buffers |= {name: value.clone() for name, value in module._buffers.items() if value is not None}
    made._modules |= {name: twin(part) for name, part in module._modules.items() if part is not None}
    return made


def _weights(root: nn.Module) -> list[str]:
    """Name the weights to be quantized: one, or those of a recurrent module or cell."""
    if isinstance(root, nn.RNNBase | nn.RNNCellBase):
        return [name for name, _ in root.named_parameters() if name.startswith("weight")]
    return ["weight"] if isinstance(getattr(root, "weight", None), Tensor) else []


def _measured(observer: Any, weight: Tensor, is_decomposed: bool) -> dict[str, Any]:
    """Let the observer see the weight, and return its qparams with the keys that reference modules take. (OBS-13)"""
    if not is_quantized_dtype(observer.dtype):
        return {"qscheme": None, "dtype": observer.dtype, "is_decomposed": is_decomposed}  # float16: nothing to measure
    with torch.no_grad():
        (observer if weight.device.type == "cpu" else observer.to(weight.device))(weight)  # rule: OBS-13
    qparams = read_qparams(observer)  # decomposed ops truncate a zero point that is a real: such weights have one form
    return qparams.weight_dict(is_decomposed=is_decomposed and not qparams.zero_point.is_floating_point())


def _arguments(root: nn.Module, measured: dict[str, dict[str, Any]], is_decomposed: bool) -> dict[str, Any]:
    """Lay qparams out for ``from_float``: flat for one weight, nested by name for recurrent modules. (CVT-02)"""
    if isinstance(root, nn.RNNBase):  # makes tensors of numbers, and warns of tensors
        if root.proj_size:
            raise ConfigError(f"proj_size={root.proj_size}: the reference module has no projection; give it no QConfig")
        for qparams in measured.values():
            qparams |= {name: value.tolist() for name, value in qparams.items() if isinstance(value, Tensor)}
    return measured.get("weight") or {**measured, "is_decomposed": is_decomposed}


def _round_weight(made: nn.Module, name: str) -> None:
    """Let a float16 weight have the values that it is computed with, which the reference module does not see to."""
    weight = getattr(made, name)
    rounded = weight.detach().half().to(weight.dtype)  # rule: CVT-04
    setattr(made, name, nn.Parameter(rounded, weight.requires_grad))
