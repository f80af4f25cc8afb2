"""QAT modules of fused modules: with batch norm in the weight before that is rounded. (QAT-01, QAT-05)

The scheme is that of Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
Inference", section 3.2, as torch has it. With f = γ / √(running variance + ε), the rounded weight is fq(w · f). What it
gives is divided by f, so that batch norm sees the layer's own output, and computes the statistics of the batch from it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from fx_quant_conformance.refimpl.legacy import fused, qat
from fx_quant_conformance.refimpl.legacy.channels import lay_along
from fx_quant_conformance.refimpl.legacy.taking_over import take_copies, take_over

__all__ = [
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "LinearBn1d",
    "LinearReLU",
    "freeze_bn_stats",
    "update_bn_stats",
]


class _Fused(qat.Trainable, fused._FusedModule):
    """A fused module's root, with its fake-quantized weight; what comes after it is in `forward`."""

    root: ClassVar[Any]
    """The class of the root."""
    deployed: ClassVar[Any] = None
    """The fused class of what `to_float` returns; None: the root alone."""

    @staticmethod
    def find_root(module: Any) -> Any:
        """Return the first part of a fused module."""
        return module[0]

    def to_float(self) -> nn.Module:
        """Return the float module, with copies of the parameters and the batch norm folded."""
        layer = self.fold_norm(take_copies(self.root, self))
        return layer if self.deployed is None else self.deployed(layer, nn.ReLU()).train(self.training)  # type: ignore[no-any-return]

    def fold_norm(self, layer: Any) -> Any:
        """Return the float layer with the batch norm in it."""
        return layer


class LinearReLU(_Fused, nn.Linear):
    """A linear layer and a ReLU."""

    float_class, root, deployed = fused.LinearReLU, nn.Linear, fused.LinearReLU

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(x · wᵀ + b)."""
        return F.relu(F.linear(x, self.read_weight(), self.bias))


class _ConvReLU(_Fused):
    def forward(self, x: Tensor) -> Tensor:
        """Convolve, and clamp at zero."""
        own: Any = self
        return F.relu(own._conv_forward(x, self.read_weight(), own.bias))


class ConvReLU1d(_ConvReLU, nn.Conv1d):
    """A convolution along one axis, and a ReLU."""

    float_class, root, deployed = fused.ConvReLU1d, nn.Conv1d, fused.ConvReLU1d


class ConvReLU2d(_ConvReLU, nn.Conv2d):
    """A convolution along two axes, and a ReLU."""

    float_class, root, deployed = fused.ConvReLU2d, nn.Conv2d, fused.ConvReLU2d


class ConvReLU3d(_ConvReLU, nn.Conv3d):
    """A convolution along three axes, and a ReLU."""

    float_class, root, deployed = fused.ConvReLU3d, nn.Conv3d, fused.ConvReLU3d


class _WithNorm(_Fused):
    """A layer and its batch norm."""

    bn: Any
    bias: Any
    freeze_bn = False
    _enable_slow_path_for_better_numerical_stability = False
    """Whether nothing is divided by f, which is zero where γ is. (QAT-05)"""

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(f"{type(self).__name__} is made by from_float, of a {self.float_class.__name__}")

    def take_norm(self, module: Any) -> None:
        """Take the batch norm, with its parameters and statistics."""
        self.bn = take_over(type(module[1]), module[1])
        self.freeze_bn = False

    def freeze_bn_stats(self) -> Any:
        """Let batch norm use and keep its running statistics, in training too."""
        self.freeze_bn = True
        self.bn.training = False
        return self

    def update_bn_stats(self) -> Any:
        """Let batch norm use the statistics of the batch, and update the running ones."""
        self.freeze_bn = False
        self.bn.training = True
        return self

    def train(self, mode: bool = True) -> Any:
        """Set the mode; frozen batch norm stays in its own."""
        self.training = mode
        for part in self.children():
            if not (self.freeze_bn and part is self.bn):
                part.train(mode)
        return self

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the layer's output for a weight, without bias."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer with its rounded weight, and batch norm."""
        slow = self._enable_slow_path_for_better_numerical_stability
        return self._compute_undivided(x) if slow else self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        factor = self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)
        rounded = self.weight_fake_quant(self.weight * lay_along(factor, 0, self.weight.dim()))
        found = self.compute(x, rounded)
        found = found / lay_along(factor, self._axis(found), found.dim())
        if self.bias is not None:
            found = found + lay_along(self.bias, self._axis(found), found.dim())
        return self.bn(found)  # type: ignore[no-any-return]

    def _compute_undivided(self, x: Tensor) -> Tensor:
        """Return γ · (y − mean) / σ + β, computed as fq(w · f) ⋆ x · running / σ + β − γ · (mean − bias) / σ.

        Mean and deviation σ are the batch's where batch norm trains, else the running ones; ``running`` is that in f.
        The bias is in y: mean − bias is the mean of what the layer gives without it.
        """
        norm = self.bn
        if norm.training:
            plain = self.compute(x, self.weight)
            if self.bias is not None:
                plain = plain + lay_along(self.bias, self._axis(plain), plain.dim())
            others = [axis for axis in range(plain.dim()) if axis != self._axis(plain)]
            mean = plain.mean(others)
            deviation = torch.sqrt(plain.var(others, unbiased=False) + norm.eps)
            norm(plain)  # updates the running statistics
        running = torch.sqrt(norm.running_var + norm.eps)
        if not norm.training:
            mean, deviation = norm.running_mean, running
        rounded = self.weight_fake_quant(self.weight * lay_along(norm.weight / running, 0, self.weight.dim()))
        found = self.compute(x, rounded)
        bias = 0.0 if self.bias is None else self.bias
        shift = norm.bias - norm.weight * (mean - bias) / deviation
        factor, shift = (lay_along(each, self._axis(found), found.dim()) for each in (running / deviation, shift))
        return found * factor + shift

    def _axis(self, found: Tensor) -> int:
        """The axis of the channels in an output."""
        raise NotImplementedError

    def fold_norm(self, layer: Any) -> Any:
        """Return the float layer with the batch norm folded."""
        fuse: Any = fuse_linear_bn_weights if isinstance(layer, nn.Linear) else fuse_conv_bn_weights
        norm = self.bn
        statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        layer.weight, layer.bias = fuse(layer.weight, layer.bias, *statistics)
        return layer


class LinearBn1d(_WithNorm, nn.Linear):
    """A linear layer and its batch norm."""

    float_class, root = fused.LinearBn1d, nn.Linear

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x · wᵀ."""
        return F.linear(x, weight)

    def _axis(self, found: Tensor) -> int:
        return 1


class _ConvBn(_WithNorm):
    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve without bias."""
        own: Any = self
        return own._conv_forward(x, weight, None)  # type: ignore[no-any-return]

    def _axis(self, found: Tensor) -> int:
        return found.dim() - 1 - len(self.kernel_size)  # type: ignore[arg-type]


class _ConvBnReLU(_ConvBn):
    def forward(self, x: Tensor) -> Tensor:
        """Compute the convolution and batch norm, and clamp at zero."""
        return F.relu(super().forward(x))


class ConvBn1d(_ConvBn, nn.Conv1d):
    """A convolution along one axis and its batch norm."""

    float_class, root = fused.ConvBn1d, nn.Conv1d


class ConvBn2d(_ConvBn, nn.Conv2d):
    """A convolution along two axes and its batch norm."""

    float_class, root = fused.ConvBn2d, nn.Conv2d


class ConvBn3d(_ConvBn, nn.Conv3d):
    """A convolution along three axes and its batch norm."""

    float_class, root = fused.ConvBn3d, nn.Conv3d


class ConvBnReLU1d(_ConvBnReLU, nn.Conv1d):
    """A convolution along one axis, its batch norm and a ReLU."""

    float_class, root, deployed = fused.ConvBnReLU1d, nn.Conv1d, fused.ConvReLU1d


class ConvBnReLU2d(_ConvBnReLU, nn.Conv2d):
    """A convolution along two axes, its batch norm and a ReLU."""

    float_class, root, deployed = fused.ConvBnReLU2d, nn.Conv2d, fused.ConvReLU2d


class ConvBnReLU3d(_ConvBnReLU, nn.Conv3d):
    """A convolution along three axes, its batch norm and a ReLU."""

    float_class, root, deployed = fused.ConvBnReLU3d, nn.Conv3d, fused.ConvReLU3d


def freeze_bn_stats(module: nn.Module) -> None:
    """Freeze the statistics of a module with batch norm; leave any other: for ``model.apply``."""
    if isinstance(module, _WithNorm):
        module.freeze_bn_stats()


def update_bn_stats(module: nn.Module) -> None:
    """Let the statistics of a module with batch norm be updated; leave any other: for ``model.apply``."""
    if isinstance(module, _WithNorm):
        module.update_bn_stats()
