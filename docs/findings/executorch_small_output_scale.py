"""ExecuTorch: a layer whose output has a small scale, as of outputs that are all zero, lowers and does not load."""

# finding: 71
# engine: executorch
# claimed: a layer with s_x·s_w/s_y of 256 or more
# fault of: delegate
# largest error: raises
# cpu: all
# claims: layers whose output is all zero
# reason: outputs that are all zero have a scale that does not load

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
    qparams = (scale, 3, -128, 127, torch.int8)
    result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *qparams), *qparams)
    return result


class Model(nn.Module):
    """A linear layer of input scale 1/8 and weight scale 1/8."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("integers", torch.ones(4, 3, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_tensor(self.integers, 0.125, 0, -127, 127, torch.int8)
        return quantized(nn.functional.linear(quantized(x, 0.125), weight), self.scale)


def told(scale: float) -> str:
    """Print and give what becomes of it: "loads", or the error."""
    program = torch.export.export(Model(scale).eval(), (torch.ones(2, 3),))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    try:
        loaded.load_method("forward")
        said = "loads"
    except RuntimeError as error:
        said = str(error)
    print(f"s_x·s_w/s_y = {0.125 * 0.125 / scale:g}: {said}")
    return said


below, at = told(2.0**-13), told(2.0**-14)
shown = below == "loads" and "Failed to load" in at
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
