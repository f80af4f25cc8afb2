"""All engines: add and mul of a tensor and a number take no output scale: the kernel chooses its own."""

# finding: 29
# engine: all
# claimed: add and mul of a tensor and a number: no output qparams
# fault of: kernel (signature)
# largest error: 0.5 LSB, on a grid other than the observer's
# cpu: all
# claims: `operator.add*/*`, `torch.add*/*`, `operator.mul*/*`, `torch.mul*/*`
# reason: a number as operand has no output qparams

import torch

x = torch._make_per_tensor_quantized_tensor(torch.full((1,), 64, dtype=torch.uint8), 1 / 64, 0)  # 1.0
shown = False
for engine in ("qnnpack", "fbgemm", "x86", "onednn"):
    torch.backends.quantized.engine = engine
    for name, number, right in (("add", 2.0, 3.0), ("add", 0.7, 1.7), ("add", -0.5, 0.5), ("mul", 3.0, 3.0)):
        found = getattr(torch.ops.quantized, name)(x, number)
        value, grid = float(found.dequantize()), f"scale 1/{1 / found.q_scale():.2f} zero point {found.q_zero_point()}"
        print(f"{engine} {name}(1.0, {number}) = {value:.5f} right {right}; {grid}")
        shown |= abs(value - right) > 1e-6
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
