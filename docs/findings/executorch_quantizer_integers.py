"""ExecuTorch: XNNPACKQuantizer annotates a cat of integers, such as indices, and calibration raises."""

# finding: 92
# engine: XNNPACKQuantizer
# claimed: cat of integers
# fault of: Quantizer
# largest error: raises in calibration
# cpu: all
# claims: `torch.cat/*`
# reason: a cat of integers is annotated

import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import Tensor, nn
from torch.export import export
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e


class Joined(nn.Module):
    """Two lists of indices, joined."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Join them."""
        return torch.cat([first, second])


indices = (torch.arange(0, 1000, 100), torch.arange(0, 10))
prepared = prepare_pt2e(
    export(Joined(), indices).module(), XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
)
observed = sum("activation_post_process" in str(node.target) for node in prepared.graph.nodes)
raised = ""
try:
    prepared(*indices)
except NotImplementedError as error:
    raised = str(error)
print(f"a cat of {indices[0].dtype} has {observed} observers; calibrated with indices: {raised or 'nothing raised'}")
shown = observed > 0 and "Long" in raised
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
