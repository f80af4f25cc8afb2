"""qnnpack: max pooling with dilation takes values that lie outside the window, at padded borders."""

# finding: 2
# engine: qnnpack
# claimed: max pooling in 1-d and 2-d, with dilation and padding
# fault of: kernel
# largest error: 255 LSB
# cpu: all
# claims: `nn.MaxPool[12]d/*`, `F.max_pool[12]d/*`
# reason: a dilated window reads rows that it skips

import torch
import torch.nn.functional as F

x = torch.zeros(1, 1, 7, 7)
x[:, :, 0] = 255.0  # the windows of the first output row cover the rows -1, 1, 3: none of them this one
quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
right = F.max_pool2d(x, 3, stride=2, padding=1, dilation=2)
print("right", right.flatten().int().tolist())
errors = {}
for engine in ("qnnpack", "fbgemm"):
    torch.backends.quantized.engine = engine
    found = F.max_pool2d(quantized, 3, stride=2, padding=1, dilation=2).int_repr()
    errors[engine] = int((found - right).abs().max())
    print(engine, "worst", errors[engine], "LSB; found", found.flatten().tolist())
shown = errors["qnnpack"] > 0
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
