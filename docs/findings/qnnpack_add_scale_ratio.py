"""qnnpack: add refuses an output scale more than 2**8 times smaller than an input's; the config states no bound."""

# finding: 5
# engine: qnnpack
# claimed: add and add + relu of quint8, any scales
# fault of: config
# largest error: raises
# cpu: all
# claims: `operator.add*/*`, `torch.add*/*`
# reason: add bounds the ratio of scales

import torch

torch.backends.quantized.engine = "qnnpack"
shown = False
for exponent in (7, 8, 9, -13, -14, -15):
    x = torch.quantize_per_tensor(torch.zeros(4), 2.0**exponent, 0, torch.quint8)
    for name in ("add", "add_relu"):
        try:
            getattr(torch.ops.quantized, name)(x, x, 1.0, 0)
            outcome = "runs"
        except RuntimeError as error:
            outcome = f"raised: {str(error).splitlines()[0][:60]}"
            shown = True
        print(f"{name:8} input scale / output scale = 2**{exponent}: {outcome}")
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
