"""torchao: X86InductorQuantizer sees no functions in a program of non-strict export, the default: they stay float."""

# finding: 80
# engine: torchao, X86InductorQuantizer
# claimed: linear, conv2d and relu as functions, exported as torch.export does by default
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


class Linear(nn.Module):
    """A linear layer, as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Conv2d(nn.Module):
    """A convolution, as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


class Pooled(nn.Module):
    """A convolution and a pool, both modules, with a relu between that is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.pool(F.relu(self.conv(x)))
        return result


def observed(model: nn.Module, x: Tensor, strict: bool) -> list[str]:
    """The values that get an observer."""
    program = torch.export.export(model.eval(), (x,), strict=strict).module()
    config = get_default_x86_inductor_quantization_config()
    prepared = prepare_pt2e(program, X86InductorQuantizer().set_global(config))
    return [node.args[0].name for node in prepared.graph.nodes if "activation_post_process" in str(node.target)]


image, missing = torch.randn(1, 3, 8, 8), []
for model, x in ((Linear(), torch.randn(2, 8)), (Conv2d(), image), (Pooled(), image)):
    by_default, strict = observed(model, x, False), observed(model, x, True)
    print(f"{type(model).__name__}: observed {by_default}; with strict=True {strict}")
    missing.append({*strict} - {*by_default})
shown = all(missing) and missing[2] == {"relu", "max_pool2d"}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
