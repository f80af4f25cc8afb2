"""onednn, fbgemm, x86: dynamic modules quantize their input to 7 bits, whatever the QConfig says."""

# finding: 27
# engine: onednn, fbgemm, x86
# claimed: dynamic quantization to 0…255: 7 bits are taken
# fault of: lowering (modules)
# largest error: half of the steps
# cpu: all
# claims: `nn.Linear/*`, `nn.LSTM/*`, `nn.*Cell/*`, at `dynamic:in=quint8`
# reason: dynamic modules take 7 bits of their input

import torch
import torch.ao.nn.quantized.dynamic as nnqd
from torch import nn

x = torch.linspace(0.0, 1.0, 256).reshape(-1, 1)  # every step of 8 bits once
linear = nn.Linear(1, 1, bias=False)
linear.weight.data.fill_(1.0)
linear.qconfig = torch.ao.quantization.QConfig(  # type: ignore[assignment, no-untyped-call]
    activation=torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.quint8, quant_min=0, quant_max=255),
    weight=torch.ao.quantization.default_weight_observer,
)
steps = {}
for engine in ("onednn", "fbgemm", "x86", "qnnpack"):
    torch.backends.quantized.engine = engine
    module = nnqd.Linear.from_float(linear)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        steps[engine] = len(module(x).unique())
    packed = module._packed_params._packed_params
    full = len(torch.ops.quantized.linear_dynamic(x, packed, False).unique())
    print(f"{engine}: 256 values give {steps[engine]} in nnqd.Linear, {full} in linear_dynamic(reduce_range=False)")
shown = steps["onednn"] < 256
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
