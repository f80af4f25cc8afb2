"""ExecuTorch: a view between two scales is given to the delegate, which does not take it: the program does not load."""

# finding: 68
# engine: executorch
# claimed: view, reshape, transpose between two scales
# fault of: partitioner
# largest error: raises
# cpu: all
# claims: none alone; the model transformer in QAT
# reason: a view between two scales does not load

from collections.abc import Callable

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


class Moved(nn.Module):
    """A function between scales of 0.1 and another."""

    def __init__(self, function: Callable[[Tensor], Tensor], scale: float) -> None:
        super().__init__()
        self.function, self.scale = function, scale

    def forward(self, x: Tensor) -> Tensor:
        return quantized(self.function(quantized(x, 0.1)), self.scale)


def told(function: Callable[[Tensor], Tensor], scale: float) -> str:
    """What becomes of it: "right", "wrong", or the error."""
    x, model = torch.linspace(-5, 5, 24).reshape(2, 12), Moved(function, scale).eval()
    program = torch.export.export(model, (x,))
    config = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
    loaded = Runtime.get().load_program(edge.to_executorch().buffer)
    try:
        (found,) = loaded.load_method("forward").execute([x])
    except RuntimeError as error:
        return str(error)
    return "right" if float((found - model(x)).abs().max()) < 1.5 * scale else "wrong"


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(2, 3, 4),
    "transpose": lambda x: x.transpose(0, 1),
    "relu": torch.relu,
}
found = {(name, scale): told(function, scale) for name, function in FUNCTIONS.items() for scale in (0.1, 0.11)}
for (name, scale), what in found.items():
    print(f"{name} from a scale of 0.1 to {scale}: {what}")
shown = found["view", 0.1] == "right" and "Failed to load" in found["view", 0.11]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
