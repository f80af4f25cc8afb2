"""All engines: the quantized norms take the variance as E[x²] - E[x]² in float32; in channels_last the sums are too."""

# finding: 36
# engine: all
# claimed: instance_norm, group_norm, layer_norm: a spread below a step far from the zero point; in channels_last 512
#   and more elements a channel of a few steps
# fault of: kernel
# largest error: 122 LSB
# cpu: all
# claims: `nn.InstanceNorm?d/*`, `F.instance_norm/*`, `*ayer*orm/*`
# reason: the variance is a difference of large numbers

import torch

make = torch._make_per_tensor_quantized_tensor
ops = torch.ops.quantized
SCALE, ZERO, EPS = 1 / 64, 128, 1e-5


def kernel_model(q: torch.Tensor, running: bool) -> torch.Tensor:
    """What the kernels are found to do, for one channel with input scale 1 and zero point 0."""
    x = q.flatten().double()
    mean_square = (x * x).sum().float() / len(x)  # integer sums, which are exact
    if running:  # the sum of squares is rounded to float32 after each element
        total = torch.tensor(0.0)
        for value in x.float():
            total = total + value * value
        mean_square = total / len(x)
    mean = x.sum().float() / len(x)
    variance = (mean_square.double() - mean.double() ** 2).float().clamp(min=0)  # a fused multiply-add
    result = (x.float() - mean) / (variance + EPS).sqrt() / SCALE + ZERO
    return result.round().clamp(0, 255).reshape(q.shape)


largest = 0.0
for length, spread in ((311, 2), (496, 4), (512, 4), (1024, 4), (4096, 4)):
    q = 255 - torch.arange(length).reshape(1, 1, 1, length) % 4  # 255, 254, 253, 252, …: variance 1.25
    q = q if spread == 4 else torch.where(torch.arange(length).reshape(q.shape) < 2, 254, 255)  # all 255 but for two
    x, exact = make(q.to(torch.uint8), 1.0, 0), q.double()
    exact = (exact - exact.mean()) / (exact.var(unbiased=False) + EPS).sqrt() / SCALE + ZERO
    found = {
        "instance_norm": ops.instance_norm(x, None, None, EPS, SCALE, ZERO),
        "group_norm": ops.group_norm(x, 1, None, None, EPS, SCALE, ZERO),
        "layer_norm": ops.layer_norm(x, [1, 1, length], None, None, EPS, SCALE, ZERO),
    }
    for name, y in found.items():
        error = float((y.int_repr() - exact.clamp(0, 255)).abs().max())
        model = kernel_model(q, running=length >= 512 and name != "layer_norm")
        same = "as modelled" if torch.equal(y.int_repr().float(), model) else "NOT as modelled"
        values = sorted(set(q.flatten().tolist()))
        print(f"{name} of {length} elements, {values}: {error:.2f} LSB from the exact result, {same}")
        largest = max(largest, error)
q = 250 + torch.arange(4 * 900).reshape(1, 4, 30, 30) % 6
exact = (q - q.double().mean((2, 3), True)) / (q.double().var((2, 3), False, keepdim=True) + EPS).sqrt() / SCALE + ZERO
for layout in (torch.contiguous_format, torch.channels_last):
    y = ops.instance_norm(
        make(q.to(torch.uint8).contiguous(memory_format=layout), 1.0, 0), None, None, EPS, SCALE, ZERO
    )
    print(f"instance_norm of 4 channels, {layout}: {float((y.int_repr() - exact.clamp(0, 255)).abs().max()):.2f} LSB")
print("the fault shows" if largest > 1 else "the fault does not show with this torch on this machine")
raise SystemExit(largest <= 1)
