"""qnnpack: the config claims MaxPool3d; the engine has no kernel for it."""

# finding: 4
# engine: qnnpack
# claimed: MaxPool3d, `F.max_pool3d`
# fault of: config
# largest error: raises
# cpu: all
# claims: `nn.MaxPool3d/*`, `F.max_pool3d/*`
# reason: no MaxPool3d kernel

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "qnnpack"
shown = False
for dtype in (torch.quint8, torch.qint8):
    x = torch.quantize_per_tensor(torch.zeros(1, 1, 4, 4, 4), 0.1, 0, dtype)
    try:
        print(dtype, "gives shape", tuple(F.max_pool3d(x, 2).shape))
    except RuntimeError as error:
        print(dtype, "raised:", str(error).splitlines()[0])
        shown = True
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
