"""torchao: X86InductorQuantizer leaves conv1d + batch norm + relu in float in QAT, and quantizes it in PTQ."""

# finding: 84
# engine: torchao, X86InductorQuantizer
# claimed: QAT of conv1d + batch norm + relu
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def is_quantized(is_qat: bool, x: Tensor, *layers: nn.Module) -> bool:
    """Does anything get an observer?"""
    program = torch.export.export(nn.Sequential(*layers).train(is_qat), (x,), strict=True).module()
    config = get_default_x86_inductor_quantization_config(is_qat=is_qat)
    prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
    prepared = prepare(program, X86InductorQuantizer().set_global(config))
    return any("activation_post_process" in str(node.target) for node in prepared.graph.nodes)


row, image, found = torch.randn(2, 3, 8), torch.randn(2, 3, 8, 8), {}
for flow, is_qat in (("PTQ", False), ("QAT", True)):
    found[f"1-d, {flow}"] = is_quantized(is_qat, row, nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU())
    found[f"2-d, {flow}"] = is_quantized(is_qat, image, nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
print(f"convolution + batch norm + relu is quantized: {found}")
shown = found == {"1-d, PTQ": True, "2-d, PTQ": True, "1-d, QAT": False, "2-d, QAT": True}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
