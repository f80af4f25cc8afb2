"""torchao: X86InductorQuantizer raises for conv2d + relu whose padding is a word; conv1d + relu it leaves in float."""

# finding: 96
# engine: torchao, X86InductorQuantizer
# claimed: convolutions whose padding is a word
# fault of: Quantizer
# largest error: conv2d raises, for the whole model; conv1d runs in float
# cpu: all
# claims: `nn.Conv[12]d*/*`, `nni.Conv*/*`, `*.add(*Conv2d*/*`
# reason: a padding in a word makes the Quantizer raise, or leaves the layer in float

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def describe(layer: nn.Module, x: Tensor) -> str:
    """Say what becomes of a convolution and a relu."""
    program = torch.export.export(nn.Sequential(layer, nn.ReLU()).eval(), (x,)).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    try:
        prepared = prepare_pt2e(program, quantizer)
    except ValueError as error:
        return str(error)
    observers = any("activation_post_process" in str(node.target) for node in prepared.graph.nodes)
    return "quantized" if observers else "left in float"


image, row = torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8)
found = {
    "conv2d, padding 0": describe(nn.Conv2d(3, 4, 3, padding=0), image),
    "conv2d, padding 'valid'": describe(nn.Conv2d(3, 4, 3, padding="valid"), image),
    "conv2d, padding 'same'": describe(nn.Conv2d(3, 4, 3, padding="same"), image),
    "conv1d, padding 0": describe(nn.Conv1d(3, 4, 3, padding=0), row),
    "conv1d, padding 'valid'": describe(nn.Conv1d(3, 4, 3, padding="valid"), row),
}
for name, what in found.items():
    print(f"{name}, and relu: {what}")
raised = "conv2d is not an aten conv2d operator"
shown = list(found.values()) == ["quantized", raised, raised, "quantized", "left in float"]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
