"""LiteRT: the converter fails on an average pool of an image without a batch."""

# finding: 118
# engine: litert
# claimed: average pooling of an input without a batch
# fault of: converter
# largest error: raises
# cpu: all
# claims: `*vg*ool2d/*`
# reason: an average pool without a batch is not converted

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


class Pool(nn.Module):
    """An average over windows."""

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input and the averages."""
        return round_trip(nn.functional.avg_pool2d(round_trip(x, 1.0), 2), 1.0)


convert(Pool(), torch.zeros(1, 3, 4, 4))
try:
    convert(Pool(), torch.zeros(3, 4, 4))
    shown = False
except ValueError as error:
    print(f"with a batch it is converted; without one: {str(error).splitlines()[-1].strip()}")
    shown = "perm tensor elements size" in str(error)
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
