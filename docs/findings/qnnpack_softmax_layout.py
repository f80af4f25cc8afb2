"""qnnpack: softmax is wrong for a view that is not contiguous, and a negative dim that is not the innermost raises."""

# finding: 10
# engine: qnnpack
# claimed: softmax of a view that is not contiguous; negative `dim`
# fault of: kernel
# largest error: 224 LSB; raises
# cpu: all
# claims: `nn.Softmax/*`
# reason: softmax takes a view for a contiguous tensor, and raises for a negative dim

import torch

torch.backends.quantized.engine = "qnnpack"
torch.manual_seed(0)
x = torch.quantize_per_tensor(torch.randn(4, 6) * 2, 0.03, 128, torch.quint8)
shown = False
for name, value, dim in (
    ("contiguous, dim 1", x, 1),
    ("columns of a wider tensor, dim 1", torch.cat([x, x], 1).narrow(1, 0, 6), 1),
    ("transposed, dim 0", x.t(), 0),
    ("contiguous, dim 0", x, 0),
    ("contiguous, dim -2", x, -2),
):
    exact = torch.softmax(value.dequantize().double(), dim) * 256
    try:
        error = float(
            (torch.ops.quantized.softmax(value, dim, 1 / 256, 0).int_repr() - exact.clamp(0, 255)).abs().max()
        )
        print(f"{name}: {error:.2f} LSB")
        shown |= error > 1
    except IndexError as raised:
        print(f"{name}: raised {raised}")
        shown = True
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
