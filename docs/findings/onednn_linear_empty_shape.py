"""onednn: linear of an empty batch with more than two axes loses the axes between."""

# finding: 24
# engine: onednn
# claimed: linear of an empty batch with 3 axes or more
# fault of: kernel
# largest error: wrong shape
# cpu: all
# claims: `nn.Linear*/*`, `F.linear*/*`
# reason: an empty batch of rank 3 has another shape

import torch

torch.backends.quantized.engine = "onednn"
weight = torch.quantize_per_tensor(torch.ones(5, 4), 0.01, 0, torch.qint8)
shown = False
for shape in ((0, 4), (0, 3, 4), (2, 3, 4)):
    x, right = torch.zeros(shape), (*shape[:-1], 5)
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    static = torch.ops.quantized.linear(quantized, torch.ops.quantized.linear_prepack(weight, None), 0.1, 0)
    dynamic = torch.ops.quantized.linear_dynamic(x, torch.ops.quantized.linear_prepack(weight, None), False)
    print(shape, "static", tuple(static.shape), "dynamic", tuple(dynamic.shape), "right", right)
    shown |= tuple(static.shape) != right
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
