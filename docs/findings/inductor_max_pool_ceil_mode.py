"""TorchInductor: max_pool2d on integers forgets ceil_mode. The fusion takes the place of ceil_mode for an argument that
the pool no longer has; the kernel itself, and the pool in float, are right."""

# finding: 99
# engine: inductor
# claimed: max_pool2d with `ceil_mode`
# fault of: pattern of the fusion
# largest error: wrong shape
# cpu: all
# claims: `nn.MaxPool2d/*`, `F.max_pool2d/*`
# reason: a max pool forgets ceil_mode

from functools import partial

import torch
import torch.ao.quantization.fx._decomposed

OPS = torch.ops.quantized_decomposed
QPARAMS = (0.1, 128, 0, 255, torch.uint8)


def pooled(x: torch.Tensor, *, kernel: int) -> torch.Tensor:
    """A max pool on integers."""
    values = torch.nn.functional.max_pool2d(OPS.dequantize_per_tensor(x, *QPARAMS), kernel, ceil_mode=True)
    result: torch.Tensor = OPS.quantize_per_tensor(values, *QPARAMS)
    return result


torch.manual_seed(0)
x = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
found = []
for kernel in (2, 3):
    model = partial(pooled, kernel=kernel)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(x)
    own = torch.ops.quantized.max_pool2d(x, [kernel] * 2, [kernel] * 2, [0, 0], [1, 1], True)
    compiled_shape, eager_shape, own_shape = (tuple(each.shape) for each in (compiled, model(x), own))
    print(f"kernel {kernel}: compiled {compiled_shape}, eager {eager_shape}, the kernel alone {own_shape}")
    found.append(compiled_shape != eager_shape and torch.equal(own, model(x)))
values = x.float()
in_float = torch.compile(partial(torch.nn.functional.max_pool2d, kernel_size=2, ceil_mode=True), fullgraph=True)(values)
print(f"in float: compiled {(*in_float.shape,)}")
shown = all(found) and in_float.shape == (2, 3, 3, 3)
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
