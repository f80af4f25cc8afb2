"""qnnpack built with XNNPACK: qint8 conv3d, transposed conv3d, and weights per channel of linear and transposed conv.

The config claims all four; XNNPACK's wrappers refuse them. The wheels of torch 2.6 to 2.12 have XNNPACK, 2.13's do not.
"""

# finding: 74
# engine: qnnpack built with XNNPACK
# claimed: qint8 activations for conv3d, transposed conv3d, and weights per channel of linear and transposed
#   convolutions
# fault of: config
# largest error: raises
# cpu: torch 2.6 to 2.12, all
# claims: `*Conv*3d*/*`, `torch.conv*3d*/*`, `*Linear*/*`, `F.linear*/*`, `*ConvTranspose?d*/*`, at `in=qint8`
# reason: XNNPACK refuses these qint8 calls

from collections.abc import Callable
from typing import Any

import torch

NEEDS_ANOTHER_BUILD = 77

if "-DUSE_XNNPACK" not in torch.__config__.show():
    print(f"torch {torch.__version__} is built without XNNPACK; the wheels of 2.6 to 2.12 are built with it")
    raise SystemExit(NEEDS_ANOTHER_BUILD)
torch.backends.quantized.engine = "qnnpack"
ops = torch.ops.quantized


def values(*shape: int) -> torch.Tensor:
    """Activations of zeros."""
    return torch.quantize_per_tensor(torch.zeros(shape), 0.1, 0, torch.qint8)


def weight(axis: int, *shape: int, per_channel: bool) -> torch.Tensor:
    """A weight, per tensor or per channel of an axis."""
    if not per_channel:
        return values(*shape)
    scales = torch.full((shape[axis],), 0.1)
    return torch.quantize_per_channel(torch.zeros(shape), scales, torch.zeros(shape[axis]).long(), axis, torch.qint8)


def linear(per_channel: bool) -> Any:
    packed = ops.linear_prepack(weight(0, 3, 2, per_channel=per_channel), None)
    return ops.linear(values(1, 2), packed, 0.1, 0)


def conv(rank: int, per_channel: bool) -> Any:
    w = weight(0, 3, 2, *[1] * rank, per_channel=per_channel)
    packed = getattr(ops, f"conv{rank}d_prepack")(w, None, [1] * rank, [0] * rank, [1] * rank, 1)
    return getattr(ops, f"conv{rank}d")(values(1, 2, *[4] * rank), packed, 0.1, 0)


def transposed(rank: int, per_channel: bool) -> Any:
    w = weight(1, 2, 3, *[1] * rank, per_channel=per_channel)
    sizes = ([1] * rank, [0] * rank, [0] * rank, [1] * rank)
    packed = getattr(ops, f"conv_transpose{rank}d_prepack")(w, None, *sizes, 1)
    return getattr(ops, f"conv_transpose{rank}d")(values(1, 2, *[4] * rank), packed, 0.1, 0)


def outcome(call: Callable[[], Any]) -> str:
    """Say what a call gives."""
    try:
        return f"gives {call().dtype}"
    except RuntimeError as error:
        return f"raises {str(error).splitlines()[0]}"


CLAIMED: dict[str, Callable[[], Any]] = {
    "conv3d, per tensor": lambda: conv(3, False),
    "conv_transpose3d, per tensor": lambda: transposed(3, False),
    "linear, per channel": lambda: linear(True),
    "conv_transpose2d, per channel": lambda: transposed(2, True),
}
WORK: dict[str, Callable[[], Any]] = {
    "conv2d, per channel": lambda: conv(2, True),
    "conv_transpose2d, per tensor": lambda: transposed(2, False),
    "linear, per tensor": lambda: linear(False),
}
outcomes = {name: outcome(call) for name, call in (CLAIMED | WORK).items()}
for name, text in outcomes.items():
    print(f"qint8 {name}: {text}")
shown = all("(xnnpack)" in outcomes[name] for name in CLAIMED) and all("gives" in outcomes[name] for name in WORK)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
