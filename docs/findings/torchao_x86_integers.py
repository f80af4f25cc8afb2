"""torchao: X86InductorQuantizer annotates products of integers, such as indices, and calibration raises."""

# finding: 97
# engine: torchao, X86InductorQuantizer
# claimed: products of integers
# fault of: Quantizer
# largest error: raises in calibration
# cpu: all
# claims: `operator.mul/*`, `torch.mul/*`
# reason: a product of integers is annotated

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


class Product(nn.Module):
    """Indices times strides."""

    def forward(self, indices: Tensor, strides: Tensor) -> Tensor:
        """Multiply."""
        return indices * strides


inputs = (torch.arange(4), torch.full((4,), 8))
quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
prepared = prepare_pt2e(torch.export.export(Product(), inputs).module(), quantizer)
observed = sum("activation_post_process" in str(node.target) for node in prepared.graph.nodes)
raised = ""
try:
    prepared(*inputs)
except NotImplementedError as error:
    raised = str(error)
print(f"a product of {inputs[0].dtype} has {observed} observers; calibrated: {raised or 'nothing raised'}")
shown = observed > 0 and "Long" in raised
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
