"""ExecuTorch: a slice with a step, or of a dynamic batch, which XNNPACKQuantizer annotates, is left outside."""

# finding: 114
# engine: executorch, XNNPACKQuantizer
# claimed: a slice with a step, or with a dynamic batch
# fault of: partitioner
# largest error: runs in float
# cpu: all
# claims: none: the config does not claim slices
# reason: a slice is annotated, which the delegate does not take in a dynamic batch

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


class Sliced(nn.Module):
    """Some of the features of a layer's result, before another layer."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.first, self.last, self.step = nn.Linear(8, 8), nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Tensor:
        """Take four features: the last ones, or every second."""
        x = self.first(x)
        result: Tensor = self.last(x[:, 4:] if self.step == 1 else x[:, ::2])
        return result


def find_slice(*, step: int, is_dynamic: bool) -> tuple[bool, bool]:
    """Return whether the slice is quantized, and whether it is outside of the delegate."""
    x, shapes = torch.randn(2, 8), ({0: Dim("batch", min=1, max=64)},) if is_dynamic else None
    program = export(Sliced(step).eval(), (x,), dynamic_shapes=shapes).module()
    prepared = prepare_pt2e(program, XNNPACKQuantizer().set_global(get_symmetric_quantization_config()))
    prepared(x)
    exported = export(convert_pt2e(prepared), (x,), dynamic_shapes=shapes)
    (slice_node,) = (node for node in exported.graph.nodes if node.target == torch.ops.aten.slice.Tensor)
    (after,) = slice_node.users
    edge = to_edge_transform_and_lower(
        exported, partitioner=[XnnpackPartitioner()], compile_config=EdgeCompileConfig(_check_ir_validity=False)
    )
    is_outside = any("slice" in str(node.target) for node in edge.exported_program().graph.nodes)
    return "quantize_per_tensor" in str(after.target), is_outside


found = {
    "[:, 4:], fixed batch": find_slice(step=1, is_dynamic=False),
    "[:, ::2], fixed batch": find_slice(step=2, is_dynamic=False),
    "[:, 4:], dynamic batch": find_slice(step=1, is_dynamic=True),
}
print(f"quantized, and outside of the delegate: {found}")
shown = list(found.values()) == [(True, False), (True, True), (True, True)]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
