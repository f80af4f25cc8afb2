"""qnnpack: conv_transpose with a weight per output channel (axis 1) and groups reads scales beyond their end."""

# finding: 18
# engine: qnnpack
# claimed: conv_transpose with a weight per channel of axis 1 and groups
# fault of: kernel
# largest error: raises
# cpu: all
# claims: `torch.conv_transpose?d/*`, `nn.ConvTranspose?d*/*`
# reason: too few scales are read for groups

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "qnnpack"
shown = False
for rank in (1, 2):
    for groups in (1, 2):
        torch.manual_seed(0)
        channels = 4 // groups
        scales = torch.linspace(0.002, 0.006, channels)
        x = torch.quantize_per_tensor(torch.rand(1, 4, *[4] * rank), 1 / 255, 0, torch.quint8)
        w = torch.rand(4, channels, *[2] * rank) - 0.5
        weight = torch.quantize_per_channel(w, scales, torch.zeros(channels, dtype=torch.int64), 1, torch.qint8)
        op, ones, zeros = f"conv_transpose{rank}d", [1] * rank, [0] * rank
        packed = getattr(torch.ops.quantized, op + "_prepack")(weight, None, ones, zeros, zeros, ones, groups)
        exact = getattr(F, op)(x.dequantize(), weight.dequantize(), groups=groups)
        try:
            error = (getattr(torch.ops.quantized, op)(x, packed, 0.02, 128).dequantize() - exact).abs().max() / 0.02
            print(f"{op}, {groups} groups: {float(error):.2f} LSB")
            shown |= float(error) > 1
        except RuntimeError as raised:
            print(f"{op}, {groups} groups: raised", str(raised).splitlines()[0][:100])
            shown |= groups > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
