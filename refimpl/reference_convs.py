"""Reference convolutions where torch's own fail: they pad with zeros whatever the mode, and raise for `output_size`.

And packed ops take padding as numbers only. (CVT-02)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn
from torch.fx import Node


class _Padded(nn.Module):
    """Pads as the float convolution does."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the weight as quantized; shapes are those of the float module."""
        return self._conv_forward(x, self.get_weight(), self.bias)  # type: ignore[operator, no-any-return]


PaddedConv1d, PaddedConv2d, PaddedConv3d = (
    type(f"Padded{plain.__name__}", (_Padded, plain), {"__module__": __name__})
    for plain in (nnqr.Conv1d, nnqr.Conv2d, nnqr.Conv3d)
)
_PADDED: dict[type, type] = {nnqr.Conv1d: PaddedConv1d, nnqr.Conv2d: PaddedConv2d, nnqr.Conv3d: PaddedConv3d}


class _Sized(nn.Module):
    """Takes the size that its output is to have, as the float transposed convolution does."""

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Convolve with the weight as quantized; `output_size` has an entry for each spatial axis, or for all axes."""
        module: Any = self
        rank = len(module.kernel_size)
        size = None if output_size is None else list(output_size)
        lengths = (list(each) for each in (module.stride, module.padding, module.kernel_size))
        beyond = module._output_padding(x, size, *lengths, rank, list(module.dilation))
        convolve: Any = getattr(torch, f"conv_transpose{rank}d")
        found: Tensor = convolve(
            x, module.get_weight(), module.bias, module.stride, module.padding, beyond, module.groups, module.dilation
        )
        return found


SizedConvTranspose1d, SizedConvTranspose2d, SizedConvTranspose3d = (
    type(f"Sized{plain.__name__}", (_Sized, plain), {"__module__": __name__})
    for plain in (nnqr.ConvTranspose1d, nnqr.ConvTranspose2d, nnqr.ConvTranspose3d)
)
_SIZED: dict[type, type] = {
    nnqr.ConvTranspose1d: SizedConvTranspose1d,
    nnqr.ConvTranspose2d: SizedConvTranspose2d,
    nnqr.ConvTranspose3d: SizedConvTranspose3d,
}

PLAIN: dict[type, type] = {ours: plain for plain, ours in (_PADDED | _SIZED).items()}
"""The class of torch's that each of these stands for."""


def settle_size(module: Any, call: Node) -> None:
    """Let a reference transposed convolution take an `output_size`, where a call gives one."""
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("output_size")
    if type(module) in _SIZED and given is not None:
        module.__class__ = _SIZED[type(module)]


def is_sized(module: nn.Module) -> bool:
    """Tell whether some call of a reference transposed convolution gives the size of its output."""
    return isinstance(module, _Sized)


def settle_padding(module: Any) -> None:
    """Give a reference convolution its float module's padding mode, and numbers for words where both sides agree."""
    if getattr(module, "padding_mode", "zeros") != "zeros" and type(module) in _PADDED:
        module.__class__ = _PADDED[type(module)]
    if isinstance(getattr(module, "padding", None), str):
        ends = module._reversed_padding_repeated_twice
        if ends[::2] == ends[1::2]:
            module.padding = tuple(reversed(ends[::2]))
