"""All engines: the scale of a dynamically quantized input is at least 6.1e-5, so that small inputs lose their bits."""

# finding: 28
# engine: all
# claimed: dynamic quantization of inputs of a range below 255·6.1·10⁻⁵
# fault of: kernel
# largest error: all of the value
# cpu: all
# claims: `nn.Linear*/*`, `F.linear*/*`, at `dynamic:in=quint8`

import torch

shown = False
for engine in ("qnnpack", "fbgemm", "x86", "onednn"):
    torch.backends.quantized.engine = engine
    weight = torch.quantize_per_tensor(torch.ones(1, 1), 1 / 64, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    for largest in (1.0, 1e-2, 1e-3, 1e-5):
        x = torch.linspace(0.0, largest, 256).reshape(-1, 1)
        found = torch.ops.quantized.linear_dynamic(x, packed, False)
        error = float((found - x).abs().max()) / largest * 255
        print(
            f"{engine}, inputs 0..{largest}: {len(found.unique())} values, largest error {error:.1f} steps of range/255"
        )
        shown |= error > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
