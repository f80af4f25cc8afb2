"""qnnpack built with XNNPACK: qint8 sums and products of tensors in channels_last memory.

Of a product whose operands lie in different orders, elements of different places are multiplied. Where an operand in
channels_last memory is broadcast, the call raises. The wheels of torch 2.6 to 2.12 have XNNPACK, 2.13's do not.
"""

# finding: 111
# engine: qnnpack built with XNNPACK
# claimed: qint8 sums and products of operands in channels_last memory
# fault of: kernel's dispatch
# largest error: 90 LSB, or RuntimeError
# cpu: torch 2.6 to 2.12, all
# claims: `operator.mul*/*`, `torch.mul*/*`, `operator.add*/*`, `torch.add*/*`, at `in=qint8`
# reason: XNNPACK's sums and products read channels_last memory in another order, or raise

import torch

NEEDS_ANOTHER_BUILD = 77

if "-DUSE_XNNPACK" not in torch.__config__.show():
    print(f"torch {torch.__version__} is built without XNNPACK; the wheels of 2.6 to 2.12 are built with it")
    raise SystemExit(NEEDS_ANOTHER_BUILD)
torch.backends.quantized.engine = "qnnpack"


def quantize(values: torch.Tensor) -> torch.Tensor:
    """Return values as integers of a grid of halves."""
    return torch.quantize_per_tensor(values, 0.5, 0, torch.qint8)


x = torch.arange(-8.0, 8.0).reshape(1, 4, 2, 2)
row = torch.ones(1, 4, 1, 1)
permuted = x.contiguous(memory_format=torch.channels_last)
right = torch.ops.quantized.mul(quantize(x), quantize(x), 0.5, 0).int_repr()
found = torch.ops.quantized.mul(quantize(permuted), quantize(x), 0.5, 0).int_repr()
wrong = int((found != right).sum())
print(f"x · x with one operand in channels_last memory: {wrong} of {right.numel()} are wrong")
print(f"{found.flatten().tolist()}\nright: {right.flatten().tolist()}")
raised = 0
for name in ("add", "mul"):
    op = getattr(torch.ops.quantized, name)
    op(quantize(x), quantize(row), 0.5, 0)
    try:
        op(quantize(permuted), quantize(row), 0.5, 0)
    except RuntimeError as error:
        raised += 1
        print(f"{name} of x in channels_last memory and a broadcast operand: {error}")
shows = bool(wrong and raised)
print("the fault shows" if shows else "the fault does not show with this torch on this machine")
raise SystemExit(not shows)
