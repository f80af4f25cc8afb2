"""qnnpack: a bias is held as int32 of scale s_x·s_w, and saturates at 2**31; fbgemm keeps it in float."""

# finding: 23
# engine: qnnpack
# claimed: a bias beyond 2³¹ steps of s_x·s_w
# fault of: kernel (format)
# largest error: 150 LSB
# cpu: all
# claims: `*Linear*/*`, `*Conv*/*`, `F.linear*/*`, `torch.conv*/*`

import torch

x = torch.quantize_per_tensor(torch.zeros(1, 4), 0.01, 0, torch.quint8)
weight = torch.quantize_per_tensor(torch.ones(1, 4), 0.01, 0, torch.qint8)
errors = {}
for engine in ("qnnpack", "fbgemm"):
    torch.backends.quantized.engine = engine
    for exponent in (30, 33):
        bias = 1e-4 * 2.0**exponent
        packed = torch.ops.quantized.linear_prepack(weight, torch.tensor([bias]))
        found = int(torch.ops.quantized.linear(x, packed, bias / 200, 0).int_repr())
        print(f"{engine}: bias = 2**{exponent}·s_x·s_w: found {found} right 200")
        errors[engine, exponent] = abs(found - 200)
shown = errors["qnnpack", 33] > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
