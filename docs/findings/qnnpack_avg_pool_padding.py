"""qnnpack: average pooling ignores count_include_pad=False and divisor_override."""

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "qnnpack"
x = torch.full((1, 1, 4, 4), 100.0)
quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
for keywords in ({"count_include_pad": True}, {"count_include_pad": False}, {"divisor_override": 3}):
    expected = F.avg_pool2d(x, 3, stride=2, padding=1, **keywords).clamp(0, 255)
    found = F.avg_pool2d(quantized, 3, stride=2, padding=1, **keywords).int_repr()
    worst = float((found - expected).abs().max())
    print(keywords, "worst", round(worst, 2), "LSB")
    assert (worst > 1) == (keywords != {"count_include_pad": True}), "the finding no longer holds"
