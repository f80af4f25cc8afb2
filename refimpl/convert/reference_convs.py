"""Reference convolutions where torch's own fail: they pad with zeros whatever the mode, and raise for `output_size`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fx_quant_conformance.refimpl.legacy import nnqr


class _Padded(nn.Module):
    """Pads as the float convolution does."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the weight as quantized; shapes are those of the float module."""
        return self._conv_forward(x, self.get_weight(), self.bias)  # type: ignore[operator, no-any-return]


class _Sized(nn.Module):
    """Takes the wanted size of its output, of all spatial axes, as the float transposed convolution does."""

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Any:
        """Convolve with the weight as quantized; shapes are those of the float module."""
        own: Any = self
        geometry = (own.stride, own.padding, own.kernel_size, len(own.kernel_size), own.dilation)
        padding = own._output_padding(x, output_size, *geometry)
        convolve: Any = getattr(torch, f"conv_transpose{len(own.kernel_size)}d")
        return convolve(x, own.get_weight(), own.bias, own.stride, own.padding, padding, own.groups, own.dilation)


_PLAIN = {
    _Padded: (nnqr.Conv1d, nnqr.Conv2d, nnqr.Conv3d),
    _Sized: (nnqr.ConvTranspose1d, nnqr.ConvTranspose2d, nnqr.ConvTranspose3d),
}
_OURS: dict[type, type] = {
    plain: type(f"{base.__name__[1:]}{plain.__name__}", (base, plain), {"__module__": __name__})
    for base, plains in _PLAIN.items()
    for plain in plains
}
globals().update({ours.__name__: ours for ours in _OURS.values()})  # where pickle looks for them
PLAIN: dict[type, type] = {ours: plain for plain, ours in _OURS.items()}


def settle_size(module: Any, call: Node) -> None:
    """Let a reference transposed convolution take an `output_size`, if the call has one."""
    output_size = call.args[1] if len(call.args) > 1 else call.kwargs.get("output_size")
    if output_size is not None and type(module) in _PLAIN[_Sized]:
        module.__class__ = _OURS[type(module)]


def settle_padding(module: Any) -> None:
    """Give a reference convolution its float module's padding mode, and numbers for a word if both sides agree."""
    if getattr(module, "padding_mode", "zeros") != "zeros" and type(module) in _PLAIN[_Padded]:
        module.__class__ = _OURS[type(module)]
    if isinstance(getattr(module, "padding", None), str):
        ends = module._reversed_padding_repeated_twice
        if ends[::2] == ends[1::2]:
            module.padding = tuple(reversed(ends[::2]))
