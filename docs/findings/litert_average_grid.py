"""LiteRT: an average on a grid of its own is rounded to the grid of the input first."""

# finding: 123
# engine: litert
# claimed: none; average pooling whose result has another scale than its input
# fault of: converter
# largest error: 2 LSB
# cpu: all
# claims: none: a claimed average shares its input's qparams
# reason: an average with a grid of its own is rounded on the grid of its input first

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
    """An average of four values, with a finer grid than they have."""

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input in steps of 1, and the average in steps of 1 / 4."""
        return round_trip(nn.functional.avg_pool2d(round_trip(x, 1.0), 2), 0.25)


def run(interpreter: Interpreter, integers: Tensor) -> Tensor:
    """Return the integers that it makes of integers."""
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(given["index"], integers.to(torch.int8).numpy())
    interpreter.invoke()
    return torch.from_numpy(interpreter.get_tensor(made["index"]))


x = torch.tensor([[1, 1], [0, 0]]).reshape(1, 1, 2, 2).float()
interpreter = convert(Pool(), x)
found = run(interpreter, x).item()
ops = [op["op_name"] for op in interpreter._get_ops_details() if op["op_name"] != "DELEGATE"]
print(f"the average of 1, 1, 0 and 0 in steps of 1 / 4: found {found}, right 2, by {ops}")
shown = found in (0, 4)
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
