"""fbgemm, x86, onednn: per-channel weights of ConvTranspose, and of PReLU in every engine, end in an error."""

# finding: 35
# engine: all; the kernel is right on qnnpack
# claimed: per-channel weights of ConvTranspose and PReLU
# fault of: config
# largest error: raises
# cpu: all
# claims: `nn.ConvTranspose?d*/*`, `torch.conv_transpose?d/*`, `nn.PReLU/*`
# reason: no weights per channel in transposed convolutions and PReLU

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, quantize_fx

ops = torch.ops.quantized


def quantized(model: nn.Module, x: torch.Tensor, axis: int) -> Any:
    """Take a model through torch's flow, its weights per channel of an axis, and call it."""
    kind = torch.ao.quantization.PerChannelMinMaxObserver
    weight = kind.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric, ch_axis=axis)
    activation = torch.ao.quantization.MinMaxObserver.with_args(dtype=torch.quint8)
    mapping = QConfigMapping().set_global(QConfig(activation=activation, weight=weight))  # type: ignore[no-untyped-call]
    prepared = quantize_fx.prepare_fx(nn.Sequential(model).eval(), mapping, (x,))
    prepared(x)
    return quantize_fx.convert_fx(prepared)(x)


def packed() -> Any:
    """Pack a weight of a transposed convolution, a scale for each of its 3 output channels, and call the kernel."""
    weight = torch.quantize_per_channel(
        torch.ones(2, 3, 1), torch.ones(3), torch.zeros(3, dtype=torch.int64), 1, torch.qint8
    )
    pack = ops.conv_transpose1d_prepack(weight, None, [1], [0], [0], [1], 1)
    return ops.conv_transpose1d(torch.quantize_per_tensor(torch.ones(1, 2, 3), 0.1, 0, torch.quint8), pack, 0.1, 0)


cases: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("kernel of conv_transpose1d", packed),
    ("nn.ConvTranspose1d, channel axis 1", lambda: quantized(nn.ConvTranspose1d(2, 3, 1), torch.randn(1, 2, 5), 1)),
    ("nn.PReLU(4), channel axis 0", lambda: quantized(nn.PReLU(4), torch.randn(2, 4), 0)),
)
shown = False
for engine in ("qnnpack", "fbgemm", "x86", "onednn"):
    torch.backends.quantized.engine = engine
    for name, call in cases:
        try:
            print(f"{engine} {name}: gives {tuple(call().shape)}")
        except Exception as error:
            print(f"{engine} {name}: raised {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            shown = True
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
