"""fbgemm: conv_transpose2d with a kernel 2 high and channels in multiples of 8 takes a faulty path of its own."""

# finding: 13
# engine: fbgemm; x86 with output_padding
# claimed: conv_transpose2d, kernel 2 high, C_in and C_out multiples of 8
# fault of: kernel
# largest error: 229 LSB; not repeatable
# cpu: all
# claims: `nn.ConvTranspose2d*/*`, `torch.conv_transpose2d/*`
# reason: the direct path of a transposed convolution of kernel 2

import torch
import torch.nn.functional as F

make = torch._make_per_tensor_quantized_tensor


def report(
    engine: str = "fbgemm",
    batch: int = 1,
    height: int = 3,
    kernel: tuple[int, int] = (2, 2),
    stride: tuple[int, int] = (2, 2),
    c_in: int = 8,
    weight: int = 1,
    output_padding: int = 0,
) -> float:
    """Print and return the largest error in LSB; weights in -1..1 cannot saturate, in -127..127 they can."""
    torch.backends.quantized.engine = engine
    torch.manual_seed(0)
    x, w = torch.randint(0, 256, (batch, c_in, height, 3)), torch.randint(-weight, weight + 1, (c_in, 8, *kernel))
    more, op = [output_padding] * 2, torch.ops.quantized.conv_transpose2d
    exact = F.conv_transpose2d(x.double(), w.double(), stride=stride, output_padding=more)
    scale = float(exact.abs().max()) / 120
    value, weights = make(x.to(torch.uint8), 1.0, 0), make(w.to(torch.int8), 1.0, 0)
    packed = torch.ops.quantized.conv_transpose2d_prepack(weights, None, stride, [0, 0], more, [1, 1], 1)
    runs = [op(value, packed, scale, 128).int_repr().double() for _ in range(3)]
    off = (runs[0] - (exact / scale + 128)).abs()
    rows, repeats = (off > 0.5 + 1e-4).sum((0, 1, 3)).tolist(), all(torch.equal(runs[0], run) for run in runs)
    name = f"{engine} {batch=} {height=} {kernel=} {stride=} {c_in=} {weight=} {output_padding=}"
    print(f"{name}: {float(off.max()):.1f} LSB, wrong per output row {rows}, {repeats=}")
    return float(off.max())


shown = report() > 1
report(height=1)
report(height=1, batch=2)
report(kernel=(3, 2))
report(kernel=(2, 3))
report(stride=(2, 1))
report(stride=(1, 1))
report(stride=(1, 1), batch=2)
report(stride=(1, 1), weight=127)
report(c_in=4)
report(engine="x86")
report(engine="x86", output_padding=1)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
