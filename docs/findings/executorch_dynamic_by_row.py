"""ExecuTorch: XNNPACK's delegate quantizes each row of a dynamic input by itself, where choose_qparams is of it all."""

# finding: 58
# engine: executorch
# claimed: dynamic linear, weights per channel, of several rows
# fault of: partitioner
# largest error: 17,000 LSB
# cpu: all
# claims: `*inear*/*` at dynamic
# reason: each row of a dynamic input gets qparams of its own

import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401  # registers the ops
from torch.export import export

ops = torch.ops.quantized_decomposed
ENDS = (-128, 127)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((1, 2), 1, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(1))
        self.register_buffer("zeros", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        scale, zero_point = ops.choose_qparams.tensor(x, *ENDS, 1e-7, torch.int8)
        integers = ops.quantize_per_tensor.tensor(x, scale, zero_point, *ENDS, torch.int8)
        taken = ops.dequantize_per_tensor.tensor(integers, scale, zero_point, *ENDS, torch.int8)
        weight = ops.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, *ENDS, torch.int8)
        return nn.functional.linear(taken, weight)


x = torch.tensor([[100.0, 27.5], [0.05, 0.1]])  # a step is 0.39 for all of it: the second row is 0
model = Linear().eval()
config = EdgeCompileConfig(_check_ir_validity=False)
lowered = to_edge_transform_and_lower(export(model, (x,)), partitioner=[XnnpackPartitioner()], compile_config=config)
method = Runtime.get().load_program(lowered.to_executorch().buffer).load_method("forward")
assert method is not None
found, right = (each.flatten().tolist() for each in (method.execute([x])[0], model(x)))
print(f"rows of 100 and of 0.05: found {found} right {right}")
shown = abs(found[1] - right[1]) > 0.1
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
