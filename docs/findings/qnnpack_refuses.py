"""qnnpack: what its config claims and the engine refuses, beside qint8 activations and MaxPool3d."""

# finding: 30
# engine: qnnpack
# claimed: float16 dynamic linear and RNNs; quint8 pools unbatched or of kernel 1; clamp with one bound; qint8
#   transposed convolution and PReLU
# fault of: config
# largest error: raises
# cpu: all
# claims: `*Linear*/*`, `nn.LSTM/*`, `nn.GRU/*`, `nn.*Cell/*`, `nn.MaxPool?d/*`, `nn.AvgPool?d/*`, `torch.clamp/*`,
#   `nn.ConvTranspose?d/*`, `nn.PReLU/*`
# reason: no kernel for what is claimed, such as float16 or clamp with one bound

from collections.abc import Callable
from typing import Any

import torch
import torch.ao.nn.quantized.dynamic as nnqd
import torch.nn.functional as F
from torch import nn

ops = torch.ops.quantized


def float16(kind: type[nn.Module]) -> Any:
    """Convert a module to dynamic quantization with float16 weights."""
    module = kind(4, 4)
    module.qconfig = torch.ao.quantization.float16_dynamic_qconfig  # type: ignore[assignment]
    return getattr(nnqd, kind.__name__).from_float(module)


def value(*shape: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    """Return a quantized tensor of zeros."""
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, dtype)


def transposed(x: torch.Tensor) -> Any:
    """Convolve transposed, with a weight of 4 to 4 channels."""
    packed = ops.conv_transpose1d_prepack(value(4, 4, 1, dtype=torch.qint8), None, [1], [0], [0], [1], 1)
    return ops.conv_transpose1d(x, packed, 0.1, 0)


cases: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("float16 dynamic Linear", lambda: float16(nn.Linear)),
    ("float16 dynamic LSTM", lambda: float16(nn.LSTM)),
    ("float16 dynamic GRUCell", lambda: float16(nn.GRUCell)),
    ("conv_transpose1d of qint8", lambda: transposed(value(1, 4, 5, dtype=torch.qint8))),
    ("conv_transpose1d of quint8", lambda: transposed(value(1, 4, 5))),
    (
        "prelu of qint8, weight quint8 as nnq.PReLU makes it",
        lambda: ops.prelu(value(1, 4, dtype=torch.qint8), value(1), 0.1, 0),
    ),
    ("max_pool2d, unbatched", lambda: F.max_pool2d(value(2, 4, 4), 2)),
    ("max_pool2d, kernel 1", lambda: F.max_pool2d(value(1, 2, 4, 4), 1)),
    ("max_pool2d, kernel 2", lambda: F.max_pool2d(value(1, 2, 4, 4), 2)),
    ("avg_pool2d, unbatched", lambda: F.avg_pool2d(value(2, 4, 4), 2)),
    ("avg_pool2d, kernel 1", lambda: F.avg_pool2d(value(1, 2, 4, 4), 1)),
    ("adaptive_avg_pool2d, unbatched", lambda: F.adaptive_avg_pool2d(value(2, 4, 4), 3)),
    ("clamp, one bound", lambda: torch.clamp(value(2, 4), min=0.5)),
    ("clamp, two bounds", lambda: torch.clamp(value(2, 4), min=0.5, max=1.0)),
)
shown = False
for engine in ("qnnpack", "fbgemm"):
    torch.backends.quantized.engine = engine
    for name, call in cases:
        try:
            print(f"{engine} {name}: gives a {type(call()).__name__}")
        except Exception as error:
            print(f"{engine} {name}: raised {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            shown |= engine == "qnnpack"
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
