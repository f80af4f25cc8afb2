"""ExecuTorch: XNNPACKQuantizer quantizes ops that XNNPACK's delegate does not have on integers: they run in float."""

# finding: 88
# engine: XNNPACKQuantizer
# claimed: conv3d, transposed conv3d, adaptive_avg_pool2d, with what follows them
# fault of: Quantizer
# largest error: runs in float; conv3d raises, or reads memory that nobody wrote
# cpu: all
# claims: `*Conv3d*/*`, `torch.conv3d*/*`, `*ConvTranspose3d*/*`, `torch.conv_transpose3d*/*`, `*AdaptiveAvgPool2d/*`,
#   `F.adaptive_avg_pool2d/*`
# reason: an op stays outside of the delegate

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


def find_outside(op: nn.Module, x: Tensor) -> tuple[int, list[str]]:
    """Return how many tensors are quantized, and the ops outside of delegates but for quantize and dequantize."""
    config = get_symmetric_quantization_config(is_per_channel=True)
    prepared = prepare_pt2e(export(nn.Sequential(op).eval(), (x,)).module(), XNNPACKQuantizer().set_global(config))
    prepared(x)
    converted = convert_pt2e(prepared)
    count = sum("quantized_decomposed.quantize_per_tensor" in str(node.target) for node in converted.graph.nodes)
    edge = to_edge_transform_and_lower(
        export(converted, (x,)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    nodes = [node for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    others = ("quantize", "delegate", "getitem")
    return count, [node.name for node in nodes if not any(word in str(node.target) for word in others)]


images, cubes = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 6, 6, 6)
found = {
    "conv2d": find_outside(nn.Conv2d(3, 4, 3), images),
    "conv3d": find_outside(nn.Conv3d(3, 4, 3), cubes),
    "conv_transpose3d": find_outside(nn.ConvTranspose3d(3, 4, 3), cubes),
    "adaptive_avg_pool2d": find_outside(nn.AdaptiveAvgPool2d(3), images),
}
for name, (count, outside) in found.items():
    print(f"{name}: {count} tensors quantized; outside of the delegate: {', '.join(outside) or 'nothing'}")
shown = all(count > 1 for count, _ in found.values()) and [len(each) for _, each in found.values()] == [0, 1, 1, 1]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
