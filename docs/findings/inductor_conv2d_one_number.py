"""TorchInductor: conv2d of integers does not compile where an argument is one number in a list, as the padding "valid"
of an exported program is."""

# finding: 57
# engine: inductor
# claimed: conv2d with padding "valid", or one number in a list for padding, stride or dilation
# fault of: pattern of the fusion
# largest error: raises
# cpu: all
# claims: `torch.conv2d*/*`
# reason: conv2d with one number in a list for both axes does not compile

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch._inductor import config

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.05, 128, 0, 255, torch.uint8)


class Convolution(nn.Module):
    """A convolution of integers; ``arguments``: how conv2d is called."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.integers = nn.Buffer(torch.arange(-18, 18).reshape(2, 2, 3, 3).to(torch.int8))
        self.scales, self.zeros = nn.Buffer(torch.full((2,), 0.01)), nn.Buffer(torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, -128, 127, torch.int8)
        x = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        x = torch.conv2d(x, weight, **self.arguments)
        result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        return result


def outcome(*, freezing: bool = True, **arguments: Any) -> str:
    """Print and give what becomes of it, exported: "right", "wrong" or the error."""
    model, x = Convolution(**arguments).eval(), torch.linspace(-1, 1, 64).reshape(1, 2, 4, 8)
    try:
        with torch.no_grad(), config.patch(freezing=freezing, compile_threads=1):
            found = torch.compile(torch.export.export(model, (x,)).module(), fullgraph=True)(x)
        told = "right" if float((found - model(x)).abs().max()) < 0.051 else "wrong"
    except Exception as error:
        told = str(error).split("\n")[1].strip()
    print(f"{arguments}, freezing {freezing}: {told}")
    return told


same: list[dict[str, Any]] = [{"padding": "valid"}, {"padding": (0,)}, {"stride": (1,)}, {"dilation": (1,)}]
right = [outcome(padding=(0, 0)), outcome(padding=0), *(outcome(freezing=False, **each) for each in same)]
raised = ["RuntimeError" in outcome(**each) for each in same]
shown = set(right) == {"right"} and all(raised)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
