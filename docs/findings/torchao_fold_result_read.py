"""torchao: prepare_pt2e folds a batch norm into a layer whose result others read as well: they get the norm."""

# finding: 100
# engine: torchao
# claimed: a convolution or linear layer whose result is read by a batch norm and by something else
# fault of: prepare (`utils.py`)
# largest error: as large as the values: 3.5 dB
# cpu: all
# claims: none: no claim of a backend is made with it

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module, is_read: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.is_read = layer, norm, is_read

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.norm(y) + (y if self.is_read else 1)


def make_norm(kind: type[Any]) -> Any:
    """Return a batch norm of four channels that has learnt something."""
    norm = kind(4, momentum=1.0)
    nn.init.uniform_(norm.weight, 0.5, 2), nn.init.normal_(norm.bias)
    return norm


def measure(layer: nn.Module, norm: nn.Module, x: Tensor, is_read: bool) -> float:
    """Return the ratio of signal and error of a prepared model of which nothing is annotated, in dB."""
    torch.manual_seed(0)
    model = Model(layer, norm, is_read).train()
    model(x)
    with torch.no_grad():
        right = model.eval()(x)
        found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)
        ratio = 10 * float(torch.log10(right.square().sum() / (right - found).square().sum()))
    print(f"{type(layer).__name__}, {'with' if is_read else 'without'} a second reader: {ratio:.1f} dB")
    return ratio


torch.manual_seed(0)
image, rows = torch.randn(2, 3, 6, 6), torch.randn(8, 3)
alone = measure(nn.Conv2d(3, 4, 3), make_norm(nn.BatchNorm2d), image, is_read=False)
read = [
    measure(nn.Conv2d(3, 4, 3), make_norm(nn.BatchNorm2d), image, is_read=True),
    measure(nn.ConvTranspose2d(3, 4, 3), make_norm(nn.BatchNorm2d), image, is_read=True),
    measure(nn.Linear(3, 4), make_norm(nn.BatchNorm1d), rows, is_read=True),
]
shown = alone > 100 and max(read) < 20
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
