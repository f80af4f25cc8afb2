"""Fuser methods: what the modules of a matched pattern become when fused (FUS-02 to FUS-04, FUS-06).

A fuser method is called as ``fuser(is_qat, *modules)``. For a forward-order pattern the modules come in
forward order; for a complex one nested as the pattern is, ``(is_qat, relu, (add, (bn, conv), extra))``,
where functions stand for themselves. F.relu has been replaced by an ``nn.ReLU`` before (FUS-05).

The folding is the definition of batch norm in eval mode: with scale = weight / sqrt(variance + eps), the
weights of output channel o are multiplied by scale[o], and its bias b becomes (b - mean[o]) * scale[o] +
bias[o]. The arithmetic is torch's own, in its order, so that folded weights are the same bit for bit
wherever torch's folding is right. Every callable here, and every partial made of one, can be deep-copied
and pickled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.ao.nn.intrinsic as nni
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from refimpl.errors import ConfigError, ModelError
from refimpl.patterns import Pattern, is_match_all

FuserMethod: TypeAlias = Callable[..., nn.Module]
Branch: TypeAlias = nn.Module | tuple[nn.Module, nn.Module]
_ConvT = TypeVar("_ConvT", bound=_ConvNd)
_LayerT = TypeVar("_LayerT", bound=nn.Module)

# The fused classes by the class of the layer. In QAT batch norm stays a module until convert (QAT-02).
_CONV_BN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvBn1d,
    nn.Conv2d: nni.ConvBn2d,
    nn.Conv3d: nni.ConvBn3d,
}
_CONV_BN_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvBnReLU1d,
    nn.Conv2d: nni.ConvBnReLU2d,
    nn.Conv3d: nni.ConvBnReLU3d,
}
_CONV_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvReLU1d,
    nn.Conv2d: nni.ConvReLU2d,
    nn.Conv3d: nni.ConvReLU3d,
}
_LINEAR_BN: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: nni.LinearBn1d}
_LINEAR_LEAKY_RELU: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: nni.LinearLeakyReLU}


# ---- folding ----------------------------------------------------------------------------------------------


class _BnStatistics(NamedTuple):
    """Batch norm in eval mode, one value per output channel, in the order of torch's folding functions."""

    mean: Tensor
    variance: Tensor
    eps: float
    weight: Tensor
    bias: Tensor


def fold_conv_bn(conv: _ConvT, bn: _BatchNorm) -> _ConvT:
    """Return a copy of the convolution with the batch norm folded into it. (FUS-06)

    Transposed ones too, with any number of groups; torch's folding of those is right for one group only.
    Raises ModelError in train mode, for a batch norm without running statistics, or one of another width.
    """
    statistics = _statistics(conv, bn, conv.out_channels)
    fused = _plain_copy(conv)
    out_first = _channels_out_first(fused.weight, fused)
    weight, bias = fuse_conv_bn_weights(out_first, fused.bias, *statistics)
    fused.weight, fused.bias = _channels_back(weight, fused), bias
    return fused


def fold_linear_bn(linear: nn.Linear, bn: _BatchNorm) -> nn.Linear:
    """Return a copy of the linear layer with the batch norm folded into it. (FUS-06)

    A batch norm that is not affine, or has a single feature, is folded as well. The result stands for both
    modules only where `linear_bn_is_foldable` holds: the caller, who knows the shapes, asks that first.
    Raises ModelError in train mode, for a batch norm without running statistics, or one of another width.
    """
    statistics = _statistics(linear, bn, linear.out_features)
    fused = _plain_copy(linear)
    fused.weight, fused.bias = fuse_linear_bn_weights(fused.weight, fused.bias, *statistics)
    return fused


def linear_bn_is_foldable(bn: _BatchNorm, output_rank: int) -> bool:
    """Tell whether the batch norm scales the last axis of a linear layer's output of that rank. (FUS-06)

    ``BatchNorm1d`` normalises axis 1: the last axis of an output of rank 2, but not of rank 3. With a single
    feature every element has the same statistics, so that the axis does not matter.
    """
    return output_rank == 2 or bn.num_features == 1


def _statistics(layer: nn.Module, bn: _BatchNorm, channels: int) -> _BnStatistics:
    """Read the batch norm for `channels` outputs; raise ModelError where it cannot be folded."""
    if layer.training or bn.training:  # rule: FUS-06
        raise ModelError(f"{_names(layer, bn)}: batch norm is folded in eval mode only; call model.eval() first")
    _check_width(layer, bn, channels, one_is_enough=isinstance(layer, nn.Linear))
    mean, variance = bn.running_mean, bn.running_var
    if mean is None or variance is None:
        raise ModelError(
            f"{_names(layer, bn)}: folding needs running statistics; found track_running_stats={bn.track_running_stats}"
        )
    weight: Tensor | None = bn.weight
    bias: Tensor | None = bn.bias
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    mean, variance, weight, bias = (value.expand(channels) for value in (mean, variance, weight, bias))
    return _BnStatistics(mean, variance, bn.eps, weight, bias)


def _plain_copy(layer: _LayerT) -> _LayerT:
    """Copy a layer; a parametrized weight becomes the plain one that it stands for: folding replaces it.

    Not by ``remove_parametrizations``, which changes the class that a copy has in common with its original.
    """
    fused = copy.deepcopy(layer)
    if is_parametrized(fused):
        names = [name for name, _ in fused.get_submodule("parametrizations").named_children()]
        values = {name: getattr(fused, name).detach() for name in names}
        fused.__class__ = type_before_parametrizations(fused)
        del fused.parametrizations
        for name, value in values.items():
            fused.register_parameter(name, nn.Parameter(value))
    return fused


def _channels_out_first(weight: Tensor, conv: _ConvNd) -> Tensor:
    """View a weight with one row per output channel. A transposed one is stored (in, out / groups, …)."""
    if not isinstance(conv, _ConvTransposeNd):
        return weight
    return _swapped_in_groups(weight, conv.groups)


def _channels_back(weight: nn.Parameter, conv: _ConvNd) -> nn.Parameter:
    """Undo `_channels_out_first`."""
    if not isinstance(conv, _ConvTransposeNd):
        return weight
    return nn.Parameter(_swapped_in_groups(weight.detach(), conv.groups), weight.requires_grad)


def _swapped_in_groups(weight: Tensor, groups: int) -> Tensor:
    """Turn (groups * a, b, ...) into (groups * b, a, ...); it is its own inverse."""
    rows, columns, *kernel = weight.shape
    by_group = weight.reshape(groups, rows // groups, columns, *kernel).transpose(1, 2)
    return by_group.reshape(groups * columns, rows // groups, *kernel).contiguous()


# ---- checks -----------------------------------------------------------------------------------------------


def _names(*modules: object) -> str:
    return " + ".join(type(module).__name__ for module in modules)


def _is_bn(layer: nn.Module, bn: nn.Module) -> _BatchNorm:
    """Return the second module; raise ConfigError unless it is a batch norm."""
    if not isinstance(bn, _BatchNorm):
        raise ConfigError(f"{_names(layer, bn)}: expected a batch norm as second module, found {type(bn).__name__}")
    return bn


def _check_same_mode(*modules: nn.Module) -> None:
    """Raise ModelError unless all modules are in train mode, or all in eval mode. (FUS-06)"""
    if len({module.training for module in modules}) > 1:  # rule: FUS-06
        modes = ", ".join(f"{type(m).__name__}: {'train' if m.training else 'eval'}" for m in modules)
        raise ModelError(f"modules to fuse must all be in train mode or all in eval mode; found {modes}")


def _check_width(layer: nn.Module, bn: _BatchNorm, channels: int, *, one_is_enough: bool = False) -> None:
    """Raise ModelError unless the batch norm has one feature per output channel."""
    if bn.num_features == channels or (one_is_enough and bn.num_features == 1):
        return
    raise ModelError(
        f"{_names(layer, bn)}: the batch norm needs num_features={channels}, one per output; found {bn.num_features}"
    )


def _check_qat_bn(layer: nn.Module, bn: _BatchNorm, channels: int) -> None:
    """Raise ModelError for a batch norm that the fused QAT modules cannot hold. (FUS-06)"""
    _check_width(layer, bn, channels)
    for name in ("affine", "track_running_stats"):
        if not getattr(bn, name):
            raise ModelError(f"{_names(layer, bn)}: fusing for QAT needs a batch norm with {name}=True; found False")


def _class_for(table: dict[type[nn.Module], type[nn.Module]], what: str, *modules: nn.Module) -> type[nn.Module]:
    """Look the first module's class up; raise ConfigError, naming the known ones, if it is not there."""
    found = table.get(type_before_parametrizations(modules[0]))
    if found is None:
        known = ", ".join(key.__name__ for key in table)
        raise ConfigError(f"cannot fuse {_names(*modules)} {what}: expected one of {known} first")
    return found


def _assemble(fused: Callable[..., nn.Module], *parts: Any) -> nn.Module:
    """Make the fused module, in the mode of its first part. Raises ConfigError if its class refuses."""
    try:
        module = fused(*parts)
    except (AssertionError, TypeError) as refusal:
        raise ConfigError(f"{getattr(fused, '__name__', fused)} cannot hold {_names(*parts)}: {refusal}") from refusal
    module.training = parts[0].training  # rule: FUS-06
    return module


# ---- fuser methods of forward-order patterns --------------------------------------------------------------


def _assemble_in_order(fused: Callable[..., nn.Module], is_qat: bool, *modules: nn.Module) -> nn.Module:
    return _assemble(fused, *modules)


def sequential(fused: Callable[..., nn.Module]) -> FuserMethod:
    """Return the fuser method that only puts the modules, in order, into the class `fused`. (FUS-02)

    It raises ConfigError if the class refuses them.
    """
    return partial(_assemble_in_order, fused)


def fuse_conv_bn(is_qat: bool, conv: nn.Module, bn: nn.Module) -> nn.Module:
    """Fold the batch norm into the convolution; for QAT keep both in an ``nni.ConvBn``. (FUS-02, FUS-06)

    Raises ModelError for modes that differ or a batch norm that does not fit, ConfigError for another class.
    """
    _check_same_mode(conv, bn)
    if not is_qat:
        return fold_conv_bn(*_conv_and_bn(conv, bn))
    fused = _class_for(_CONV_BN, "for QAT", conv, bn)
    layer, norm = _conv_and_bn(conv, bn)
    _check_qat_bn(layer, norm, layer.out_channels)
    return _assemble(fused, conv, bn)


def fuse_conv_bn_relu(is_qat: bool, conv: nn.Module, bn: nn.Module, relu: nn.Module) -> nn.Module:
    """Fold the batch norm and make an ``nni.ConvReLU``; for QAT make an ``nni.ConvBnReLU``. (FUS-02, FUS-06)

    Raises ModelError for modes that differ or a batch norm that does not fit, ConfigError for another class.
    """
    _check_same_mode(conv, bn, relu)
    if not is_qat:
        fused = _class_for(_CONV_RELU, "in eval mode", conv, bn, relu)
        return _assemble(fused, fold_conv_bn(*_conv_and_bn(conv, bn)), relu)
    fused = _class_for(_CONV_BN_RELU, "for QAT", conv, bn, relu)
    layer, norm = _conv_and_bn(conv, bn)
    _check_qat_bn(layer, norm, layer.out_channels)
    return _assemble(fused, conv, bn, relu)


def fuse_linear_bn(is_qat: bool, linear: nn.Module, bn: nn.Module) -> nn.Module:
    """Fold the batch norm into the linear layer; for QAT make an ``nni.LinearBn1d``. (FUS-02, FUS-06)

    Right for inputs of rank 2 (`linear_bn_is_foldable`). Raises ModelError for modes that differ or a batch
    norm that does not fit, ConfigError for another class.
    """
    _check_same_mode(linear, bn)
    if not is_qat:
        return fold_linear_bn(*_linear_and_bn(linear, bn))
    fused = _class_for(_LINEAR_BN, "for QAT", linear, bn)
    layer, norm = _linear_and_bn(linear, bn)
    _check_qat_bn(layer, norm, layer.out_features)
    return _assemble(fused, linear, bn)


def fuse_convtranspose_bn(is_qat: bool, conv: nn.Module, bn: nn.Module) -> nn.Module:
    """Fold the batch norm into the transposed convolution, for any number of groups. (FUS-02, FUS-06)

    Raises ConfigError for QAT, for which there is no fused class, and ModelError as `fold_conv_bn` does.
    """
    _check_same_mode(conv, bn)
    if is_qat:
        raise ConfigError(f"cannot fuse {_names(conv, bn)} for QAT: there is no fused class for it")
    return fold_conv_bn(*_conv_and_bn(conv, bn))


def fuse_linear_bn_leaky_relu(is_qat: bool, linear: nn.Module, bn: nn.Module, leaky_relu: nn.Module) -> nn.Module:
    """Fold the batch norm and make an ``nni.LinearLeakyReLU``. (FUS-02, FUS-06)

    Raises ConfigError for QAT, for which there is no fused class, and otherwise as `fuse_linear_bn` does.
    """
    _check_same_mode(linear, bn, leaky_relu)
    if is_qat:
        raise ConfigError(f"cannot fuse {_names(linear, bn, leaky_relu)} for QAT: there is no fused class for it")
    fused = _class_for(_LINEAR_LEAKY_RELU, "in eval mode", linear, bn, leaky_relu)
    return _assemble(fused, fold_linear_bn(*_linear_and_bn(linear, bn)), leaky_relu)


def _conv_and_bn(conv: nn.Module, bn: nn.Module) -> tuple[_ConvNd, _BatchNorm]:
    """Return both with their types; raise ConfigError if they are something else."""
    if not isinstance(conv, _ConvNd):
        raise ConfigError(f"cannot fuse {_names(conv, bn)}: expected a convolution first")
    return conv, _is_bn(conv, bn)


def _linear_and_bn(linear: nn.Module, bn: nn.Module) -> tuple[nn.Linear, _BatchNorm]:
    """Return both with their types; raise ConfigError if they are something else."""
    if not isinstance(linear, nn.Linear):
        raise ConfigError(f"cannot fuse {_names(linear, bn)}: expected a Linear first")
    return linear, _is_bn(linear, bn)


# ---- fuser methods and getters of complex patterns --------------------------------------------------------


def _fuse_add(side: int, is_qat: bool, add: Any, *branches: Any) -> nn.Module:
    return _assemble(nni.ConvAdd2d, _folded_branch(is_qat, branches[side]), add)


def _fuse_add_relu(side: int, is_qat: bool, relu: nn.Module, add_pattern: tuple[Any, ...]) -> nn.Module:
    add, *branches = add_pattern
    return _assemble(nni.ConvAddReLU2d, _folded_branch(is_qat, branches[side]), add, relu)


def _folded_branch(is_qat: bool, branch: Branch) -> nn.Module:
    """Return the convolution of a branch ``conv`` or ``(bn, conv)``, the batch norm folded."""
    if isinstance(branch, nn.Module):
        return branch
    if not isinstance(branch, tuple):
        raise ConfigError(f"cannot fuse with an addition: expected a convolution, found {branch!r}")
    bn, conv = branch
    if is_qat:
        raise ConfigError(f"cannot fuse {_names(conv, bn)} with an addition for QAT: there is no fused class for it")
    return fold_conv_bn(*_conv_and_bn(conv, bn))


def conv_add(*, conv_side: int, relu: bool) -> FuserMethod:
    """Return the fuser of ``(add, left, right)``, or of ``(relu, (add, left, right))``. (FUS-02, FUS-04)

    `conv_side`, 0 or 1, tells which operand is ``conv`` or ``(bn, conv)``; the other becomes an extra input.
    It raises ConfigError for a batch norm in QAT, and otherwise as `fold_conv_bn` does.
    """
    return partial(_fuse_add_relu if relu else _fuse_add, conv_side)


def root_node_getter(pattern: Pattern) -> Callable[[Any], Any]:
    """Return the getter of a complex pattern's root: its first leaf in forward order. (FUS-03)"""
    # A wildcard is never the root: it stands for another node's result.
    return partial(_at, next(path for path, leaf in _paths(pattern) if not is_match_all(leaf)))


def extra_inputs_getter(pattern: Pattern) -> Callable[[Any], list[Any]]:
    """Return the getter for what a complex pattern's wildcards caught, in forward order. (FUS-04)"""
    return partial(_all_at, tuple(path for path, leaf in _paths(pattern) if is_match_all(leaf)))


def _paths(pattern: Pattern, here: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], object]]:
    """Yield the leaves of a normal form with their index paths, arguments before the op that takes them."""
    if not isinstance(pattern, tuple):
        yield here, pattern
        return
    for index in (*range(1, len(pattern)), 0):
        yield from _paths(pattern[index], (*here, index))


def _at(path: tuple[int, ...], matched: Any) -> Any:
    for index in path:
        matched = matched[index]
    return matched


def _all_at(paths: tuple[tuple[int, ...], ...], matched: Any) -> list[Any]:
    return [_at(path, matched) for path in paths]
