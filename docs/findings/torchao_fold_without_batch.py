"""torchao: behind a convolution of an input without a batch, prepare_pt2e folds a batch norm along the wrong axis."""

# finding: 105
# engine: torchao
# claimed: a convolution of an input without a batch, then a batch norm
# fault of: prepare (`utils.py`)
# largest error: as large as the values: 0.4 dB; raises
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


def measure(layer: nn.Module, norm: nn.BatchNorm1d, x: Tensor) -> float:
    """Return the ratio of signal and error of a prepared model of which nothing is annotated, in dB."""
    torch.manual_seed(0)
    model = nn.Sequential(layer, norm).train()
    norm.momentum = 1.0
    model(x)
    with torch.no_grad():
        right = model.eval()(x)
        found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)
        ratio = 10 * float(torch.log10(right.square().sum() / (right - found).square().sum()))
    print(f"{layer} of {list(x.shape)}, whose result is {list(right.shape)}: {ratio:.1f} dB")
    return ratio


torch.manual_seed(0)
of_batch = measure(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), torch.randn(2, 3, 6))
of_one = [
    measure(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), torch.randn(3, 6)),
    measure(nn.Conv2d(3, 4, 3), nn.BatchNorm1d(4), torch.randn(3, 6, 6)),
]
shown = of_batch > 100 and max(of_one) < 20
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
