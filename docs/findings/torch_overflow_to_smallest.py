"""All engines: a value beyond 2**31 output steps becomes the smallest integer, not the largest, in vector code.

It takes a vectorized build of torch's kernels (AVX2 or AVX-512), and ends with 77 on another.
"""

# finding: 21
# engine: all; x86 and onednn convolutions and onednn linear are right
# claimed: results beyond 2³¹ output steps: 0 in place of 255
# fault of: kernel
# largest error: 255 LSB
# cpu: AVX2, AVX-512; not the scalar code
# claims: `operator.mul*/*`, `operator.add*/*`, `nn.ELU/*`, `nn.LeakyReLU/*`, `nn.Linear*/*`

from collections.abc import Callable

import torch

if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
    print("torch runs its scalar kernels here: nothing to show")
    raise SystemExit(77)
x = torch.quantize_per_tensor(torch.full((70,), 510.0), 2.0, 0, torch.quint8)  # 70 elements: vectors, and a tail
calls: tuple[tuple[str, Callable[[float], torch.Tensor]], ...] = (
    ("add", lambda s: torch.ops.quantized.add(x, x, s, 128)),
    ("mul", lambda s: torch.ops.quantized.mul(x, x, s, 128)),
    ("hardswish", lambda s: torch.ops.quantized.hardswish(x, s, 128)),
    ("leaky_relu", lambda s: torch.ops.quantized.leaky_relu(x, 0.1, False, s, 128)),
    ("elu", lambda s: torch.ops.quantized.elu(x, s, 128, 1.0, 1.0, 1.0)),
)
shown = False
for scale in (2.0**-20, 2.0**-23):  # the second is the eps of torch's observers
    for name, call in calls:
        for engine in ("fbgemm", "qnnpack"):
            if engine == "qnnpack" and name == "add":
                continue  # its own kernel bounds the ratio of scales: finding 5
            torch.backends.quantized.engine = engine
            found = call(scale).int_repr()
            print(f"{engine} {name}, output scale {scale:.3g}: {sorted(set(found.tolist()))} right [255]")
            shown |= bool((found != 255).any())
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
