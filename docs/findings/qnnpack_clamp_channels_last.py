"""qnnpack: relu6, hardtanh and clamp of a channels_last tensor write their values in the order of contiguous memory."""

# finding: 9
# engine: qnnpack
# claimed: relu6, hardtanh, clamp of a quint8 tensor in channels_last memory
# fault of: kernel
# largest error: 96 LSB
# cpu: all
# claims: `nn.ReLU6/*`, `F.relu6/*`, `nn.Hardtanh/*`, `F.hardtanh*/*`, `torch.clamp/*`, `.clamp/*`
# reason: clamps ignore the memory format

import torch
import torch.nn.functional as F

torch.backends.quantized.engine = "qnnpack"
make = torch._make_per_tensor_quantized_tensor
torch.manual_seed(0)
shown = False
for dtype, storage in ((torch.quint8, torch.uint8), (torch.qint8, torch.int8)):
    x = make(torch.randint(0, 128, (1, 8, 4, 4)).to(storage), 1 / 16, 10)
    last = x.contiguous(memory_format=torch.channels_last)
    for name, function in (
        ("relu6", torch.ops.quantized.relu6),
        ("hardtanh", lambda value: F.hardtanh(value, -0.5, 5.0)),
        ("clamp", lambda value: torch.clamp(value, -0.5, 5.0)),
    ):
        error = int((function(last).int_repr().int() - function(x).int_repr().int()).abs().max())
        print(dtype, name, "channels_last against contiguous:", error, "LSB, right 0")
        shown |= error > 0
weight = make(torch.randint(-9, 10, (8, 8, 3, 3)).to(torch.int8), 1 / 64, 0)
packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 1)
y = torch.ops.quantized.conv2d(make(torch.randint(0, 256, (1, 8, 6, 6)).to(torch.uint8), 1 / 16, 128), packed, 0.1, 100)
error = int((F.hardtanh(y).int_repr().int() - F.hardtanh(y.contiguous()).int_repr().int()).abs().max())
print("conv2d's output is channels_last:", not y.is_contiguous(), "| conv2d, then hardtanh:", error, "LSB")
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
