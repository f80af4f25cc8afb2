"""ExecuTorch: a convolution that the delegate does not take reads what an empty delegate should have written."""

# finding: 69
# engine: executorch
# claimed: a convolution of a dequantized input or weight that the delegate does not take
# fault of: partitioner
# largest error: memory that nobody wrote; wrong shape
# cpu: all
# claims: `nn.ConvTranspose[12]d*/*`, `torch.conv_transpose[12]d*/*`
# reason: a convolution left outside reads what an empty delegate did not write
#
# finding: 91
# engine: pt2e-xnnpack
# claimed: fused modules with a batch norm, in eval mode
# fault of: config (no words for training alone)
# largest error: memory that nobody wrote; wrong shape; raises
# cpu: all
# claims: `nni.*Bn*/*` at ptq
# reason: a config cannot claim training alone, and the norm is not folded

import executorch.kernels.quantized  # noqa: F401  # registers the ops
import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed


class Model(nn.Module):
    """A function of an input, and of a weight that is dequantized; its result is not quantized."""

    def __init__(self, *, is_convolution: bool) -> None:
        super().__init__()
        self.is_convolution = is_convolution
        self.register_buffer("integers", torch.full((4, 3, 3, 3), 50, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_tensor(self.integers, 0.01, 0, -127, 127, torch.int8)
        return nn.functional.conv2d(x, weight) if self.is_convolution else torch.erf(weight).sum() + torch.erf(x)


def error(*, is_convolution: bool) -> float:
    """The largest difference between runtime and model, whose results are about 13, or 56."""
    x, model = torch.ones(2, 3, 5, 5), Model(is_convolution=is_convolution).eval()
    config = EdgeCompileConfig(_check_ir_validity=False)
    program = torch.export.export(model, (x,))
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    (found,) = loaded.load_method("forward").execute([x])
    return float((found - model(x)).abs().max())


convolution, other = error(is_convolution=True), error(is_convolution=False)
print(f"off by {convolution:.4g} of 13.5 where a convolution reads the weight, by {other:.2g} where erf does")
shown = convolution > 1 and other < 1e-3
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
