"""ExecuTorch: XNNPACKQuantizer, in QAT, quantizes between a linear layer and its batch norm, which stays float."""

# finding: 86
# engine: XNNPACKQuantizer
# claimed: QAT of linear + batch norm, with and without relu
# fault of: Quantizer; prepare
# largest error: the batch norm runs in float, after one more rounding
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e


def ops(is_qat: bool) -> list[str]:
    """The ops of the converted program, in order, beside those of weights."""
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).train(is_qat)
    program = torch.export.export(model, (x,)).module()
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=is_qat)
    prepare = prepare_qat_pt2e if is_qat else prepare_pt2e
    prepared = prepare(program, XNNPACKQuantizer().set_global(config))
    prepared(x)
    converted = convert_pt2e(prepared)
    if is_qat:
        converted = move_exported_model_to_eval(converted)
    wanted = ("quantize_per_tensor", "dequantize_per_tensor", "linear", "batch_norm", "relu", "relu_")
    names = [
        str(node.target).split(".")[1]
        for node in converted.graph.nodes
        if node.op == "call_function" and str(node.target).count(".") > 1
    ]
    return [name for name in names if name in wanted]


calibrated, trained = ops(False), ops(True)
print(f"PTQ: {' → '.join(calibrated)}\nQAT: {' → '.join(trained)}")
between = trained[trained.index("linear") + 1 :][:3]
shown = "batch_norm" not in calibrated and between == ["quantize_per_tensor", "dequantize_per_tensor", "batch_norm"]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
