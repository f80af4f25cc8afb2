"""All engines: PReLU multiplies positive values by "1" as its weight's scale can write it: often the weight."""

# finding: 11
# engine: all
# claimed: PReLU whose weight stays below 1
# fault of: kernel and module
# largest error: 95 LSB
# cpu: all
# claims: `nn.PReLU/*`
# reason: PReLU is left in float, or its slope is 1

import torch

shown = False
x = torch.quantize_per_tensor(torch.tensor([[-2.0, -1.0, 0.0, 1.0, 2.0]]), 1 / 64, 128, torch.quint8)
for largest in (0.25, 0.5, 1.0):
    # what MinMaxObserver gives for a weight of this value: scale = value / 255, zero point 0
    weight = torch.quantize_per_tensor(torch.tensor([largest]), largest / 255, 0, torch.quint8)
    found = torch.ops.quantized.prelu(x, weight, 1 / 64, 128)
    exact = torch.where(x.dequantize() > 0, x.dequantize(), x.dequantize() * weight.dequantize())
    error = float((found.dequantize() - exact).abs().max()) * 64
    print(f"weight {largest}: found {found.dequantize().tolist()[0]} right {exact.tolist()[0]}: {error:.1f} LSB")
    shown |= error > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
