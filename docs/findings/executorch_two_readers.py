"""ExecuTorch: a convolution that is returned, and read outside of the delegate as well, has its axes in disorder."""

# finding: 62
# engine: executorch
# claimed: a convolution whose result is returned, and read outside of the delegate
# fault of: delegate
# largest error: wrong shape, or any number
# cpu: all
# claims: none: the backend avoids it

from collections.abc import Callable

import executorch.kernels.quantized  # noqa: F401  # registers the ops
import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn
from torch.export import Dim

OPS = torch.ops.quantized_decomposed
Outputs = tuple[Tensor, ...]


def quantized(x: Tensor) -> Tensor:
    """Quantize and dequantize a tensor."""
    qparams = (0.1, 3, -128, 127, torch.int8)
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *qparams), *qparams)
    return result


class Model(nn.Module):
    """A quantized convolution, and what is made of its result."""

    def __init__(self, last: Callable[[Tensor], Outputs]) -> None:
        super().__init__()
        self.last = last
        self.register_buffer("integers", torch.ones(8, 3, 3, 3, dtype=torch.int8))
        self.register_buffer("scales", torch.full((8,), 0.01))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Outputs:
        weight = OPS.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return self.last(quantized(nn.functional.conv2d(quantized(x), weight)))


def shapes(last: Callable[[Tensor], Outputs]) -> list[tuple[int, ...]]:
    """The shapes that the runtime gives, for two rows of at most eight."""
    x, model = torch.ones(2, 3, 9, 8), Model(last).eval()
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("rows", max=8)},))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    return [tuple(each.shape) for each in loaded.load_method("forward").execute([x])]


def pooled(x: Tensor) -> Tensor:
    """The mean of each channel, which the delegate does not take in this form."""
    return nn.functional.adaptive_avg_pool2d(x, 1)


one, both = shapes(lambda x: (pooled(x),)), shapes(lambda x: (x, pooled(x)))
print(f"the means alone: {one}; with the result itself: {both}; right are (2, 8, 7, 6) and (2, 8, 1, 1)")
shown = one == [(2, 8, 1, 1)] and both[-1] != (2, 8, 1, 1)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
