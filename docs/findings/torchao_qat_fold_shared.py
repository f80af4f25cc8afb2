"""torchao: after QAT, convert_pt2e folds each batch norm into a weight that others read as well, one into the other."""

# finding: 107
# engine: torchao
# claimed: QAT of a convolution and a batch norm whose weight or bias is also read elsewhere
# fault of: convert (`qat_utils.py`)
# largest error: as large as the values: −5 dB
# cpu: all
# claims: none: no claim of a backend is made with it

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config


class Model(nn.Module):
    """A convolution and two batch norms."""

    def __init__(self, call: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.layer, self.call = nn.Conv2d(3, 4, 3), call
        self.norm, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


def measure(what: str, call: Callable[[Any, Tensor], tuple[Tensor, ...]]) -> tuple[float, float]:
    """Return the lowest ratio of signal and error of the trained program in eval mode, and of the converted one."""
    torch.manual_seed(0)
    model, x = Model(call).train(), torch.randn(8, 3, 6, 6)
    for _ in range(60):  # quantization aware training begins with a model that is trained
        model(x)
    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(torch.export.export(copy.deepcopy(model), (x,)).module(), quantizer)
    model(x), prepared(x)
    with torch.no_grad():
        right = model.eval()(x)
        trained = move_exported_model_to_eval(copy.deepcopy(prepared))(x)
        converted = move_exported_model_to_eval(convert_pt2e(prepared))(x)
    ratios = [
        min(
            10 * float(torch.log10(a.square().sum() / (a - b).square().sum()))
            for a, b in zip(right, found, strict=True)
        )
        for found in (trained, converted)
    ]
    print(f"{what}: {ratios[0]:.1f} dB trained, {ratios[1]:.1f} dB converted")
    return ratios[0], ratios[1]


alone = measure("alone", lambda m, x: (m.norm(m.layer(x)),))
shared = [
    measure("a norm for each level", lambda m, x: (m.norm(m.layer(x)), m.other(m.layer(x[..., ::2])))),
    measure("the layer once more, without the norm", lambda m, x: (m.norm(m.layer(x)), m.layer(2 * x))),
    measure("the weight is read", lambda m, x: (m.norm(m.layer(x)), m.layer.weight.square())),
]
shown = min(alone) > 30 and all(trained > 30 and converted < 20 for trained, converted in shared)
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
