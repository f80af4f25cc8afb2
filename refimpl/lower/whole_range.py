"""Dynamic linear modules that quantize their input to 8 bits on every engine (rules LOW-02, LOW-03).

Torch's take 7 bits, whose products sum without saturating in 16 bits, on every engine but qnnpack. Names, weights and
state dict are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.nn.intrinsic.quantized.dynamic as nniqd
import torch.ao.nn.quantized.dynamic as nnqd
from torch import Tensor


class WholeRangeLinear(nnqd.Linear):
    """A dynamic linear layer: float in, float out, its input quantized to the whole range of quint8. (LOW-02)"""

    def forward(self, x: Tensor) -> Any:
        """Return the float result, (…, out_features), of an input (…, in_features)."""
        packed = self._packed_params._packed_params
        return torch.ops.quantized.linear_dynamic(x, packed, reduce_range=False).to(x.dtype)


class WholeRangeLinearReLU(nniqd.LinearReLU):
    """A dynamic linear layer and its relu; input and output as of WholeRangeLinear. (LOW-02)"""

    def forward(self, x: Tensor) -> Any:
        """Return the float result, (…, out_features), of an input (…, in_features)."""
        packed: Any = self._packed_params._packed_params
        return torch.ops.quantized.linear_relu_dynamic(x, packed, reduce_range=False).to(x.dtype)
