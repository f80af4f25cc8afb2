"""TorchInductor: a convolution of integers with one input channel and a dynamic batch ends in an assertion: its result
is in another memory format than the generated code expects."""

# finding: 65
# engine: inductor
# claimed: Conv2d, Conv1d of one input channel, with a dynamic batch
# fault of: layout that the lowering expects
# largest error: raises
# cpu: all
# claims: none alone; the models digits and lenet
# reason: a convolution of one channel with a dynamic batch is not compiled

import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor, nn
from torch._inductor import config

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.05, 128, 0, 255, torch.uint8)


class Convolution(nn.Module):
    """A convolution of integers; ``rank``: the axes of an image."""

    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.function = {1: torch.conv1d, 2: torch.conv2d}[rank]
        size = (2, channels, *(3,) * rank)
        self.integers = nn.Buffer(torch.arange(torch.Size(size).numel()).reshape(size).to(torch.int8))
        self.scales, self.zeros = nn.Buffer(torch.full((2,), 0.01)), nn.Buffer(torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, -128, 127, torch.int8)
        x = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        x = self.function(x, weight)
        result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        return result


def outcome(channels: int, rank: int = 2, *, dynamic: bool = True, freezing: bool = True) -> str:
    """Print and give what becomes of it: "right", "wrong" or the error. ``dynamic``: whether sizes are symbols."""
    x = torch.linspace(-1, 1, 2 * channels * 8**rank).reshape(2, channels, *(8,) * rank)
    model = Convolution(channels, rank).eval()
    torch._dynamo.reset()
    try:
        with torch.no_grad(), config.patch(freezing=freezing, compile_threads=1):
            found = torch.compile(model, fullgraph=True, dynamic=dynamic)(x)
        told = "right" if float((found - model(x)).abs().max()) < 0.051 else "wrong"
    except AssertionError as error:
        told = str(error).split("\n")[0].strip()
    print(f"{channels} channels, {rank}-d, dynamic {dynamic}, freezing {freezing}: {told}")
    return told


right = [outcome(2), outcome(2, rank=1), outcome(1, dynamic=False), outcome(1, freezing=False)]
raised = [outcome(1), outcome(1, rank=1)]
shown = set(right) == {"right"} and all("expected size" in each for each in raised)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
