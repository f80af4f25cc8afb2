"""qnnpack: hardswish, hardsigmoid and softmax of an empty batch divide by zero: the process dies with SIGFPE."""

# finding: 26
# engine: qnnpack
# claimed: hardswish and hardsigmoid of an empty batch, softmax along one
# fault of: kernel
# largest error: process dies
# cpu: all
# claims: `nn.Softmax/*`, `nn.Hardswish/*`, `F.hardswish/*`, `nn.Hardsigmoid/*`, `F.hardsigmoid/*`, `.hardsigmoid*/*`
# reason: an empty batch ends the process

import multiprocessing
from collections.abc import Callable

import torch

CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hardswish": lambda x: torch.ops.quantized.hardswish(x, 0.1, 0),
    "hardsigmoid": torch.nn.functional.hardsigmoid,
    "softmax along the batch": lambda x: torch.ops.quantized.softmax(x, 0, 1 / 256, 0),
    "sigmoid": torch.sigmoid,
}


def child(engine: str, name: str, rows: int) -> None:
    """Call an op on a batch of so many rows."""
    torch.backends.quantized.engine = engine
    CALLS[name](torch.quantize_per_tensor(torch.zeros(rows, 4), 0.1, 0, torch.quint8))


shown = False
for name in CALLS:
    for engine, rows in (("qnnpack", 0), ("qnnpack", 1), ("fbgemm", 0)):
        process = multiprocessing.get_context("fork").Process(target=child, args=(engine, name, rows))
        process.start()
        process.join()
        print(f"{engine} {name}, {rows} rows: exit status {process.exitcode}")
        shown |= process.exitcode != 0
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
