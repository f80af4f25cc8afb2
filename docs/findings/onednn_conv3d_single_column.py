"""onednn, x86: Conv3d whose output is one column wide is wrong on a CPU with AMX.

It takes a CPU with AMX, and ends with 77 on another.
"""

# finding: 37
# engine: onednn, x86
# claimed: Conv3d whose output is one column wide, stride above 1 there
# fault of: kernel
# largest error: 137 LSB
# cpu: AMX only
# claims: `*Conv*3d*/*`, `torch.conv3d*/*`
# reason: one output column with AMX

import torch
import torch.nn.functional as F

if not torch.cpu._is_amx_tile_supported():
    print("this CPU has no AMX: nothing to show")
    raise SystemExit(77)
torch.set_num_threads(1)  # with more, other shapes are wrong
make = torch._make_per_tensor_quantized_tensor


def worst(engine: str, shape: tuple[int, int, int], stride: tuple[int, int, int], kernel: int = 3) -> float:
    """Largest distance, in steps of the output's scale, from the exact result of the same integers."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    x, w = torch.randint(0, 256, (1, 1, *shape)), torch.randint(-127, 128, (1, 1, *[kernel] * 3))
    exact = F.conv3d(x.double(), w.double(), stride=stride)
    scale = float(exact.abs().max()) / 120
    weight = make(w.to(torch.int8), 1.0, 0)
    packed = torch.ops.quantized.conv3d_prepack(weight, None, list(stride), [0, 0, 0], [1, 1, 1], 1)
    found = torch.ops.quantized.conv3d(make(x.to(torch.uint8), 1.0, 0), packed, scale, 128).int_repr()
    return float((found - (exact / scale + 128)).abs().max())


largest = 0.0
for case in (
    ((4, 5, 3), (1, 1, 3)),
    ((5, 6, 5), (1, 1, 3)),
    ((7, 6, 4), (1, 1, 2)),
    ((7, 6, 6), (1, 1, 4)),
    ((7, 6, 6), (1, 1, 3)),
    ((7, 6, 3), (1, 1, 1)),
    ((3, 3, 5), (1, 1, 3)),
    ((5, 6, 5), (1, 1, 5), 2),
):
    errors = {engine: round(worst(engine, *case), 1) for engine in ("onednn", "x86")}
    print("input {}, stride {}, kernel {}:".format(*case[:2], case[2] if len(case) > 2 else 3), errors, "LSB")
    largest = max(largest, errors["onednn"])
shown = largest > 1
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
