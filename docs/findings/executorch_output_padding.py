"""ExecuTorch: a transposed convolution whose output_padding is not below its stride loads, and does not run."""

# finding: 70
# engine: executorch
# claimed: transposed convolution, output_padding not below stride
# fault of: delegate
# largest error: raises
# cpu: all
# claims: `nn.ConvTranspose[12]d*/*`, `torch.conv_transpose[12]d*/*`
# reason: output_padding that is not below the stride

import executorch.kernels.quantized  # noqa: F401  # registers the ops
import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 3, -128, 127, torch.int8)


def quantized(x: Tensor) -> Tensor:
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
    return result


class Model(nn.Module):
    """A quantized transposed convolution, dilated twice, with one more element at the end."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("integers", torch.ones(3, 4, 2, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_tensor(self.integers, 0.01, 0, -127, 127, torch.int8)
        found = nn.functional.conv_transpose1d(quantized(x), weight, None, self.stride, 0, 1, 1, 2)
        return quantized(found)


def told(stride: int) -> str:
    """Print and give what becomes of it: its shape, or the error."""
    x, model = torch.ones(2, 3, 7), Model(stride).eval()
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(
        torch.export.export(model, (x,)), partitioner=[XnnpackPartitioner()], compile_config=config
    )
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    method = loaded.load_method("forward")
    try:
        said = str(tuple(method.execute([x])[0].shape))
    except RuntimeError as error:
        said = str(error)
    print(f"output_padding 1, dilation 2, stride {stride}: {said}; torch gives {tuple(model(x).shape)}")
    return said


shown = told(2) == "(2, 4, 16)" and "execute() failed" in told(1)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
