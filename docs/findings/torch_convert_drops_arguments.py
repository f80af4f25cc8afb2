"""All engines, torch's convert_fx: what the quantized op or module cannot hold is dropped without a word.

Printed: the largest difference of the lowered model to the reference model, in 1/255 of the output's range.
"""

# finding: 32
# engine: all
# claimed: `alpha` of torch.add, statistics of InstanceNorm, unbatched InstanceNorm, one Linear called at two places
# fault of: lowering; kernel's wrapper for unbatched
# largest error: 127 LSB
# cpu: all
# claims: `torch.add/*`, `nn.InstanceNorm?d/*`, `nn.Linear/*`
# reason: the lowering drops arguments, or takes an unbatched image for a batch

import copy
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, quantize_fx

MinMax = torch.ao.quantization.MinMaxObserver
QCONFIG = QConfig(  # type: ignore[no-untyped-call]
    activation=MinMax.with_args(dtype=torch.quint8),
    weight=MinMax.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)


class Function(nn.Module):
    """A model of one call of torch.add."""

    def __init__(self, other: float | None, alpha: int) -> None:
        super().__init__()
        self.other, self.alpha = other, alpha

    def forward(self, x: torch.Tensor) -> Any:
        return torch.add(x, x if self.other is None else self.other, alpha=self.alpha)


class Twice(nn.Module):
    """A model that calls one Linear at two places, with outputs of different ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.linear(x))


def difference(model: nn.Module, x: torch.Tensor) -> float:
    """Return how far torch's lowered model is from its reference model, in 1/255 of the output's range."""
    prepared = quantize_fx.prepare_fx(model.eval(), QConfigMapping().set_global(QCONFIG), (x,))
    prepared(x)
    reference = quantize_fx.convert_to_reference_fx(copy.deepcopy(prepared))
    right = reference(x)
    return float((quantize_fx.convert_fx(prepared)(x) - right).abs().max() / (right.max() - right.min()) * 255)


torch.manual_seed(0)
x = torch.randn(2, 4, 6, 6)
norm = nn.InstanceNorm2d(4, track_running_stats=True)
norm(x * 3 + 1)
shown = False
for engine in ("qnnpack", "fbgemm", "x86", "onednn"):
    torch.backends.quantized.engine = engine
    for name, model, value in (
        ("add(x, x, alpha=1)", Function(None, 1), x),
        ("add(x, x, alpha=2)", Function(None, 2), x),
        ("add(x, 1.5, alpha=3)", Function(1.5, 3), x),
        ("InstanceNorm2d", nn.Sequential(nn.InstanceNorm2d(4)), x),
        ("InstanceNorm2d(track_running_stats=True)", nn.Sequential(copy.deepcopy(norm)), x),
        ("InstanceNorm2d of an unbatched tensor", nn.Sequential(nn.InstanceNorm2d(4)), x[0]),
        ("one Linear called twice", Twice(), x),
    ):
        error = difference(model, value)
        print(f"{engine} {name}: {error:.2f} LSB")
        shown |= error > 2
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
