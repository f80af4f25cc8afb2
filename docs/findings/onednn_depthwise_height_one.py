"""onednn, x86: depthwise convolution of kernel height 1, padded in height alone, is wrong for a zero point not 0.

It takes a CPU with AVX-512 VNNI, and ends with 77 on another.
"""

# finding: 12
# engine: onednn; x86 up to 100 groups; inductor
# claimed: depthwise Conv2d/3d padded in all axes but the last, kernel 1 there; zero point not 0
# fault of: kernel
# largest error: 120 LSB
# cpu: AVX-512 VNNI only
# claims: `*Conv*2d*/*`, `*Conv*3d*/*`, `torch.conv[23]d*/*`
# reason: depthwise convolutions of height 1, padded in height alone

import torch
import torch.nn.functional as F

if not torch.cpu._is_vnni_supported():
    print("this CPU has no AVX-512 VNNI: nothing to show")
    raise SystemExit(77)
make = torch._make_per_tensor_quantized_tensor


def worst(engine: str, groups: int, kernel: tuple[int, int], padding: tuple[int, int], zero_point: int) -> float:
    """Largest distance, in steps of the output's scale, from the exact result of the same integers."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    x, w = torch.randint(0, 256, (1, groups, 5, 5)), torch.randint(-127, 128, (groups, 1, *kernel))
    exact = F.conv2d((x - zero_point).double(), w.double(), padding=padding, groups=groups)
    scale = float(exact.abs().max()) / 120
    weight = make(w.to(torch.int8), 1.0, 0)
    packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], list(padding), [1, 1], groups)
    found = torch.ops.quantized.conv2d(make(x.to(torch.uint8), 1.0, zero_point), packed, scale, 128).int_repr()
    return float((found - (exact / scale + 128)).abs().max())


for case in (
    (32, (1, 2), (1, 0), 100),
    (32, (1, 1), (2, 0), 100),
    (32, (1, 2), (1, 0), 0),
    (32, (1, 2), (1, 1), 100),
    (32, (2, 2), (1, 0), 100),
    (24, (1, 2), (1, 0), 100),
):
    errors = {engine: round(worst(engine, *case), 1) for engine in ("onednn", "x86")}
    print("groups {}, kernel {}, padding {}, zero point {}:".format(*case), errors, "LSB")
shown = worst("onednn", 32, (1, 2), (1, 0), 100) > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
