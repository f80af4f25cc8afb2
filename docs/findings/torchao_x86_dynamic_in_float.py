"""torchao: X86InductorQuantizer, dynamic, annotates convolutions and products, which Inductor has in float alone."""

# finding: 87
# engine: torchao, X86InductorQuantizer
# claimed: dynamic convolutions and products
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: `nn.Conv[12]d*/*`, `nni.Conv*/*` at dynamic
# reason: a dynamic convolution or product runs in float

import torch
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


class Product(nn.Module):
    """A batch times itself, in reverse."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * x.flip(0)


def convert(model: nn.Module, x: Tensor) -> GraphModule:
    """Quantize a model, dynamic."""
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_dynamic=True))
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted: GraphModule = convert_pt2e(prepared)
    return converted


torch.manual_seed(0)
found = {}
for model, x in (
    (nn.Conv2d(16, 16, 3), torch.randn(2, 16, 8, 8)),
    (Product(), torch.randn(4, 16)),
    (nn.Linear(16, 16), torch.randn(4, 16)),
):
    layer = nn.Sequential(model).eval()
    converted = convert(layer, x)
    with torch.no_grad(), config.patch(freezing=True, compile_threads=1):
        result, [code] = run_and_get_code(torch.compile(converted), x)
    is_quantized = "choose_qparams" in str(converted.graph)
    kernels = sorted(word for word in ("qconv", "qlinear", "extern_kernels.convolution") if word in code)
    off = float((result - layer(x)).abs().max())
    name = type(model).__name__
    print(f"{name}: quantized {is_quantized}, kernels {kernels}, off by {off:.1e} from float")
    found[name] = (is_quantized, kernels)
shown = found == {
    "Conv2d": (True, ["extern_kernels.convolution"]),
    "Product": (True, []),
    "Linear": (True, ["qlinear"]),
}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
