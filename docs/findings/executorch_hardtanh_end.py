"""ExecuTorch: XNNPACK's delegate reads hardtanh's upper end where it is left out: lowering raises IndexError."""

# finding: 60
# engine: executorch
# claimed: hardtanh whose upper end is the default
# fault of: delegate's serializer
# largest error: raises
# cpu: all
# claims: `F.hardtanh_/*`
# reason: an upper end of hardtanh that is left out is read all the same

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import export


class Clipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.hardtanh_(x.sinh(), min_val=0.0)


program = export(Clipped().eval(), (torch.ones(2, 3),))
try:
    to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    found = "lowered"
except Exception as error:
    found = f"raises {type(error).__name__}: {error}"
print(f"hardtanh from 0: {found}")
print("the fault shows" if found != "lowered" else "the fault does not show with this version")
raise SystemExit(found == "lowered")
