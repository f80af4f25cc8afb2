"""Copies and swaps of modules; nothing here changes the module that it is given (rules QAT-01, QAT-02, CUS-01).

A QAT class has ``from_float(module)``, ``to_float()`` and ``weight_fake_quant``, the classes of custom modules
``from_float`` and ``from_observed``. Tensors are shared with the module that is given.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized

from fx_quant_conformance.refimpl.config.fusers import copy_plain, find_computed
from fx_quant_conformance.refimpl.errors import ConfigError, ModelError, blame
from fx_quant_conformance.refimpl.graph.tracing import class_of
from fx_quant_conformance.refimpl.legacy import nni

Model = TypeVar("Model", bound=nn.Module)

_HOOK_DICTS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")


def float_module_of(module: nn.Module, *, where: str) -> nn.Module:
    """Return a QAT module's float module, batch norm folded, in its mode; another module as it is. (QAT-02)

    Raises ConfigError if ``to_float`` fails.
    """
    if not hasattr(module, "weight_fake_quant") or not hasattr(module, "to_float"):
        return module
    with blame(ConfigError, repr(where), f"{type(module).__name__}.to_float"):
        floating: nn.Module = module.to_float()  # type: ignore[operator]  # rule: QAT-02
    return floating.train(module.training)


def make_qat_module(module: nn.Module, qconfig: Any, qat_class: type[nn.Module], *, where: str) -> nn.Module:
    """Return `module`, a float or fused one, as a `qat_class`, on the same device and in the same mode. (QAT-01)

    Its parameters, parametrizations and batch norm statistics are the module's own: training it trains the user's
    model. It gets the hooks too. Raises ModelError for a weight that a hook computes, ConfigError if ``from_float``
    fails.
    """
    layer = root_of(module)
    for name, (hook, remove) in find_computed(layer).items():  # rule: QAT-01
        raise ModelError(
            f"{where!r}: {type(hook).__name__} computes its {name} before each call, which training cannot take over; "
            f"call {remove.__module__}.{remove.__name__}(module, {name!r}) before prepare_qat_fx, or let a "
            "parametrization compute it (torch.nn.utils.parametrize), which is trained"
        )
    plain = put_root(module, copy_plain(layer)) if is_parametrized(layer) else module
    trainable = swap_module(plain, qconfig, qat_class, where=where).train(module.training)  # rule: QAT-01
    norm = getattr(trainable, "bn", None)
    if isinstance(getattr(norm, "weight", None), Tensor) and bool((norm.weight == 0).any()):  # type: ignore[union-attr]
        trainable._enable_slow_path_for_better_numerical_stability = True  # type: ignore[assignment]  # rule: QAT-05
    for name in _HOOK_DICTS:
        getattr(trainable, name).update(getattr(module, name))
    if is_parametrized(layer):
        _parametrize(trainable, layer)
    return trainable.to(next(module.parameters()).device)


def _parametrize(trainable: Any, layer: Any) -> None:
    """Give a QAT module its layer's own parametrizations; torch registers them again, which changes what they hold."""
    parametrize._inject_new_class(trainable)
    for name in layer.parametrizations:
        delattr(trainable, name)
        parametrize._inject_property(trainable, name)
    trainable.parametrizations = layer.parametrizations


def root_of(module: Any) -> Any:
    """Return the layer itself, which is the first part of a fused module."""
    return module[0] if isinstance(module, nni._FusedModule) else module


def put_root(module: nn.Module, layer: nn.Module) -> nn.Module:
    """Return a layer; in the place of a fused module, a copy of that with it as the first part."""
    if root_of(module) is module:
        return layer
    copied: Any = copy_shallow(module)
    copied[0] = layer
    return copied  # type: ignore[no-any-return]


def swap_module(
    module: nn.Module, qconfig: Any, to: type[nn.Module], *, how: str = "from_float", where: str
) -> nn.Module:
    """Return ``to.<how>(module)``, where the module has the QConfig as ``qconfig``. (CUS-01)

    `how` is ``from_float`` in prepare, ``from_observed`` for the custom modules of convert.
    """
    with blame(ConfigError, repr(where), f"{to.__name__}.{how}({class_of(module).__name__})"):
        swapped: nn.Module = getattr(to, how)(add_qconfig(module, qconfig))  # rule: CUS-01
    return swapped


def add_qconfig(module: Model, qconfig: Any) -> Model:
    """Return a copy of a module and its parts, with ``qconfig`` set. Its tensors are shared. (QCM-01)"""
    copied = copy_shallow(module)
    copied._modules |= {name: add_qconfig(part, qconfig) for name, part in copied._modules.items() if part is not None}
    copied.qconfig = qconfig
    return copied


def remove_qconfig(model: Model) -> Model:
    """Put copies without ``qconfig`` in the place of the modules of `model` that have one; return `model`. (CVT-08)

    Only `model` is changed: the modules may be those of a prepared model, which keeps its own.
    """
    model.__dict__.pop("qconfig", None)
    copies: dict[nn.Module, nn.Module] = {}  # one module under two names stays one
    for name, part in model._modules.items():
        if part is not None and any("qconfig" in inner.__dict__ for inner in part.modules()):
            copies[part] = copies[part] if part in copies else remove_qconfig(copy_shallow(part))
            model._modules[name] = copies[part]  # rule: CVT-08
    return model


def copy_shallow(module: Model) -> Model:
    """Copy a module: its own dicts, the same parts in them. copy.copy shares the dicts and refuses parametrizations."""
    copied = type(module).__new__(type(module))
    copied.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()})
    return copied


def copy_module(module: Model) -> Model:
    """Copy a module that holds plain values, with its buffers and parts."""
    copied = copy_shallow(module)
    copied._buffers |= {name: value.clone() for name, value in module._buffers.items() if value is not None}
    copied._modules |= {name: copy_module(part) for name, part in module._modules.items() if part is not None}
    return copied
