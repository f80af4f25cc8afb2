"""All engines: the quantized EmbeddingBag ignores mode, padding_idx and max_norm.

It takes include_last_offset for a 2-d input too, where float ignores it. A 4-bit row of odd length
comes back one column longer.
"""

# finding: 19
# engine: all
# claimed: EmbeddingBag: mode mean and max, padding_idx, max_norm, include_last_offset of a 2-d input; 4-bit rows of
#   odd length
# fault of: module; kernel for the last two
# largest error: as large as the values; wrong shape
# cpu: all
# claims: `nn.EmbeddingBag/*`, `nn.Embedding/*` and their `nnqat.Embedding*/*`
# reason: arguments of embedding bags are dropped; rows of odd length at 4 bits

from typing import Any

import torch
import torch.ao.nn.quantized as nnq
from torch import nn

torch.manual_seed(0)
indices, offsets = torch.tensor([1, 2, 0, 4]), torch.tensor([0, 2])


def pair(columns: int = 4, dtype: torch.dtype = torch.quint8, **arguments: Any) -> tuple[nn.EmbeddingBag, Any]:
    """Return the float module with the weight as the quantized one holds it, and the quantized one."""
    observer = torch.ao.quantization.PerChannelMinMaxObserver(
        dtype=dtype,
        qscheme=torch.per_channel_affine_float_qparams,
        ch_axis=0,
        quant_min=0,
        quant_max=255 if dtype == torch.quint8 else 15,
    )
    module = nn.EmbeddingBag(6, columns, **arguments)
    module.weight.data = torch.randn(6, columns)
    module.qconfig = torch.ao.quantization.QConfig(None, lambda: observer)  # type: ignore[assignment, no-untyped-call]
    found: Any = nnq.EmbeddingBag.from_float(module)  # type: ignore[no-untyped-call]
    module.weight.data = found.weight().dequantize()[:, :columns]
    return module, found


shown = False
for arguments in (
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "max"},
    {"mode": "sum", "padding_idx": 1},
    {"mode": "sum", "max_norm": 0.5},
):
    module, quantized = pair(**arguments)
    right, found = module(indices, offsets), quantized(indices, offsets)
    error = float((found - right).abs().max())
    print(arguments, f"largest error {error:.4f} where values are up to {float(right.abs().max()):.2f}")
    shown |= arguments != {"mode": "sum"} and error > 0.1
module, quantized = pair(mode="sum", include_last_offset=True)
table = indices.reshape(2, 2)
print("2-d input, include_last_offset: shape", tuple(quantized(table).shape), "right", tuple(module(table).shape))
module, quantized = pair(columns=5, dtype=torch.quint4x2, mode="sum")
print(
    "4 bits, 5 columns: shape", tuple(quantized(indices, offsets).shape), "right", tuple(module(indices, offsets).shape)
)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
