"""qnnpack: average pooling ignores count_include_pad=False and divisor_override."""

# finding: 3
# engine: qnnpack
# claimed: average pooling in 1-d and 2-d with `count_include_pad=False` or `divisor_override`
# fault of: kernel's dispatch
# largest error: 155 LSB
# cpu: all
# claims: `nn.AvgPool[12]d/*`, `F.avg_pool2d/*`, `torch.avg_pool1d/*`
# reason: count_include_pad and divisor_override are dropped

from typing import Any

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "qnnpack"
x = torch.full((1, 1, 4, 4), 100.0)
quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
cases: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"count_include_pad": True}),
    (1, {"count_include_pad": False}),
    (1, {"divisor_override": 3}),
    (0, {"divisor_override": 4}),
    (1, {"count_include_pad": False, "ceil_mode": True}),
)
shown = False
for padding, arguments in cases:
    right = F.avg_pool2d(x, 3, stride=2, padding=padding, **arguments).clamp(0, 255)
    found = F.avg_pool2d(quantized, 3, stride=2, padding=padding, **arguments).int_repr()
    worst = float((found - right).abs().max())
    print(f"{padding=}", arguments, "found", found.flatten().tolist(), f"worst {worst:.2f} LSB")
    shown |= worst > 1
found = F.avg_pool2d(torch.quantize_per_tensor(torch.ones(1, 1, 3, 3), 1 / 64, 0, torch.quint8), 3, divisor_override=4)
print("nine ones of scale 1/64, divisor_override=4: found", float(found.dequantize()), "right 2.25")
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
