"""ExecuTorch: XNNPACKQuantizer, dynamic, leaves a convolution in float if a relu follows it."""

# finding: 82
# engine: XNNPACKQuantizer
# claimed: dynamic conv2d and transposed conv2d, followed by a relu
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e


def observed(x: Tensor, *layers: nn.Module) -> list[str]:
    """The values that get an observer."""
    program = torch.export.export(nn.Sequential(*layers).eval(), (x,)).module()
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    prepared = prepare_pt2e(program, XNNPACKQuantizer().set_global(config))
    return [node.args[0].name for node in prepared.graph.nodes if "activation_post_process" in str(node.target)]


image = torch.randn(1, 3, 8, 8)
left_in_float = {}
for layer, x in (
    (nn.Conv2d(3, 4, 3), image),
    (nn.ConvTranspose2d(3, 4, 3), image),
    (nn.Linear(8, 4), torch.randn(2, 8)),
):
    name = type(layer).__name__
    alone, followed = observed(x, layer), observed(x, layer, nn.ReLU())
    print(f"{name}: observed {alone}; with a relu behind it {followed}")
    left_in_float[name] = bool(alone) and not followed
shown = left_in_float == {"Conv2d": True, "ConvTranspose2d": True, "Linear": False}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
