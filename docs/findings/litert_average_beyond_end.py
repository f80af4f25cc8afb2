"""LiteRT: the converter rounds an average beyond the end before it scales it up."""

# finding: 117
# engine: litert
# claimed: average pooling with `ceil_mode`, where a window goes beyond the end
# fault of: converter
# largest error: 1.5 LSB
# cpu: all
# claims: `nn.AvgPool2d/*`, `F.avg_pool2d/*`
# reason: an average beyond the end is rounded with zeros in it, and scaled up after that

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
    """An average over windows of 2 × 3, of which the last one has a column in the image."""

    def forward(self, x: Tensor) -> Tensor:
        """Quantize the input and the averages."""
        return round_trip(nn.functional.avg_pool2d(round_trip(x, 1.0), (2, 3), ceil_mode=True), 1.0)


def run(interpreter: Interpreter, integers: Tensor) -> Tensor:
    """Return the integers that it makes of integers."""
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.set_tensor(given["index"], integers.to(torch.int8).numpy())
    interpreter.invoke()
    return torch.from_numpy(interpreter.get_tensor(made["index"]))


x = torch.tensor([[9, 9, 9, 1], [9, 9, 9, 2]]).reshape(1, 1, 2, 4).float()
interpreter = convert(Pool(), x)
found = run(interpreter, x).flatten().tolist()
ops = [op["op_name"] for op in interpreter._get_ops_details() if op["op_name"] != "DELEGATE"]
print(f"averages found {found}, exactly [9, 1.5], by {ops}")
shown = found[0] == 9 and abs(found[1] - 1.5) > 1
print("the fault shows" if shown else "the fault does not show")
raise SystemExit(not shown)
