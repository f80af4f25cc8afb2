"""qnnpack: the config claims qint8 activations for linear and convolutions; the kernels of this build refuse them."""

# finding: 1
# engine: qnnpack
# claimed: qint8 activations for linear and Conv1d/2d/3d, with and without batch norm and relu
# fault of: config (for this build)
# largest error: raises
# cpu: all
# claims: `nn.Linear/*`, `nn.Conv?d/*`, `F.linear/*`, `torch.conv?d/*` and those with norm and relu, at `in=qint8`
# reason: the wheels for x86 are built without XNNPACK, which serves qint8

import torch

torch.backends.quantized.engine = "qnnpack"
x = torch.quantize_per_tensor(torch.zeros(1, 2, 4, 4), 0.1, 0, torch.qint8)
weight = torch.quantize_per_tensor(torch.zeros(3, 2, 3, 3), 0.1, 0, torch.qint8)
packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 1)
matrix = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.zeros(3, 2), 0.1, 0, torch.qint8), None)
shown = False
for name, value, parameters in (("conv2d", x, packed), ("linear", x[0, :, 0, :].t().contiguous(), matrix)):
    try:
        print(name, "gives", getattr(torch.ops.quantized, name)(value, parameters, 0.1, 0).dtype)
    except RuntimeError as error:
        print(name, "raised:", str(error).splitlines()[0])
        shown = True
flags = torch.__config__.show()
print("built with XNNPACK:", "-DUSE_XNNPACK" in flags, "| with QNNPACK:", "-DUSE_PYTORCH_QNNPACK" in flags)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
