"""All engines: adaptive_avg_pool3d of an unbatched tensor whose memory is channels_last reads it as contiguous."""

# finding: 20
# engine: all
# claimed: adaptive_avg_pool3d of an unbatched tensor in channels_last memory
# fault of: kernel
# largest error: 23 LSB
# cpu: all
# claims: `nn.AdaptiveAvgPool3d/*`, `F.adaptive_avg_pool3d/*`
# reason: an unbatched image in channels_last is read in another order

import torch
import torch.nn.functional as F

torch.manual_seed(0)
x = torch.quantize_per_tensor(torch.rand(3, 7, 9, 5), 1 / 255, 0, torch.quint8)  # (C, D, H, W)
right = F.adaptive_avg_pool3d(x.dequantize(), 2)
errors = {}
for layout in (torch.contiguous_format, torch.channels_last):
    found = F.adaptive_avg_pool3d(x.contiguous(memory_format=layout), 2)
    errors[layout] = float((found.dequantize() - right).abs().max() * 255)
    print(f"{layout}: {errors[layout]:.1f} LSB")
shown = errors[torch.channels_last] > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
