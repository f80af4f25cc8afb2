"""torch's convert_fx leaves claimed patterns in float without a word: group_norm, and F.linear with a post-op."""

# finding: 33
# engine: all
# claimed: group_norm; on onednn F.linear + leaky_relu, F.linear + tanh
# fault of: lowering
# largest error: runs in float
# cpu: all
# claims: `F.group_norm/*`, `F.linear+*eaky*/*`, `F.linear+*anh/*`
# reason: the lowering has no row for it

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping, backend_config, quantize_fx

MinMax = torch.ao.quantization.MinMaxObserver
QCONFIG = QConfig(  # type: ignore[no-untyped-call]
    activation=MinMax.with_args(dtype=torch.quint8),
    weight=MinMax.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
)


class Function(nn.Module):
    """A model of one function of its input and a weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def operations(model: nn.Module, x: torch.Tensor, config: Any) -> list[str]:
    """Return what the lowered model calls on tensors, quantize and dequantize left out."""
    prepared = quantize_fx.prepare_fx(model.eval(), QConfigMapping().set_global(QCONFIG), (x,), backend_config=config)
    prepared(x)
    lowered = quantize_fx.convert_fx(prepared, backend_config=config)
    calls = [node for node in lowered.graph.nodes if node.op in ("call_module", "call_function")]
    kinds = [type(lowered.get_submodule(str(n.target))) if n.op == "call_module" else n.target for n in calls]
    return [
        f"{kind.__module__}.{getattr(kind, '__name__', kind)}"
        for kind in kinds
        if kind is not torch.quantize_per_tensor
    ]


configs = {
    "qnnpack": backend_config.get_qnnpack_backend_config(),
    "fbgemm": backend_config.get_fbgemm_backend_config(),
    "onednn": backend_config.get_onednn_backend_config(),
}
group_norm = Function(lambda self, x: F.group_norm(x, 2))
leaky = Function(lambda self, x: F.leaky_relu(F.linear(x, self.weight, None), 0.1))
tanh = Function(lambda self, x: torch.tanh(F.linear(x, self.weight, None)))
shown = False
for engine, config in configs.items():
    torch.backends.quantized.engine = engine
    found = operations(group_norm, torch.randn(2, 8), config)
    print(f"{engine} group_norm:", found)
    shown |= not any("quantized" in each and "reference" not in each for each in found)
for name, model in (("F.linear + leaky_relu", leaky), ("F.linear + tanh", tanh)):
    print(f"onednn {name}:", operations(model, torch.randn(2, 8), configs["onednn"]))
print("the fault shows" if shown else "the fault does not show with this torch on this machine")
raise SystemExit(not shown)
