"""TorchInductor: choose_qparams of a range that does not hold zero is not widened to it, as it is in eager mode."""

# finding: 54
# engine: inductor
# claimed: dynamic linear, of an input that is all positive, all negative or one number
# fault of: decomposition of choose_qparams
# largest error: as large as the values
# cpu: all
# claims: `*inear*/*` at dynamic
# reason: the range of a dynamic input is not widened to hold zero

import torch
import torch.ao.quantization.fx._decomposed

OPS = torch.ops.quantized_decomposed
BOUNDS = (0, 255)


def dynamically(x: torch.Tensor) -> torch.Tensor:
    """What a dynamic layer does to its input: quantize by the range found, and dequantize."""
    scale, zero_point = OPS.choose_qparams.tensor(x, *BOUNDS, 2.0**-12, torch.uint8)
    integers = OPS.quantize_per_tensor.tensor(x, scale, zero_point, *BOUNDS, torch.uint8)
    result: torch.Tensor = OPS.dequantize_per_tensor.tensor(integers, scale, zero_point, *BOUNDS, torch.uint8)
    return result


def far_off(*values: float) -> bool:
    """Print what each makes of the numbers; is inductor's more than a tenth off?"""
    x = torch.tensor(values)
    eager, compiled = dynamically(x), torch.compile(dynamically, fullgraph=True)(x)
    print(f"{x.tolist()}: eager {eager.tolist()} inductor {compiled.tolist()}")
    return float((eager - x).abs().max()) < 0.1 < float((compiled - x).abs().max())


right = not far_off(-1.0, 0.5, 2.0)
shown = right and all([far_off(1.0, 1.5, 2.0), far_off(-2.0, -1.5, -1.0), far_off(3.0, 3.0, 3.0)])
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
