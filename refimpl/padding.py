"""Padding of reference convolutions: torch's own pad with zeros whatever the mode, and packed ops take numbers only."""

from __future__ import annotations

from typing import Any

import torch.ao.nn.quantized.reference as nnqr
from torch import Tensor, nn


class _Padded(nn.Module):
    """Pads as the float convolution does."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the weight as quantized; shapes are those of the float module."""
        return self._conv_forward(x, self.get_weight(), self.bias)  # type: ignore[operator, no-any-return]


PaddedConv1d, PaddedConv2d, PaddedConv3d = (
    type(f"Padded{plain.__name__}", (_Padded, plain), {"__module__": __name__})
    for plain in (nnqr.Conv1d, nnqr.Conv2d, nnqr.Conv3d)
)
PLAIN: dict[type, type] = {PaddedConv1d: nnqr.Conv1d, PaddedConv2d: nnqr.Conv2d, PaddedConv3d: nnqr.Conv3d}
_PADDED = {plain: padded for padded, plain in PLAIN.items()}


def settle_padding(module: Any) -> None:
    """Give a reference convolution its float module's padding mode, and numbers for words where both sides agree."""
    if getattr(module, "padding_mode", "zeros") != "zeros" and type(module) in _PADDED:
        module.__class__ = _PADDED[type(module)]
    if isinstance(getattr(module, "padding", None), str):
        ends = module._reversed_padding_repeated_twice
        if ends[::2] == ends[1::2]:
            module.padding = tuple(reversed(ends[::2]))
