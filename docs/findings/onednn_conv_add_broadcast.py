"""onednn: conv2d_add with a summand that broadcasts is taken as if it did not: a crash, or its shape."""

# finding: 17
# engine: onednn
# claimed: conv + add with a summand that broadcasts
# fault of: kernel
# largest error: process dies
# cpu: all
# claims: `*.add(*Conv2d*/*`
# reason: a summand that broadcasts is read and written beyond its end

import multiprocessing
import resource

import torch

MEMORY = 4 << 30  # bytes of a child's address space: what is read past the summand asks for any number of them
TIME = 60  # seconds for a child, which needs one: what is written past the summand may also make it wait for ever


def child(*shape: int) -> None:
    """Add a summand of this shape to a convolution's result of shape (2, 4, 6, 6)."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.backends.quantized.engine = "onednn"
    torch.manual_seed(0)
    x = torch.quantize_per_tensor(torch.rand(2, 4, 6, 6), 1 / 255, 0, torch.quint8)
    summand = torch.quantize_per_tensor(torch.rand(shape), 1 / 255, 0, torch.quint8)
    weight = torch.quantize_per_tensor(torch.rand(4, 4, 3, 3) - 0.5, 0.005, 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(weight, None, [1, 1], [1, 1], [1, 1], 1)
    found = torch.ops.quantized.conv2d_add(x, summand, packed, 0.02, 128)
    right = torch.nn.functional.conv2d(x.dequantize(), weight.dequantize(), padding=1) + summand.dequantize()
    print("  output of shape", tuple(found.shape), "right", tuple(right.shape), flush=True)
    if found.shape != right.shape:
        raise SystemExit(1)
    print("  largest error", round(float((found.dequantize() - right).abs().max() / 0.02), 1), "LSB", flush=True)


shown = False
for shape in ((2, 4, 6, 6), (1, 4, 6, 6), (2, 1, 6, 6), (1, 4, 1, 1)):
    print(f"summand {shape}", flush=True)
    process = multiprocessing.get_context("fork").Process(target=child, args=shape)
    process.start()
    process.join(TIME)
    if process.exitcode is None:
        print(f"  no end after {TIME} s: killed")
        process.kill()
        process.join()
    print("  exit status", process.exitcode)
    shown |= process.exitcode != 0
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
