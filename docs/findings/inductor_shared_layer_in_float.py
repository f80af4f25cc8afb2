"""TorchInductor: a layer of integers that is called at two places runs in float at both."""

# finding: 56
# engine: inductor
# claimed: a layer (module) that is called at two places
# fault of: pattern of the fusion
# largest error: runs in float
# cpu: all
# claims: none; the models shared_conv and shared_linear
# reason: a layer that is called at two places runs in float

from collections.abc import Callable

import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.05, 128, 0, 255, torch.uint8)


class Layers(nn.Module):
    """Two layers on integers, one behind the other; ``shared``: of one weight, which is dequantized once."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], *, shared: bool) -> None:
        super().__init__()
        self.op, self.shared = op, shared
        integers = torch.arange(-32, 32).reshape(shape).to(torch.int8)
        self.first, self.second = nn.Buffer(integers), nn.Buffer(integers.flip(0))
        self.scales, self.zeros = nn.Buffer(torch.full((8,), 0.01)), nn.Buffer(torch.zeros(8, dtype=torch.int64))

    def weight(self, integers: Tensor) -> Tensor:
        """The floats that a weight stands for."""
        floats: Tensor = OPS.dequantize_per_channel(integers, self.scales, self.zeros, 0, -128, 127, torch.int8)
        return floats

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight(self.first)
        for each in (weight, weight if self.shared else self.weight(self.second)):
            x = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
            x = self.op(x, each)
        result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        return result


def kernels(op: Callable[[Tensor, Tensor], Tensor], *shape: int, shared: bool) -> tuple[int, int]:
    """Print and give how many layers the generated code calls on integers, and how many on floats."""
    model, x = Layers(op, shape, shared=shared).eval(), torch.linspace(-1, 1, 32).reshape(4, *shape[1:])
    with torch.no_grad(), config.patch(freezing=True, compile_threads=1):
        _, [code] = run_and_get_code(torch.compile(model, fullgraph=True), x)
    lines = [line.partition("(")[0] for line in code.splitlines() if not line.lstrip().startswith("#")]
    integers = sum("onednn.q" in line for line in lines)
    floats = sum("extern_kernels." in line or "mkldnn._" in line for line in lines)
    print(f"{op.__name__}, one weight for both layers: {shared}; {integers} on integers, {floats} on floats")
    return integers, floats


LAYERS = ((nn.functional.linear, 8, 8), (nn.functional.conv2d, 8, 8, 1, 1))
shown = all(kernels(*each, shared=False) == (2, 0) and kernels(*each, shared=True) == (0, 2) for each in LAYERS)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
