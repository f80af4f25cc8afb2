"""torchao: X86InductorQuantizer annotates any adaptive_avg_pool2d; Inductor calls floats for large windows."""

# finding: 94
# engine: torchao, X86InductorQuantizer
# claimed: adaptive_avg_pool2d whose windows have more than 25 elements, of unequal sizes
# fault of: Quantizer
# largest error: runs in float
# cpu: all
# claims: `nn.AdaptiveAvgPool2d/*`, `F.adaptive_avg_pool2d/*`
# reason: an adaptive pool of large windows runs in float

import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def read_call(pool: nn.Module) -> tuple[bool, bool]:
    """Return whether a pool between two convolutions is quantized, and whether it is a library's call on floats."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Conv2d(8, 8, 1)).eval()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted = convert_pt2e(prepared)
    [node] = [node for node in converted.graph.nodes if "pool" in str(node.target)]
    is_quantized = all("quantize" in str(each.target) for each in (node.args[0], *node.users))
    with torch.no_grad(), config.patch(freezing=True, compile_threads=1):
        _, [code] = run_and_get_code(torch.compile(converted), x)
    calls = [line for line in code.splitlines() if "= torch.ops.aten._adaptive_avg_pool2d" in line]
    return is_quantized, bool(calls)


found = {
    "14×14 to 5×5": read_call(nn.AdaptiveAvgPool2d(5)),
    "14×14 to 3×3": read_call(nn.AdaptiveAvgPool2d(3)),
}
for name, (is_quantized, calls_library) in found.items():
    print(f"{name}: quantized {is_quantized}, calls torch's kernel of floats {calls_library}")
shown = list(found.values()) == [(True, False), (True, True)]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
