"""qnnpack: dynamic LSTM with proj_size multiplies matrices of shapes that do not fit: NaN or whatever memory holds.

The other engines raise for it: no quantized LSTM of torch has a projection.
"""

# finding: 25
# engine: qnnpack
# claimed: dynamic LSTM with proj_size
# fault of: module
# largest error: wrong shape and values
# cpu: all
# claims: `nn.LSTM/*`

import torch
import torch.ao.nn.quantized.dynamic as nnqd
from torch import nn

torch.manual_seed(0)
lstm = nn.LSTM(16, 8, proj_size=4)
lstm.qconfig = torch.ao.quantization.default_dynamic_qconfig
x = torch.randn(6, 3, 16)
right = lstm(x)[0]
shown = False
for engine in ("qnnpack", "fbgemm", "x86", "onednn"):
    torch.backends.quantized.engine = engine
    try:
        found = nnqd.LSTM.from_float(lstm)(x)[0]  # type: ignore[no-untyped-call]
        print(f"{engine}: shape {tuple(found.shape)} right {tuple(right.shape)};", found.flatten()[:4].tolist())
        shown |= found.shape != right.shape or not bool((found - right).abs().max() < 0.1)
    except RuntimeError as raised:
        print(f"{engine}: raised", str(raised).splitlines()[0][:90])
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
