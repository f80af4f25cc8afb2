"""qnnpack: ConvTranspose3d computes the first slice of the output's depth; the others are what memory held."""

# finding: 8
# engine: qnnpack
# claimed: ConvTranspose3d with an output deeper than 1
# fault of: kernel
# largest error: all of the value; not repeatable
# cpu: all
# claims: `nn.ConvTranspose3d*/*`, `torch.conv_transpose3d/*`
# reason: the output is written at depth 0 only

import torch

torch.backends.quantized.engine = "qnnpack"
make = torch._make_per_tensor_quantized_tensor
x = torch.arange(1, 9, dtype=torch.uint8).reshape(1, 1, 2, 2, 2)
one = make(torch.ones(1, 1, 1, 1, 1, dtype=torch.int8), 1.0, 0)
packed = torch.ops.quantized.conv_transpose3d_prepack(one, None, [1] * 3, [0] * 3, [0] * 3, [1] * 3, 1)
print("right", x.flatten().tolist())
shown = False
for value in (0, 37, 255):
    torch.full((4096,), value, dtype=torch.uint8)  # made and dropped: memory that the next tensor may get
    found = torch.ops.quantized.conv_transpose3d(make(x, 1.0, 0), packed, 1.0, 0).int_repr()
    print("found", found.flatten().tolist())
    shown |= not torch.equal(found, x)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
