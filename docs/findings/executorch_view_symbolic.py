"""ExecuTorch: flatten with a dynamic batch, which XNNPACKQuantizer annotates, stays outside of XNNPACK's delegate."""

# finding: 95
# engine: executorch, XNNPACKQuantizer
# claimed: flatten of a dynamic batch
# fault of: partitioner
# largest error: runs in float
# cpu: all
# claims: `torch.flatten/*`, `nn.Flatten/*`
# reason: a view of a dynamic batch stays outside of the delegate

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import Dim, export
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


class Flat(nn.Module):
    """A layer, what flattens its result, and a layer; ``is_inferred``: its first size is written as −1."""

    def __init__(self, *, is_inferred: bool) -> None:
        super().__init__()
        self.first, self.last, self.is_inferred = nn.Linear(8, 8), nn.Linear(64, 4), is_inferred

    def forward(self, x: Tensor) -> Tensor:
        """Flatten between two layers."""
        x = self.first(x)
        result: Tensor = self.last(x.view(-1, 64) if self.is_inferred else x.flatten(1))
        return result


def is_outside(*, is_inferred: bool, is_dynamic: bool) -> bool:
    """Tell whether a view is left outside of the delegate, for a batch of one size or of any."""
    x, shapes = torch.randn(2, 8, 8), ({0: Dim("batch", min=1, max=64)},) if is_dynamic else None
    program = export(Flat(is_inferred=is_inferred).eval(), (x,), dynamic_shapes=shapes).module()
    prepared = prepare_pt2e(program, XNNPACKQuantizer().set_global(get_symmetric_quantization_config()))
    prepared(x)
    edge = to_edge_transform_and_lower(
        export(convert_pt2e(prepared), (x,), dynamic_shapes=shapes),
        partitioner=[XnnpackPartitioner()],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    return any("view" in str(node.target) for node in edge.exported_program().graph.nodes)


found = {
    "flatten, fixed batch": is_outside(is_inferred=False, is_dynamic=False),
    "flatten, dynamic batch": is_outside(is_inferred=False, is_dynamic=True),
    "view(-1, 64), dynamic batch": is_outside(is_inferred=True, is_dynamic=True),
}
print(f"outside of the delegate: {found}")
shown = list(found.values()) == [False, True, False]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
