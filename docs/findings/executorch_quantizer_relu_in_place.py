"""ExecuTorch: XNNPACKQuantizer quantizes around relu, and around relu6 in place, but not around relu in place."""

# finding: 93
# engine: XNNPACKQuantizer
# claimed: relu in place, by itself
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: `nn.ReLU/*`, `F.relu/*`
# reason: a relu in place is left in float

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn
from torch.export import export
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e


class Between(nn.Module):
    """An op behind a max pool of what a layer gives."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool, self.op = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), op

    def forward(self, x: Tensor) -> Tensor:
        """Call them."""
        result: Tensor = self.op(self.pool(self.conv(x)))
        return result


def is_quantized(op: nn.Module) -> bool:
    """Is what the op gives observed?"""
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    prepared = prepare_pt2e(export(Between(op).eval(), (torch.randn(1, 3, 8, 8),)).module(), quantizer)
    [output] = prepared.graph.output_node().args[0]
    return "activation_post_process" in str(output.target)


found = {
    "relu": is_quantized(nn.ReLU()),
    "relu in place": is_quantized(nn.ReLU(inplace=True)),
    "relu6 in place": is_quantized(nn.ReLU6(inplace=True)),
}
print(f"quantized behind a max pool: {found}")
shown = found == {"relu": True, "relu in place": False, "relu6 in place": True}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
