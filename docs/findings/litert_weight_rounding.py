"""LiteRT: the converter rounds float weights by itself, ties away from zero."""

# finding: 115
# engine: litert
# claimed: weights that lie on a tie
# fault of: converter
# largest error: 1 step of the weight
# cpu: all
# claims: none: the backend lays weights on their grid
# reason: the converter rounds ties of a weight away from zero

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


class Rows(nn.Module):
    """A linear layer of one input, whose weights are -0.5, 1.5 and 2.5 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[-0.5], [1.5], [2.5]]) / 64)

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input, the weight and the result."""
        return round_trip(nn.functional.linear(round_trip(x, 1.0), round_trip(self.weight, 1 / 64)), 1.0)


def run(interpreter: Interpreter, integers: Tensor) -> Tensor:
    """Return the integers that it makes of integers."""
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(given["index"], integers.to(torch.int8).numpy())
    interpreter.invoke()
    return torch.from_numpy(interpreter.get_tensor(made["index"]))


model, x = Rows(), torch.full((1, 1), 64.0)
right, found = model(x).int().tolist()[0], run(convert(model, x), x).tolist()[0]
print(f"weights of -0.5, 1.5 and 2.5 steps become {found}, right are {right}")
shown = found == [-1, 2, 3] and right == [0, 2, 2]
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
