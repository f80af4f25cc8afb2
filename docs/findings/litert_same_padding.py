"""LiteRT: the converter fails on a convolution with padding 'same' and a kernel of even size."""

# finding: 119
# engine: litert
# claimed: a convolution with `padding='same'`, where the two sides get different numbers of zeros
# fault of: converter
# largest error: raises
# cpu: all
# claims: `*Conv1d*/*`, `torch.conv1d*/*`
# reason: padding 'same' that is not the same on both sides is not converted

import litert_torch
import torch
import torch.ao.quantization.fx._decomposed  # registers the ops
from ai_edge_litert.interpreter import Interpreter
from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config
from litert_torch.quantize.quant_config import QuantConfig
from torch import Tensor, nn

OPS, RANGE = torch.ops.quantized_decomposed, (-128, 127, torch.int8)


def round_trip(x: Tensor, scale: float, zero_point: int = 0) -> Tensor:
    """Quantize and dequantize."""
    integers = OPS.quantize_per_tensor(x, scale, zero_point, *RANGE)
    return OPS.dequantize_per_tensor(integers, scale, zero_point, *RANGE)  # type: ignore[no-any-return]


def convert(model: nn.Module, x: Tensor) -> Interpreter:
    """Convert a model as a static one of PT2E, and load it."""
    static = QuantConfig(pt2e_quantizer=PT2EQuantizer().set_global(get_symmetric_quantization_config()))
    data = litert_torch.convert(model.eval(), (x,), quant_config=static).model_content()
    interpreter = Interpreter(model_content=data, num_threads=1)
    interpreter.allocate_tensors()
    return interpreter


class Conv(nn.Module):
    """A convolution with padding that is given as a word."""

    def __init__(self, rank: int, padding: str) -> None:
        super().__init__()
        self.conv = (nn.Conv1d if rank == 1 else nn.Conv2d)(2, 2, 2, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """Leave it float: the fault has nothing to do with integers."""
        return self.conv(x)  # type: ignore[no-any-return]


found = dict[tuple[int, str], str]()
for rank, padding in ((1, "same"), (1, "valid"), (2, "same"), (2, "valid")):
    try:
        convert(Conv(rank, padding), torch.zeros(1, 2, *[6] * rank))
        found[rank, padding] = "converted"
    except RuntimeError as error:
        found[rank, padding] = str(error)[:90]
print(f"rank and padding: {found}")
shown = found[2, "same"] == "converted" != found[1, "same"]
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
