"""TorchInductor: a max pool between dequantize and quantize is taken for max_pool2d of a batch: max_pool3d, and
max_pool2d of one image without a batch, end the compilation."""

# finding: 55
# engine: inductor
# claimed: MaxPool3d, `F.max_pool3d`; MaxPool2d, `F.max_pool2d` without a batch
# fault of: pattern of the fusion
# largest error: raises
# cpu: all
# claims: `nn.MaxPool[23]d/*`, `F.max_pool[23]d/*`
# reason: a max pool is taken for max_pool2d of a batch, and does not compile

from collections.abc import Callable
from functools import partial

import torch
import torch.ao.quantization.fx._decomposed

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 128, 0, 255, torch.uint8)


def pooled(pool: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A max pool on integers."""
    integers = OPS.quantize_per_tensor(pool(OPS.dequantize_per_tensor(x, *QPARAMS), 2), *QPARAMS)
    result: torch.Tensor = integers
    return result


def outcome(pool: Callable[..., torch.Tensor], *shape: int) -> str:
    """Print and give what becomes of it: "right", "wrong" or the error's name."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    model = partial(pooled, pool)
    try:
        with torch.no_grad():
            found = torch.compile(model, fullgraph=True)(x)
        told = "right" if torch.equal(found, model(x)) else "wrong"
    except Exception as error:
        told = " ".join(str(error).split("\n")[0].split()) + f" ({type(error).__name__})"
    print(f"{pool.__name__} of {shape}: {told}")
    return told


flat = outcome(torch.nn.functional.max_pool2d, 2, 3, 4, 4)
alone = outcome(torch.nn.functional.max_pool2d, 3, 4, 4)
deep = outcome(torch.nn.functional.max_pool3d, 2, 3, 4, 4, 4)
shown = flat == "right" and "AssertionError" in alone and "AssertionError" in deep
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
