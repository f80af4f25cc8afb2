"""torchao: prepare_pt2e takes a second batch norm behind a weight for the same as the first, and drops it."""

# finding: 102
# engine: torchao
# claimed: one layer before several batch norms, as heads of detectors have; a batch norm of a batch norm; a layer
#   without a bias, called twice
# fault of: prepare (`utils.py`)
# largest error: as large as the values: 2 dB
# cpu: all
# claims: none: no claim of a backend is made with it

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    """A convolution and two batch norms, which have seen other values."""

    def __init__(self, call: Callable[[Any, Tensor], tuple[Tensor, ...]], has_bias: bool) -> None:
        super().__init__()
        self.layer, self.call = nn.Conv2d(3, 4, 3, bias=has_bias), call
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm in (self.norm, self.other):
            nn.init.uniform_(norm.weight, 0.5, 2), nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Any:
        return torch.cat([value.flatten() for value in self.call(self, x)])


def measure(what: str, call: Callable[[Any, Tensor], tuple[Tensor, ...]], has_bias: bool = True) -> float:
    """Return the ratio of signal and error of a prepared model of which nothing is annotated, in dB."""
    torch.manual_seed(0)
    model, x = Model(call, has_bias).eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        right = model(x)
        found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)
        ratio = 10 * float(torch.log10(right.square().sum() / (right - found).square().sum()))
    print(f"{what}: {ratio:.1f} dB")
    return ratio


one_norm = measure("one norm, at two calls of the layer", lambda m, x: (m.norm(m.layer(x)), m.norm(m.layer(2 * x))))
dropped = [
    measure("a norm for each level", lambda m, x: (m.norm(m.layer(x)), m.other(m.layer(x[..., ::2])))),
    measure("two norms of one result", lambda m, x: (m.norm(y := m.layer(x)), m.other(y))),
    measure("a norm of a norm", lambda m, x: (m.other(m.norm(m.layer(x))),)),
    measure(
        "one norm, at two calls of a layer without a bias",
        lambda m, x: (m.norm(m.layer(x)), m.norm(m.layer(2 * x))),
        has_bias=False,
    ),
]
shown = one_norm > 100 and max(dropped) < 20
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
