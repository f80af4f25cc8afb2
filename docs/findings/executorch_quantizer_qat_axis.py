"""torchao: a weight that is fake-quantized by FusedMovingAvgObsFakeQuantize loses the channel axis of its annotation.

XNNPACKQuantizer asks for axis 1 of transposed convolutions. In PTQ they get it; in QAT they get axis 0.
"""

# finding: 79
# engine: torchao, XNNPACKQuantizer
# claimed: QAT of a transposed convolution, weights per channel
# fault of: prepare (`prepare.py`)
# largest error: one scale for each input channel
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

CHANNELS = 5


def axis_and_scales(is_qat: bool) -> tuple[int, int]:
    """The axis of the converted weight, and how many scales it has."""
    x = torch.randn(2, 3, 4, 4)
    model = torch.export.export(nn.ConvTranspose2d(3, CHANNELS, 2).train(is_qat), (x,)).module()
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=is_qat)
    prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
    prepared = prepare(model, XNNPACKQuantizer().set_global(config))
    prepared(x)
    converted = convert_pt2e(prepared)
    target = torch.ops.quantized_decomposed.dequantize_per_channel.default
    (node,) = (node for node in converted.graph.nodes if node.target == target)
    _, scales, _, axis, *_ = node.args
    return axis, getattr(converted, scales.target).numel()


found = {"PTQ": axis_and_scales(False), "QAT": axis_and_scales(True)}
for name, (axis, scales) in found.items():
    print(f"{name}: {scales} scales along axis {axis}; {CHANNELS} along axis 1 are right")
shown = found == {"PTQ": (1, CHANNELS), "QAT": (0, 3)}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
