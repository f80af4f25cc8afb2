"""ExecuTorch: a bias that two quantized layers share is an integer in the scale of the first, in both."""

# finding: 61
# engine: executorch
# claimed: a layer with a bias at two places
# fault of: delegate's serializer
# largest error: 9 LSB
# cpu: all
# claims: none alone; the models shared_conv and shared_linear
# reason: a bias at two places has the scale of the first

import executorch.kernels.quantized  # noqa: F401  # registers the ops
import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed


def quantized(x: Tensor, scale: float) -> Tensor:
    """Quantize and dequantize a tensor."""
    qparams = (scale, 0, -128, 127, torch.int8)
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *qparams), *qparams)
    return result


class Twice(nn.Module):
    """A layer, and the same again on its result: the weight is the identity, in steps of 1/127."""

    def __init__(self, bias: Tensor, again: Tensor) -> None:
        super().__init__()
        self.bias, self.again = nn.Parameter(bias), nn.Parameter(again)
        self.register_buffer("integers", 127 * torch.eye(4, dtype=torch.int8))
        self.register_buffer("scales", torch.full((4,), 1 / 127))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = quantized(x, 0.01)
        for bias, scale in ((self.bias, 0.1), (self.again, 0.1)):
            weight = OPS.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, -127, 127, torch.int8)
            x = quantized(nn.functional.linear(x, weight, bias), scale)
        return x


def off(model: nn.Module) -> float:
    """By how much the runtime's result differs from the model's."""
    x = torch.zeros(1, 4)
    with torch.no_grad():
        program, right = torch.export.export(model.eval(), (x,)), model(x)
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    found = loaded.load_method("forward").execute([x])[0]
    print(f"found {found.flatten().tolist()}, right is {right.flatten().tolist()}")
    return float((found - right).abs().max())


bias = torch.ones(4)
apart, shared = Twice(bias, bias.clone()), Twice(bias, bias)
shared.again = shared.bias
errors = off(apart), off(shared)
shown = errors[0] == 0 and errors[1] > 0.5
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
