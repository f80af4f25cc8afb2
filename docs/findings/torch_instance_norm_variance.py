"""All engines: instance_norm and group_norm of 512 and more elements lose the variance of values far from zero."""

import torch

make = torch._make_per_tensor_quantized_tensor
ops = torch.ops.quantized
largest = 0.0
for length in (496, 512, 1024, 65536):
    q = 255 - torch.arange(length).reshape(1, 1, 1, length) % 4  # 255, 254, 253, 252, …: variance 1.25
    x = make(q.to(torch.uint8), 0.01, 0)
    exact = (q - q.double().mean()) / 1.25**0.5 * 64 + 128
    found = {
        "instance_norm": ops.instance_norm(x, None, None, 1e-9, 1 / 64, 128),
        "group_norm": ops.group_norm(x, 1, None, None, 1e-9, 1 / 64, 128),
        "layer_norm": ops.layer_norm(x, [1, 1, length], None, None, 1e-9, 1 / 64, 128),
    }
    for name, y in found.items():
        error = float((y.int_repr() - exact.clamp(0, 255)).abs().max())
        print(f"{name} of {length} elements: {error:.1f} LSB from the exact result")
        largest = max(largest, error if name != "layer_norm" else 0.0)
print("the fault shows" if largest > 1 else "the fault does not show with this torch on this machine")
raise SystemExit(largest <= 1)
