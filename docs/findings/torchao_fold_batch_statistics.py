"""torchao: prepare_pt2e folds a batch norm that normalizes by its batch, with the running statistics."""

# finding: 104
# engine: torchao
# claimed: `F.batch_norm(training=True)` behind a layer
# fault of: prepare (`utils.py`)
# largest error: as large as the values: 8 dB
# cpu: all
# claims: none: no claim of a backend is made with it

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    """A convolution and F.batch_norm, in eval mode."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.of_batch = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), training

    def forward(self, x: Tensor) -> Any:
        norm = self.norm
        statistics = norm.running_mean, norm.running_var
        return F.batch_norm(self.layer(x), *statistics, norm.weight, norm.bias, training=self.of_batch)


def measure(training: bool) -> float:
    """Return the ratio of signal and error of a prepared model of which nothing is annotated, in dB."""
    torch.manual_seed(0)
    model, x = Model(training).eval(), torch.randn(8, 3, 6, 6)
    with torch.no_grad():
        found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)
        right = model(x)
        ratio = 10 * float(torch.log10(right.square().sum() / (right - found).square().sum()))
    print(f"training={training}: {ratio:.1f} dB")
    return ratio


shown = measure(training=False) > 100 and measure(training=True) < 20
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
