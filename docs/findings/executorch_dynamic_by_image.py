"""ExecuTorch: dynamic conv2d. XNNPACK's delegate quantizes each image by itself, and takes weights per channel alone.
XNNPACKQuantizer annotates both schemes, but no depthwise layer, nor what it takes for one by the weight's shape."""

# finding: 89
# engine: executorch, XNNPACKQuantizer
# claimed: dynamic conv2d and transposed conv2d
# fault of: delegate, by 58; Quantizer for weights per tensor
# largest error: thousands of LSB; runs in float
# cpu: all
# claims: `*Conv2d*/*`, `torch.conv2d/*`, `*ConvTranspose2d*/*`, `torch.conv_transpose2d/*`, `nniqat.ConvBn*/*` at
#   dynamic
# reason: each image of a dynamic input gets qparams of its own

import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import Tensor, nn
from torch.export import export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


def run(layer: nn.Module, x: Tensor, *, is_per_channel: bool) -> tuple[bool, float]:
    """Tell whether the layer is in the delegate, and how far its result is from the quantized program's."""
    config = get_symmetric_quantization_config(is_per_channel=is_per_channel, is_dynamic=True)
    model = nn.Sequential(layer).eval()
    prepared = prepare_pt2e(export(model, (x,)).module(), XNNPACKQuantizer().set_global(config))
    prepared(x)
    converted = convert_pt2e(prepared)
    edge = to_edge_transform_and_lower(
        export(converted, (x,)),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    outside = any("convolution" in str(node.target) for node in edge.exported_program().graph.nodes)
    program = Runtime.get().load_program(edge.to_executorch().buffer)
    method = program.load_method("forward")
    assert method is not None
    [found] = method.execute([x])
    return not outside, float((found - converted(x)).abs().max())


torch.manual_seed(0)
image = torch.rand(1, 3, 8, 8)
two = torch.cat([image, 0.001 * image])
found = []
for layer in (nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)):
    for is_per_channel in (True, False):
        (taken, off_one), (_, off_two) = (run(layer, x, is_per_channel=is_per_channel) for x in (image, two))
        weight = "per channel" if is_per_channel else "one for all"
        where = "in the delegate" if taken else "outside of it"
        print(f"{type(layer).__name__}, scales of the weight: {weight}. {where}; off by {off_one:.1e},")
        print(f"    and by {off_two:.1e} with a dim image beside it")
        found.append(taken == is_per_channel and off_one < 1e-5 and (off_two > 1e-4) == taken)
for layer in (nn.Conv2d(3, 3, 3, groups=3), nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2)):
    x = torch.rand(1, layer.in_channels, 8, 8)
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    prepared = prepare_pt2e(export(nn.Sequential(layer).eval(), (x,)).module(), XNNPACKQuantizer().set_global(config))
    prepared(x)
    is_quantized = any("quantize" in str(node.target) for node in convert_pt2e(prepared).graph.nodes)
    per_group = layer.in_channels // layer.groups
    print(f"{per_group} of {layer.in_channels} channels per group: {'quantized' if is_quantized else 'left in float'}")
    found.append(is_quantized == (per_group > 1))
_, off_faint = run(nn.Conv2d(3, 4, 3), 1e-4 * image, is_per_channel=True)
print(f"a faint image, which choose_qparams gives its smallest scale: off by {off_faint:.1e}")
found.append(off_faint > 1e-5)
shown = all(found)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
