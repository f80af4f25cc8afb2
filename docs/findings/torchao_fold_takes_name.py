"""torchao: prepare_pt2e writes the bias of a fold as weight_bias, also over a tensor of that name."""

# finding: 103
# engine: torchao
# claimed: a layer without a bias and a tensor named `weight_bias`
# fault of: prepare (`utils.py`)
# largest error: as large as the values
# cpu: all
# claims: none: no claim of a backend is made with it

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    """A convolution without a bias, a batch norm, and a tensor that is added behind them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.norm, self.name = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.BatchNorm2d(4), name
        self.register_parameter(name, nn.Parameter(torch.randn(4, 1, 1)))

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.conv2d(x, self.weight)) + getattr(self, self.name)


def try_out(name: str) -> str:
    """Prepare a model of which nothing is annotated."""
    torch.manual_seed(0)
    model, x = Model(name).train(), torch.randn(2, 3, 6, 6)
    model(x)
    with torch.no_grad():
        right = model.eval()(x)
        try:
            found = prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([]))(x)
            result = "right" if torch.allclose(found, right, atol=1e-4) else "another result"
        except RuntimeError as error:
            result = f"RuntimeError: {str(error)[:80]}"
    print(f"the tensor is {name}: {result}")
    return result


is_right = [try_out(name) == "right" for name in ("shift", "weight_bias")]
shown = is_right == [True, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
