"""ExecuTorch: two ops of integers that read the same dequantized tensor do not lower where one depends on the other by
an op that stays outside of the delegate, as in any residual block with such an op."""

# finding: 66
# engine: executorch
# claimed: two ops that read one dequantized tensor, with an op outside of the delegate between them
# fault of: partitioner
# largest error: raises
# cpu: all
# claims: none: the backend avoids it

import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 3, -128, 127, torch.int8)


def quantized(x: Tensor) -> Tensor:
    result: Tensor = OPS.quantize_per_tensor(x, *QPARAMS)
    return result


def dequantized(x: Tensor) -> Tensor:
    result: Tensor = OPS.dequantize_per_tensor(x, *QPARAMS)
    return result


class Residual(nn.Module):
    """x + f(x + x); ``is_shared``: whether both sums read x by one dequantize, or each by its own."""

    def __init__(self, *, is_shared: bool, is_outside: bool) -> None:
        super().__init__()
        self.is_shared, self.f = is_shared, torch.erf if is_outside else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        whole = quantized(x)
        first = dequantized(whole)
        second = first if self.is_shared else dequantized(whole)
        twice = dequantized(quantized(second + second))
        return dequantized(quantized(first + dequantized(quantized(self.f(twice)))))


def lowered(*, is_shared: bool, is_outside: bool) -> str:
    """Print and give what becomes of it: "lowered", or the error."""
    program = torch.export.export(Residual(is_shared=is_shared, is_outside=is_outside).eval(), (torch.ones(2, 3),))
    config = EdgeCompileConfig(_check_ir_validity=False)
    try:
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
        told = "lowered"
    except AssertionError as error:
        told = str(error).splitlines()[0]
    print(f"one dequantize for both {is_shared}, with an op outside {is_outside}: {told}")
    return told


right = [lowered(is_shared=False, is_outside=True), lowered(is_shared=True, is_outside=False)]
shown = set(right) == {"lowered"} and "cycle" in lowered(is_shared=True, is_outside=True)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
