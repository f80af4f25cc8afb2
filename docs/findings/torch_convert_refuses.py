"""All engines, torch's convert_fx: models that the config claims and that raise in prepare, in convert, or in the call.

Without arguments under the engine fbgemm; the first argument names another.
"""

# finding: 34
# engine: all
# claimed: 30 models: padding by name, keyword and default arguments of functions, norms without parameters, modes of
#   interpolate, unbatched inputs, `output_size`, RNNs without bias …
# fault of: lowering and config
# largest error: raises
# cpu: all
# claims: `*Conv*/*`, `torch.conv*/*`, `F.linear/*`, `nn.ConvTranspose?d*/*`, `nn.BatchNorm?d/*`,
#   `operator.floordiv/*`, `F.interpolate/*`, `torch.mean/*`, `nn.MaxPool?d/*`, `nn.LSTM/*`, `nn.GRU/*`
# reason: the lowering refuses a call, or leaves it in float

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, quantize_fx

MinMax = torch.ao.quantization.MinMaxObserver
QCONFIG = QConfig(  # type: ignore[no-untyped-call]
    activation=MinMax.with_args(dtype=torch.quint8),
    weight=MinMax.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)
DYNAMIC = QConfig(  # type: ignore[no-untyped-call]
    activation=torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.quint8, is_dynamic=True),
    weight=MinMax.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)


class Function(nn.Module):
    """A model of one function of its input and a weight."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


class Sized(nn.Module):
    """A model of a transposed convolution that is told the size of its output, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(x, output_size=[16, 16])


def outcome(model: nn.Module, shape: tuple[int, ...], qconfig: QConfig = QCONFIG) -> str:
    """Quantize a model with torch, call it, and say what came of it."""
    x, stage = torch.randn(shape), "prepare"
    try:
        prepared = quantize_fx.prepare_fx(nn.Sequential(model).eval(), QConfigMapping().set_global(qconfig), (x,))
        prepared(x)
        stage = "convert"
        lowered = quantize_fx.convert_fx(prepared)
        stage = "the call"
        lowered(x)
    except Exception as error:
        text = str(error).partition("\n")[0][:70]
        return f"{stage} raises {type(error).__name__}: {text}"
    return "runs"


Case = tuple[str, nn.Module, tuple[int, ...]]
STATIC: tuple[Case, ...] = (
    ("Conv1d(padding='same')", nn.Conv1d(4, 4, 3, padding="same"), (2, 4, 8)),
    ("Conv2d(padding='valid')", nn.Conv2d(4, 4, 3, padding="valid"), (2, 4, 8, 8)),
    ("Conv2d(padding_mode='circular')", nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 8, 8)),
    ("Conv3d(padding_mode='reflect')", nn.Conv3d(4, 4, 3, padding=1, padding_mode="reflect"), (2, 4, 5, 5, 5)),
    ("F.conv2d(x, w)", Function(lambda x, w: F.conv2d(x, w), 4, 4, 3, 3), (2, 4, 8, 8)),
    (
        "F.conv2d, int stride",
        Function(lambda x, w: F.conv2d(x, w, None, 1, [0, 0], [1, 1], 1), 4, 4, 3, 3),
        (2, 4, 8, 8),
    ),
    (
        "F.conv2d, all lists",
        Function(lambda x, w: F.conv2d(x, w, None, [1, 1], [0, 0], [1, 1], 1), 4, 4, 3, 3),
        (2, 4, 8, 8),
    ),
    ("F.conv_transpose2d(x, w)", Function(lambda x, w: F.conv_transpose2d(x, w), 4, 4, 3, 3), (2, 4, 8, 8)),
    ("F.linear(x, weight=w)", Function(lambda x, w: F.linear(x, weight=w), 4, 4), (2, 4)),
    ("BatchNorm2d(affine=False)", nn.BatchNorm2d(4, affine=False), (2, 4, 8, 8)),
    ("BatchNorm2d(track_running_stats=False)", nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 8, 8)),
    (
        "Conv2d + BatchNorm2d(track_running_stats=False)",
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        (2, 4, 8, 8),
    ),
    ("x // 2", Function(lambda x, w: operator.floordiv(x, 2), 1), (2, 4)),
    ("F.interpolate, 3-d, nearest", Function(lambda x, w: F.interpolate(x, size=7), 1), (2, 4, 8)),
    ("F.interpolate, bicubic", Function(lambda x, w: F.interpolate(x, size=7, mode="bicubic"), 1), (2, 4, 8, 8)),
    ("F.interpolate, trilinear", Function(lambda x, w: F.interpolate(x, size=7, mode="trilinear"), 1), (2, 4, 5, 5, 5)),
    ("torch.mean(x, 1, dtype=float32)", Function(lambda x, w: torch.mean(x, 1, dtype=torch.float32), 1), (2, 4)),
    ("MaxPool2d(return_indices=True)", nn.MaxPool2d(2, return_indices=True), (2, 4, 8, 8)),
    ("Conv2d, unbatched", nn.Conv2d(4, 4, 3), (4, 8, 8)),
    ("ConvTranspose2d, unbatched", nn.ConvTranspose2d(4, 4, 3), (4, 8, 8)),
    ("MaxPool3d, unbatched", nn.MaxPool3d(2), (4, 5, 5, 5)),
    ("AvgPool3d, unbatched", nn.AvgPool3d(2), (4, 5, 5, 5)),
    ("InstanceNorm1d, unbatched", nn.InstanceNorm1d(4), (4, 8)),
    ("Linear, unbatched", nn.Linear(4, 4), (4,)),
    ("ConvTranspose2d(output_size=…)", Sized(), (2, 4, 8, 8)),
)
OTHERS: tuple[Case, ...] = (
    ("F.linear(x, weight=w)", Function(lambda x, w: F.linear(x, weight=w), 4, 4), (2, 4)),
    ("Linear, unbatched", nn.Linear(4, 4), (4,)),
    ("LSTM(bias=False)", nn.LSTM(4, 4, bias=False), (5, 2, 4)),
    ("GRU(bias=False)", nn.GRU(4, 4, bias=False), (5, 2, 4)),
    ("LSTM, unbatched", nn.LSTM(4, 4), (5, 4)),
    ("GRUCell, unbatched", nn.GRUCell(4, 4), (4,)),
    ("GRUCell", nn.GRUCell(4, 4), (2, 4)),
)
torch.backends.quantized.engine = engine = sys.argv[1] if len(sys.argv) > 1 else "fbgemm"
outcomes = {f"{engine} static {name}": outcome(model, shape) for name, model, shape in STATIC}
outcomes |= {f"{engine} dynamic {name}": outcome(model, shape, DYNAMIC) for name, model, shape in OTHERS}
for name, found in outcomes.items():
    print(f"{name}: {found}")
shown = any("raises" in found for found in outcomes.values())
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
