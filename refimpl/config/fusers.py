"""Fuser methods: what the modules of a matched pattern become when fused (FUS-02 to FUS-04, FUS-06).

A fuser method is called as ``fuser(is_qat, *modules)``. For a forward-order pattern the modules come in forward order;
for a complex one nested as the pattern is, ``(is_qat, relu, (add, (bn, conv), extra))``, where functions stand for
themselves. F.relu was replaced by an ``nn.ReLU`` before (FUS-05).

The folding is the definition of batch norm in eval mode: with scale = weight / sqrt(variance + eps), the weights of
output channel o are multiplied by scale[o], and its bias b becomes (b - mean[o]) * scale[o] + bias[o]. The arithmetic
is torch's, in its order: folded weights have the same bits wherever torch's folding is right. Every callable here, and
every partial of one, can be deep-copied and pickled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import prune
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from fx_quant_conformance.refimpl.errors import ConfigError, ModelError
from fx_quant_conformance.refimpl.legacy import nni

FuserMethod: TypeAlias = Callable[..., nn.Module]
_LayerT = TypeVar("_LayerT", bound=_ConvNd | nn.Linear)

# Hooks that compute a weight before each call, with the attribute that names it; torch's function that ends it.
_REMOVERS: dict[tuple[type, str], Callable[..., Any]] = {
    (prune.BasePruningMethod, "_tensor_name"): prune.remove,
    (WeightNorm, "name"): remove_weight_norm,
    (SpectralNorm, "name"): remove_spectral_norm,
}


def _conv_bn(d: int) -> tuple[type[nn.Module], ...]:
    return getattr(nn, f"Conv{d}d"), getattr(nn, f"BatchNorm{d}d")


# The fused class by the classes of the parts. In QAT batch norm stays a part until convert (QAT-02).
_FUSED: dict[tuple[type[nn.Module], ...], type[nn.Module]] = {
    **{(getattr(nn, f"Conv{d}d"), nn.ReLU): getattr(nni, f"ConvReLU{d}d") for d in (1, 2, 3)},
    **{_conv_bn(d): getattr(nni, f"ConvBn{d}d") for d in (1, 2, 3)},
    **{(*_conv_bn(d), nn.ReLU): getattr(nni, f"ConvBnReLU{d}d") for d in (1, 2, 3)},
    (nn.Linear, nn.BatchNorm1d): nni.LinearBn1d,
    (nn.Linear, nn.LeakyReLU): nni.LinearLeakyReLU,
}


def fold_bn(layer: _LayerT, bn: _BatchNorm) -> _LayerT:
    """Return a copy of a convolution or a linear layer with the batch norm folded into it. (FUS-06)

    Transposed convolutions too, with any number of groups; torch's folding of those is right only for one group. After
    a linear layer the batch norm may be without parameters, or have a single feature; the result replaces both only
    where `linear_bn_is_foldable` holds: the caller, who knows the shapes, asks that first.
    Raises ModelError in train mode, for a batch norm without running statistics, or one of another width.
    """
    statistics = _read_statistics(layer, bn)
    fused = copy_plain(layer)
    fold = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
    weight, fused.bias = fold(_by_output_channel(fused.weight, layer), fused.bias, *statistics)
    fused.weight = nn.Parameter(_by_output_channel(weight.detach(), layer), weight.requires_grad)
    return fused


def linear_bn_is_foldable(bn: _BatchNorm, output_rank: int) -> bool:
    """Tell whether the batch norm scales the last axis of a linear layer's output of that rank. (FUS-06)

    ``BatchNorm1d`` normalises axis 1: the last axis of an output of rank 2, but not of rank 3. With a single feature
    every element has the same statistics, and the axis does not matter.
    """
    return output_rank == 2 or bn.num_features == 1


def _read_statistics(layer: _LayerT, bn: _BatchNorm) -> tuple[Tensor, Tensor, float, Tensor, Tensor]:
    """Return mean, variance, eps, weight, bias, one value per output; ModelError where they cannot be folded."""
    if layer.training or bn.training:  # rule: FUS-06
        raise ModelError(f"{names_of(layer, bn)}: batch norm is folded in eval mode only; call model.eval() first")
    _check_width(layer, bn, one_is_enough=isinstance(layer, nn.Linear))
    mean, variance = bn.running_mean, bn.running_var
    if mean is None or variance is None:
        flag = f"track_running_stats={bn.track_running_stats}"
        raise ModelError(f"{names_of(layer, bn)}: folding needs running statistics; found {flag}")
    weight: Tensor = torch.ones_like(mean) if bn.weight is None else bn.weight
    bias: Tensor = torch.zeros_like(mean) if bn.bias is None else bn.bias
    mean, variance, weight, bias = (value.expand(_width_of(layer)) for value in (mean, variance, weight, bias))
    return mean, variance, bn.eps, weight, bias


def find_computed(layer: nn.Module) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Find the weights that a hook computes before each call: by name, the hook and torch's function that ends it."""
    found: dict[str, tuple[Any, Callable[..., Any]]] = {}
    for hook in layer._forward_pre_hooks.values():
        for (kind, name), remove in _REMOVERS.items():
            if isinstance(hook, kind):
                found[getattr(hook, name)] = hook, remove
    return found


def copy_plain(layer: _LayerT) -> _LayerT:
    """Copy a layer and share its parameters, which folding replaces; one that is computed becomes a plain one.

    It may be pruned, or parametrized: ``remove_parametrizations`` would change the class, which a copy has in common
    with its original.
    """
    computed = find_computed(layer)
    memo: dict[int, Any] = {id(value): value for value in layer._parameters.values()}
    if computed:  # ending a pruning writes into the parameters, and deepcopy refuses what was computed
        memo = {id(value): value.detach() for value in vars(layer).values() if isinstance(value, Tensor)}
    fused = copy.deepcopy(layer, memo)
    for name, (_, remove) in computed.items():
        remove(fused, name)
    if is_parametrized(fused):
        parametrized = fused.get_submodule("parametrizations").named_children()
        values = {name: getattr(fused, name).detach() for name, _ in parametrized}
        fused.__class__ = type_before_parametrizations(fused)
        del fused.parametrizations
        for name, value in values.items():
            fused.register_parameter(name, nn.Parameter(value))
    return fused


def _by_output_channel(weight: Tensor, layer: nn.Module) -> Tensor:
    """Turn a weight into one row per output channel, or back. A transposed convolution's is (in, out / groups, …).

    (groups * a, b, …) becomes (groups * b, a, …), which is its own inverse.
    """
    if not isinstance(layer, _ConvTransposeNd):
        return weight
    rows, columns, *kernel = weight.shape
    by_group = weight.reshape(layer.groups, rows // layer.groups, columns, *kernel).transpose(1, 2)
    return by_group.reshape(layer.groups * columns, rows // layer.groups, *kernel).contiguous()


def names_of(*modules: object) -> str:
    """Return the class names of modules, joined by `` + ``, for errors."""
    return " + ".join(type(module).__name__ for module in modules)


def _width_of(layer: nn.Module) -> int:
    return layer.out_channels if isinstance(layer, _ConvNd) else int(layer.out_features)  # type: ignore[arg-type]


def _check_same_mode(*modules: nn.Module) -> None:
    """Raise ModelError unless all modules are in train mode, or all in eval mode. (FUS-06)"""
    if len({module.training for module in modules}) > 1:  # rule: FUS-06
        modes = ", ".join(f"{type(m).__name__}: {'train' if m.training else 'eval'}" for m in modules)
        raise ModelError(f"modules to fuse must all be in train mode or all in eval mode; found {modes}")


def _check_width(layer: nn.Module, bn: _BatchNorm, *, one_is_enough: bool = False) -> None:
    """Raise ModelError unless the batch norm has one feature per output of the layer."""
    width, features = _width_of(layer), bn.num_features
    if features != width and not (one_is_enough and features == 1):
        message = f"the batch norm needs num_features={width}, one per output; found {features}"
        raise ModelError(f"{names_of(layer, bn)}: {message}")


def assemble(fused: Callable[..., nn.Module], is_qat: bool, *parts: Any) -> nn.Module:
    """Make the fused module, in the mode of its first part. Raises ConfigError if its class refuses."""
    try:
        module = fused(*parts)
    except (AssertionError, TypeError) as refusal:
        raise ConfigError(f"{getattr(fused, '__name__', fused)} cannot hold {names_of(*parts)}: {refusal}") from refusal
    module.training = parts[0].training  # rule: FUS-06
    return module


def sequential(fused: Callable[..., nn.Module]) -> FuserMethod:
    """Return the fuser method that puts the modules, in order, into `fused`; ConfigError if it refuses. (FUS-02)"""
    return partial(assemble, fused)


def fuse_bn(is_qat: bool, layer: nn.Module, bn: nn.Module, *after: nn.Module) -> nn.Module:
    """Fold the batch norm into the layer before it; for QAT keep both, in a fused module. (FUS-02, FUS-06)

    `after`: the activation that follows, if the pattern has one; it becomes a part of the fused module.
    Raises ModelError for modes that differ or a batch norm that does not fit, ConfigError for other classes, or without
    a fused class: for transposed convolutions and LeakyReLU in QAT.
    """
    _check_same_mode(layer, bn, *after)
    if not isinstance(layer, (_ConvNd, nn.Linear)) or not isinstance(bn, _BatchNorm):
        raise ConfigError(f"cannot fuse {names_of(layer, bn)}: expected a convolution or a Linear, then a batch norm")
    parts = (layer, bn, *after) if is_qat else (fold_bn(layer, bn), *after)
    if len(parts) == 1:
        return parts[0]
    fused = _FUSED.get(tuple(type_before_parametrizations(part) for part in parts))
    if fused is None:
        mode = "for QAT" if is_qat else "in eval mode"
        raise ConfigError(f"cannot fuse {names_of(layer, bn, *after)} {mode}: there is no fused class for it")
    if is_qat:
        _check_width(layer, bn)
        for name in ("affine", "track_running_stats"):
            if not getattr(bn, name):  # which the fused QAT modules need
                text = f"fusing for QAT needs a batch norm with {name}=True; found False"
                raise ModelError(f"{names_of(layer, bn)}: {text}")
    return assemble(fused, is_qat, *parts)
