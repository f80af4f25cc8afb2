"""qnnpack: max pooling with dilation takes values that lie outside the window, at padded borders."""

import torch
import torch.nn.functional as F

x = torch.arange(49.0).reshape(1, 1, 7, 7)
quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
expected = F.max_pool2d(x, 3, stride=2, padding=1, dilation=2)
for engine in ("qnnpack", "fbgemm"):
    torch.backends.quantized.engine = engine
    found = F.max_pool2d(quantized, 3, stride=2, padding=1, dilation=2).int_repr()
    print(engine, "worst", int((found - expected).abs().max()), "LSB; found", found.flatten().tolist())
print("expected", expected.flatten().int().tolist())
torch.backends.quantized.engine = "qnnpack"
found = F.max_pool2d(quantized, 3, stride=2, padding=1, dilation=2).int_repr()
assert not torch.equal(found.float(), expected), "the finding no longer holds"
