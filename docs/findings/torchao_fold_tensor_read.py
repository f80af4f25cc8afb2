"""torchao: prepare_pt2e folds a batch norm into a weight and a bias that others read as well: they get these."""

# finding: 101
# engine: torchao
# claimed: a batch norm behind a layer whose weight or bias is also read elsewhere
# fault of: prepare (`utils.py`)
# largest error: as large as the values: −2 dB
# cpu: all
# claims: none: no claim of a backend is made with it

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    """A convolution with a batch norm, and a second result."""

    def __init__(self, second: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.tied, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), second
        self.tied.weight, self.norm = self.layer.weight, nn.BatchNorm2d(4, momentum=1.0)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x)), self.second(self, x)


def measure(what: str, second: Callable[[Any, Tensor], Tensor]) -> float:
    """Return the ratio of signal and error of the second result of a prepared model, of which nothing is annotated."""
    torch.manual_seed(0)
    model, x = Model(second).train(), torch.randn(2, 3, 6, 6)
    model(x)
    with torch.no_grad():
        right = model.eval()(x)[1]
        found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)[1]
        ratio = 10 * float(torch.log10(right.square().sum() / (right - found).square().sum()))
    print(f"{what}: {ratio:.1f} dB")
    return ratio


read = [
    measure("the layer once more, without the norm", lambda m, x: m.layer(x)),
    measure("another layer of the same weight", lambda m, x: m.tied(x)),
    measure("a sum of the weight's squares", lambda m, x: m.layer.weight.square().sum()),
    measure("the bias", lambda m, x: m.layer.bias * 1),
]
apart = measure("the norm's bias", lambda m, x: m.norm.bias + 1)
shown = apart > 100 and max(read) < 20
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
