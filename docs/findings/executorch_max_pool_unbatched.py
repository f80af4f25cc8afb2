"""ExecuTorch: max_pool2d of one image without a batch, on integers, does not lower."""

# finding: 63
# engine: executorch
# claimed: max_pool2d without a batch
# fault of: partitioner
# largest error: raises
# cpu: all
# claims: `nn.MaxPool2d/*`, `F.max_pool2d/*`
# reason: a max pool of one image without a batch does not lower

import torch
import torch.ao.quantization.fx._decomposed
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 3, -128, 127, torch.int8)


class Pool(nn.Module):
    """A max pool between integers."""

    def forward(self, x: Tensor) -> Tensor:
        x = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        x = nn.functional.max_pool2d(x, 2)
        result: Tensor = OPS.dequantize_per_tensor(OPS.quantize_per_tensor(x, *QPARAMS), *QPARAMS)
        return result


def lowered(*shape: int) -> str:
    """Print and give what becomes of it: "lowered", or the innermost error."""
    program = torch.export.export(Pool().eval(), (torch.ones(shape),))
    config = EdgeCompileConfig(_check_ir_validity=False)
    try:
        to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
        told = "lowered"
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        told = f"{type(cause).__name__}: {str(cause).splitlines()[0]}"
    print(f"{shape}: {told}")
    return told


batched, alone = lowered(2, 3, 8, 8), lowered(3, 8, 8)
shown = batched == "lowered" and alone != "lowered"
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
