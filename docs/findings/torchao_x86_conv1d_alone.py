"""torchao: X86InductorQuantizer leaves a conv1d without a relu in float, though conv1d is a quantizable op."""

# finding: 81
# engine: torchao, X86InductorQuantizer
# claimed: conv1d without a relu
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    default_quantizable_ops,
    get_default_x86_inductor_quantization_config,
)


def is_quantized(x: Tensor, *layers: nn.Module) -> bool:
    """Does anything get an observer?"""
    program = torch.export.export(nn.Sequential(*layers).eval(), (x,), strict=True).module()
    config = get_default_x86_inductor_quantization_config()
    prepared = prepare_pt2e(program, X86InductorQuantizer().set_global(config))
    return any("activation_post_process" in str(node.target) for node in prepared.graph.nodes)


row, image = torch.randn(1, 3, 8), torch.randn(1, 3, 8, 8)
found = {
    "conv1d": is_quantized(row, nn.Conv1d(3, 4, 3)),
    "conv1d + relu": is_quantized(row, nn.Conv1d(3, 4, 3), nn.ReLU()),
    "conv2d": is_quantized(image, nn.Conv2d(3, 4, 3)),
}
listed = torch.ops.aten.conv1d.default in default_quantizable_ops
print(f"quantized: {found}; conv1d is in default_quantizable_ops: {listed}")
shown = listed and found == {"conv1d": False, "conv1d + relu": True, "conv2d": True}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
