"""qnnpack built with XNNPACK: a qint8 linear of an input in channels_last memory multiplies what lies there in order.

The wheels of torch 2.6 to 2.12 have XNNPACK, 2.13's do not.
"""

# finding: 75
# engine: qnnpack built with XNNPACK
# claimed: qint8 linear of an input in channels_last memory
# fault of: kernel's dispatch
# largest error: 7 LSB: as large as the values
# cpu: torch 2.6 to 2.12, all
# claims: `*Linear*/*`, `F.linear*/*`, at `in=qint8`
# reason: XNNPACK reads channels_last memory in another order

import torch

NEEDS_ANOTHER_BUILD = 77

if "-DUSE_XNNPACK" not in torch.__config__.show():
    print(f"torch {torch.__version__} is built without XNNPACK; the wheels of 2.6 to 2.12 are built with it")
    raise SystemExit(NEEDS_ANOTHER_BUILD)
torch.backends.quantized.engine = "qnnpack"
x = torch.quantize_per_tensor(torch.arange(16.0).reshape(1, 2, 2, 4), 1.0, 0, torch.qint8)
weight = torch.quantize_per_tensor(torch.eye(4), 1.0, 0, torch.qint8)
wrong = 0
for name in ("linear", "linear_relu"):
    packed = torch.ops.quantized.linear_prepack(weight, None)
    linear = getattr(torch.ops.quantized, name)
    right = linear(x, packed, 1.0, 0).int_repr()
    found = linear(x.contiguous(memory_format=torch.channels_last), packed, 1.0, 0).int_repr()
    steps = int((found.int() - right.int()).abs().max())
    print(f"{name} by the unit matrix: {found.flatten().tolist()}; right: {right.flatten().tolist()}; {steps} LSB")
    wrong += steps > 0
print("the fault shows" if wrong else "the fault does not show with this torch on this machine")
raise SystemExit(not wrong)
