"""torchao: the config for linear layers with float16 weights rounds those of convolutions too, which stay float32."""

# finding: 85
# engine: torchao, X86InductorQuantizer
# claimed: float16 weights are for linear layers (`get_x86_inductor_linear_dynamic_fp16_config`)
# fault of: Quantizer
# largest error: conv2d's weight is rounded to float16
# cpu: all
# claims: none: no claim of a backend is made with it

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_x86_inductor_linear_dynamic_fp16_config,
)

torch.manual_seed(0)
layer, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
model = nn.Sequential(layer).eval()
quantizer = X86InductorQuantizer().set_global(get_x86_inductor_linear_dynamic_fp16_config())
prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
prepared(x)
converted = convert_pt2e(prepared)
casts = sum("convert_element_type" in str(node.target) for node in converted.graph.nodes)
weight: Tensor = converted.state_dict()["0.weight"]
rounded = nn.functional.conv2d(x, weight.half().float(), layer.bias)
off, rest = float((converted(x) - model(x)).abs().max()), float((converted(x) - rounded).abs().max())
print(f"a convolution's weight is stored as {weight.dtype}, and cast {casts} times in each call")
print(f"its result is off by {off:.1e}; {rest:.1e} with a weight that is rounded to float16")
shown = casts == 2 and weight.dtype == torch.float32 and off > 100 * rest
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
