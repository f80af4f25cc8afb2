"""ExecuTorch: a cat of one tensor, and a dynamic linear layer with one scale for its weight, stay outside of XNNPACK's
delegate, and run in float."""

# finding: 64
# engine: executorch
# claimed: cat of one tensor; dynamic linear, one scale for the weight
# fault of: partitioner
# largest error: runs in float
# cpu: all
# claims: `torch.cat/*`, `*inear*/*` at dynamic
# reason: a cat of one tensor, or a dynamic layer with one scale for its weight, is left outside

import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 3, -128, 127, torch.int8)


def quantized(x: Tensor) -> Tensor:
    """Quantize and dequantize a tensor."""
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
    return result


class Cat(nn.Module):
    """A list of tensors, joined."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        pieces = [quantized(x + number) for number in range(self.count)]
        return quantized(torch.cat(pieces, 1))


class Dynamic(nn.Module):
    """A linear layer whose input is quantized by its own range."""

    def __init__(self, per_channel: bool) -> None:
        super().__init__()
        self.per_channel = per_channel
        self.register_buffer("integers", torch.ones(4, 4, dtype=torch.int8))
        self.register_buffer("scales", torch.full((4,), 0.01))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ends = (-128, 127)
        scale, zero_point = OPS.choose_qparams.tensor(x, *ends, 2.0**-12, torch.int8)
        integers = OPS.quantize_per_tensor.tensor(x, scale, zero_point, *ends, torch.int8)
        x = OPS.dequantize_per_tensor.tensor(integers, scale, zero_point, *ends, torch.int8)
        if self.per_channel:
            weight = OPS.dequantize_per_channel(self.integers, self.scales, self.zeros, 0, -127, 127, torch.int8)
        else:
            weight = OPS.dequantize_per_tensor(self.integers, 0.01, 0, -127, 127, torch.int8)
        return nn.functional.linear(x, weight)


def outside(model: nn.Module, *names: str) -> bool:
    """Is one of these ops left outside of delegates?"""
    program = torch.export.export(model.eval(), (torch.ones(2, 4),))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    targets = [str(node.target) for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    return any(name in target for target in targets for name in names)


cats = {count: outside(Cat(count), "cat") for count in (1, 2)}
linears = {name: outside(Dynamic(name == "per channel"), "mm", "linear") for name in ("per channel", "per tensor")}
print(f"outside, cat of as many tensors: {cats}; dynamic linear, weight: {linears}")
shown = cats == {1: True, 2: False} and linears == {"per channel": False, "per tensor": True}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
