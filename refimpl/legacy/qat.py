"""QAT modules: layers that compute with their weight rounded to its grid, while the weight itself is trained. (QAT-01)

Each is made by ``from_float`` of a module that has a ``qconfig``: it shares that one's parameters, and its
``weight_fake_quant`` is the QConfig's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.refimpl.legacy.tables import LooksUp, SumsBags
from fx_quant_conformance.refimpl.legacy.taking_over import take_copies, take_over

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Embedding", "EmbeddingBag", "Linear"]


class Trainable(nn.Module):
    """A layer with a fake-quantized weight."""

    float_class: ClassVar[Any]
    """The class that `from_float` takes, and that `to_float` returns."""
    weight: Tensor
    weight_fake_quant: Any

    def __init__(self, *args: Any, qconfig: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.set_qconfig(qconfig)

    def set_qconfig(self, qconfig: Any) -> None:
        """Take the weight's fake quantize of a QConfig. Raises TypeError without one."""
        if qconfig is None:
            raise TypeError(f"{type(self).__name__} needs a qconfig, whose weight() is the weight's fake quantize")
        self.qconfig = qconfig
        self.weight_fake_quant = qconfig.weight().to(self.weight.device)

    @classmethod
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Any:
        """Return the QAT module of a float or fused module that has a ``qconfig``; they share their parameters.

        ``use_precomputed_fake_quant``: not used. Raises TypeError for another class, or without a QConfig.
        """
        if not isinstance(module, cls.float_class):
            raise TypeError(
                f"{cls.__name__}.from_float takes {cls.float_class.__name__}, found {type(module).__name__}"
            )
        made = take_over(cls, cls.find_root(module))
        made.take_norm(module)
        made.set_qconfig(getattr(module, "qconfig", None))
        return made

    @staticmethod
    def find_root(module: Any) -> Any:
        """Return the layer of what `from_float` takes."""
        return module

    def take_norm(self, module: Any) -> None:
        """Take a fused module's batch norm, if it has one."""

    def to_float(self) -> Any:
        """Return the float module, with copies of the parameters."""
        return take_copies(self.float_class, self)

    def read_weight(self) -> Tensor:
        """Return the weight as it is computed with."""
        return self.weight_fake_quant(self.weight)  # type: ignore[no-any-return]


class Linear(Trainable, nn.Linear):
    """A linear layer."""

    float_class = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Return x · wᵀ + b, of shape (…, out_features)."""
        return F.linear(x, self.read_weight(), self.bias)


class _Convolution(Trainable):
    def forward(self, x: Tensor) -> Tensor:
        """Convolve, as the float layer does."""
        own: Any = self
        return own._conv_forward(x, self.read_weight(), own.bias)  # type: ignore[no-any-return]


class Conv1d(_Convolution, nn.Conv1d):
    """A convolution along one axis."""

    float_class = nn.Conv1d


class Conv2d(_Convolution, nn.Conv2d):
    """A convolution along two axes."""

    float_class = nn.Conv2d


class Conv3d(_Convolution, nn.Conv3d):
    """A convolution along three axes."""

    float_class = nn.Conv3d


class _Table(Trainable):
    """A table of rows, each with a scale and a real zero point of its own."""

    def set_qconfig(self, qconfig: Any) -> None:
        """Take the weight's fake quantize. Raises TypeError for one of another scheme."""
        super().set_qconfig(qconfig)
        found = self.weight_fake_quant.qscheme
        if found is not torch.per_channel_affine_float_qparams:
            wanted = torch.per_channel_affine_float_qparams
            raise TypeError(f"{type(self).__name__} needs a fake quantize of scheme {wanted}, found {found}")

    def read_rows(self) -> Tensor:
        """Return the rows as they are looked up."""
        return self.read_weight()


class Embedding(LooksUp, _Table, nn.Embedding):
    """A table whose rows are looked up."""

    float_class = nn.Embedding


class EmbeddingBag(SumsBags, _Table, nn.EmbeddingBag):
    """A table whose rows are looked up and reduced, bag by bag."""

    float_class = nn.EmbeddingBag
