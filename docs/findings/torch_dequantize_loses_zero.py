"""All engines: vector code takes q·s - z·s for (q - z)·s, with z·s rounded: an exact zero is not zero, by s·z·2**-24.

It takes a vectorized build of torch's kernels (AVX2 or AVX-512), and ends with 77 on another.
"""

# finding: 22
# engine: all
# claimed: hardswish, leaky_relu, elu of small values at a far smaller output scale
# fault of: kernel
# largest error: 26 LSB
# cpu: AVX2, AVX-512; not the scalar code
# claims: `nn.Hardswish/*`, `F.hardswish/*`, `*eaky*elu*/*`, `*.[eE][lL][uU]/*`

from collections.abc import Callable

import torch

if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
    print("torch runs its scalar kernels here: nothing to show")
    raise SystemExit(77)
x = torch._make_per_tensor_quantized_tensor(torch.full((70,), 255, dtype=torch.uint8), 0.3, 255)  # zeros, all of them
calls: tuple[tuple[str, Callable[[float], torch.Tensor]], ...] = (
    ("hardswish", lambda s: torch.ops.quantized.hardswish(x, s, 128)),
    ("leaky_relu", lambda s: torch.ops.quantized.leaky_relu(x, 1.0, False, s, 128)),
    ("elu", lambda s: torch.ops.quantized.elu(x, s, 128, 1.0, 1.0, 1.0)),
)
shown = False
for scale in (2.0**-12, 2.0**-23):
    for name, call in calls:
        torch.backends.quantized.engine = "fbgemm"
        found = call(scale).int_repr()
        print(f"{name} of 70 zeros, output scale {scale:.3g}: {sorted(set(found.tolist()))} right [128]")
        shown |= bool((found != 128).any())
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
