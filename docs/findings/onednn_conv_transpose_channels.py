"""onednn, x86: a transposed convolution of C_in/groups != C_out/groups, both above 1, mixes up its weight."""

# finding: 7
# engine: onednn, x86
# claimed: transposed convolution of C_in/groups ≠ C_out/groups, both above 1
# fault of: kernel (packing)
# largest error: 234 LSB
# cpu: all
# claims: `nn.ConvTranspose?d*/*`, `torch.conv_transpose?d/*`
# reason: the packed weight is read with its channel axes exchanged

import torch
import torch.nn.functional as F

make = torch._make_per_tensor_quantized_tensor


def worst(engine: str, c_in: int, c_out: int, rank: int) -> float:
    """Largest distance, in steps of the output's scale, from the exact result of the same integers."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    x = torch.randint(0, 256, (1, c_in, *[3] * rank))
    w = torch.randint(-127, 128, (c_in, c_out, *[2] * rank))
    exact = getattr(F, f"conv_transpose{rank}d")(x.double(), w.double())
    scale = float(exact.abs().max()) / 120
    ones, zeros = [1] * rank, [0] * rank
    op = f"conv_transpose{rank}d"
    packed = getattr(torch.ops.quantized, op + "_prepack")(
        make(w.to(torch.int8), 1.0, 0), None, ones, zeros, zeros, ones, 1
    )
    found = getattr(torch.ops.quantized, op)(make(x.to(torch.uint8), 1.0, 0), packed, scale, 128).int_repr()
    return float((found - (exact / scale + 128)).abs().max())


for channels in ((2, 2), (1, 3), (3, 1), (2, 3), (4, 2), (16, 12)):
    errors = {
        f"{name} {rank}d": round(worst(name, *channels, rank), 1) for name in ("onednn", "x86") for rank in (1, 2, 3)
    }
    print(f"{channels[0]} to {channels[1]} channels, LSB:", errors)
torch.backends.quantized.engine = "onednn"
w = make(torch.arange(6, dtype=torch.int8).reshape(2, 3, 1, 1), 1.0, 0)  # (C_in, C_out, 1, 1)
packed = torch.ops.quantized.conv_transpose2d_prepack(w, None, [1, 1], [0, 0], [0, 0], [1, 1], 1)
x = make(torch.tensor([1, 10], dtype=torch.uint8).reshape(1, 2, 1, 1), 1.0, 0)
found = torch.ops.quantized.conv_transpose2d(x, packed, 1.0, 0).int_repr().flatten().tolist()
print("x = [1, 10], w = [[0, 1, 2], [3, 4, 5]]: found", found, "right [30, 41, 52]")
shown = found != [30, 41, 52]
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
