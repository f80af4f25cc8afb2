"""LiteRT: an int8 add whose inputs are far coarser than its output wraps around in 16 bits."""

# finding: 116
# engine: litert
# claimed: add where a scale of an input is 256 times that of the output, or more
# fault of: kernel (built-in)
# largest error: 255 LSB
# cpu: all
# claims: `operator.add*/*`, `torch.add*/*`
# reason: an add wraps around where an input's scale is 256 times the output's, or more

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


class Twice(nn.Module):
    """x + x on a fine grid."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input with scale 1, and the sum."""
        x = round_trip(x, 1.0)
        return round_trip(x + x, self.scale)


def run(interpreter: Interpreter, integers: Tensor) -> Tensor:
    """Return the integers that it makes of integers."""
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(given["index"], integers.to(torch.int8).numpy())
    interpreter.invoke()
    return torch.from_numpy(interpreter.get_tensor(made["index"]))


x, found = torch.arange(-128, 128).reshape(1, 16, 16).float(), {}
for ratio in (64, 128, 255, 256, 4096):
    model = Twice(1 / ratio)
    difference = run(convert(model, x), x).int() - (model(x) * ratio).round().int()
    found[ratio] = int(difference.abs().max())
print(f"s_in / s_out: largest difference: {found}")
shown = list(found.values()) == [0, 0, 0, 255, 255]
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
