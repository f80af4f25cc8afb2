"""fbgemm, and x86 beyond 100 groups: depthwise convolutions saturate int16 sums of two products of all 8 bits."""

# finding: 6
# engine: fbgemm; x86 beyond 100 groups, or with an affine weight
# claimed: depthwise Conv2d/3d, groups a multiple of 8, activations over all 8 bits
# fault of: config, for this kernel
# largest error: 30 LSB and more
# cpu: all
# claims: `*Conv*2d*/*`, `*Conv*3d*/*`, `torch.conv[23]d*/*`
# reason: depthwise kernels saturate sums of two products

import torch
import torch.nn.functional as F

make = torch._make_per_tensor_quantized_tensor


def worst(
    engine: str = "fbgemm",
    rank: int = 2,
    groups: int = 8,
    high: int = 255,
    weight: int = 127,
    kernel: int = 3,
    padding: int = 1,
    zero_point: int = 0,
) -> float:
    """Print and return the largest distance, in steps of the output's scale, from the exact result."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    x = torch.randint(0, high + 1, (1, groups, *[6] * rank))
    w = torch.randint(-weight, weight + 1, (groups, 1, *[kernel] * rank))
    exact = getattr(F, f"conv{rank}d")((x - zero_point).double(), w.double(), padding=padding, groups=groups)
    scale = float(exact.abs().max()) / 120
    ones, op = [1] * rank, f"conv{rank}d"
    packed = getattr(torch.ops.quantized, op + "_prepack")(
        make(w.to(torch.int8), 1.0, 0), None, ones, [padding] * rank, ones, groups
    )
    found = getattr(torch.ops.quantized, op)(make(x.to(torch.uint8), 1.0, zero_point), packed, scale, 128).int_repr()
    error = float((found - (exact / scale + 128)).abs().max())
    print(f"{engine} conv{rank}d {groups=} {high=} {weight=} {kernel=} {padding=} {zero_point=}: {error:.2f} LSB")
    return error


shown = worst() > 1
worst(high=127)
worst(weight=63)
worst(high=127, zero_point=255)  # padding holds the zero point, 255
worst(groups=4)
worst(kernel=2)
worst(padding=0)
worst(rank=3, groups=16)
worst(engine="x86")
worst(engine="x86", groups=104)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
