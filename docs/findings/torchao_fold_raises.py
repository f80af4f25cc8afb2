"""torchao: prepare_pt2e raises for a model with one batch norm that cannot be folded, or only not in its way."""

# finding: 106
# engine: torchao
# claimed: a batch norm behind a layer whose weight is computed or a buffer, or without running statistics
# fault of: prepare (`utils.py`)
# largest error: raises
# cpu: all
# claims: none: no claim of a backend is made with it

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import ComposableQuantizer


class Model(nn.Module):
    """A convolution of some weight, and a batch norm."""

    def __init__(self, find_weight: Callable[[Any], Tensor], has_statistics: bool = True) -> None:
        super().__init__()
        self.find_weight, self.norm = find_weight, nn.BatchNorm2d(4, track_running_stats=has_statistics)
        self.parameter = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.register_buffer("buffer", torch.randn(4, 3, 3, 3))

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.conv2d(x, self.find_weight(self)))


def try_out(what: str, model: nn.Module) -> bool:
    """Tell whether a model of which nothing is annotated can be prepared."""
    program = torch.export.export(model.eval(), (torch.randn(2, 3, 6, 6),)).module()
    try:
        prepare_pt2e(program, ComposableQuantizer([]))
        result = "is prepared"
    except (KeyError, TypeError, ValueError) as error:
        result = f"{type(error).__name__}: {error}"
    print(f"{what}: {result}")
    return result == "is prepared"


is_prepared = [
    try_out("a parameter", Model(lambda m: m.parameter)),
    try_out("a buffer", Model(lambda m: m.buffer)),
    try_out("a weight that is computed", Model(lambda m: m.parameter - m.parameter.mean())),
    try_out("a norm without running statistics", Model(lambda m: m.parameter, has_statistics=False)),
]
shown = is_prepared == [True, False, False, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
