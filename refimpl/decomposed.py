"""The one place that touches torch.ao.quantization: importing it registers the ``quantized_decomposed`` operators."""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed

OPS = torch.ops.quantized_decomposed

# The plain integer dtype that holds a quantized dtype's integers in the decomposed form. (CVT-07)
PLAIN_DTYPE = {
    torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32,
    **{plain: plain for plain in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)},
}  # fmt: skip
