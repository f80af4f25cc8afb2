"""onednn: conv2d_add and conv2d_add_relu write their result into the summand, which other ops may still read."""

# finding: 16
# engine: onednn
# claimed: conv + add, conv + add + relu: the summand is overwritten
# fault of: kernel, or config that fuses it
# largest error: 96 LSB behind it
# cpu: all
# claims: `*.add(*Conv2d*/*`, `nni.ConvAdd*/*`
# reason: conv + add writes into its summand

import torch

torch.backends.quantized.engine = "onednn"
make = torch._make_per_tensor_quantized_tensor
weight = make(torch.ones(4, 4, 1, 1, dtype=torch.int8), 1 / 64, 0)
packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [0, 0], [1, 1], 1)
x = make(torch.full((1, 4, 2, 2), 64, dtype=torch.uint8), 1 / 64, 0)
shown = False
for layout in (torch.contiguous_format, torch.channels_last):  # channels_last is what every quantized conv2d gives
    for name in ("conv2d_add", "conv2d_add_relu"):
        summand = make(torch.full((1, 4, 2, 2), 32, dtype=torch.uint8), 1 / 64, 0).contiguous(memory_format=layout)
        getattr(torch.ops.quantized, name)(x, summand, packed, 1 / 64, 0)
        after = summand.int_repr().flatten()[:4].tolist()
        print(f"{name}, summand {layout}: 32 before; after", after)
        shown |= after != [32] * 4
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
