"""ExecuTorch: XNNPACKQuantizer quantizes ops that XNNPACK's delegate does not have on integers: they run in float."""

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


class Behind(nn.Module):
    """A layer that is quantized, and an op behind it."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.first, self.op, self.last = nn.Linear(8, 8), op, nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Call them, and a layer behind."""
        result: Tensor = self.last(self.op(self.first(x)))
        return result


def find_outside(model: nn.Module, x: Tensor) -> list[str]:
    """Return the ops that are left outside of delegates, other than quantize and dequantize."""
    config = get_symmetric_quantization_config(is_per_channel=True)
    prepared = prepare_pt2e(export(model.eval(), (x,)).module(), XNNPACKQuantizer().set_global(config))
    prepared(x)
    edge = to_edge_transform_and_lower(
        export(convert_pt2e(prepared), (x,)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    targets = [str(node.target) for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    return [target for target in targets if not any(word in target for word in ("quantize", "delegate", "getitem"))]


cube, rows = torch.randn(1, 3, 6, 6, 6), torch.randn(2, 8, 8)
found = {
    "conv3d": find_outside(nn.Sequential(nn.Conv3d(3, 4, 3)), cube),
    "conv_transpose3d": find_outside(nn.Sequential(nn.ConvTranspose3d(3, 4, 3)), cube),
    "flatten": find_outside(Behind(nn.Flatten()), rows),
    "conv2d": find_outside(nn.Sequential(nn.Conv2d(3, 4, 3)), cube[0].transpose(0, 1)),
}
for name, outside in found.items():
    print(f"{name}: outside of the delegate {outside}")
shown = [bool(outside) for outside in found.values()] == [True, True, True, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
