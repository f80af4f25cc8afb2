"""The quantized-tensor form with ranges narrower than the dtype's, for judging a claim of such a range (CVT-09).

Quantized tensors cannot express the range: a clamp goes before each quantize, and weights stay within theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from refimpl.emit import QuantizedTensors
from refimpl.qparams import QParams, dtype_range


class BoundedTensors(QuantizedTensors):
    """Writes quantize and dequantize on torch's quantized tensors, with a clamp for a narrow range. (CVT-09)"""

    def write_static(self, value: Node, qparams: QParams, scope: str) -> tuple[Node, Node]:
        """Write a clamp to the reals at the ends of a narrow range per tensor, then what the base class writes."""
        ends = (qparams.quant_min, qparams.quant_max)
        if qparams.axis is None and ends != dtype_range(qparams.dtype):
            low, high = (float((end - qparams.zero_point.to(torch.float32)) * qparams.scale) for end in ends)
            value = self.graph.call_function(torch.clamp, (value, low, high))  # rule: CVT-09
        return super().write_static(value, qparams, scope)


def bound_weight(module: nn.Module, name: str, qparams: dict[str, Any]) -> None:
    """Move weight elements of a reference module that are quantized beyond a narrow range to its end. (CVT-09)

    `qparams`: the weight's, as ``from_float`` takes them. The other elements keep their bits.
    """
    weight: Tensor = getattr(module, name)
    axis, values = qparams.get("axis"), weight.detach()
    scale, zero_point = (torch.as_tensor(qparams[key]).reshape(-1) for key in ("scale", "zero_point"))
    if axis is None:
        quantized = torch.quantize_per_tensor(values, scale[0], zero_point[0], qparams["dtype"])
    else:
        quantized = torch.quantize_per_channel(values, scale, zero_point, axis, qparams["dtype"])
        shape = [-1 if dim == axis else 1 for dim in range(values.dim())]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    integers = quantized.int_repr()
    inside = integers.clamp(qparams["quant_min"], qparams["quant_max"])  # rule: CVT-09
    ends = torch.where(inside == integers, values, (inside - zero_point).to(values.dtype) * scale)
    setattr(module, name, nn.Parameter(ends.to(weight.dtype), weight.requires_grad))
