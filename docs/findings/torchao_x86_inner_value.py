"""torchao: X86InductorQuantizer annotates a layer and a relu as one where the layer's result is read elsewhere too."""

import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


class Inner(nn.Module):
    """A layer whose result goes through a relu, and out; or through the relu alone."""

    def __init__(self, *, is_read: bool) -> None:
        super().__init__()
        self.linear, self.relu, self.is_read = nn.Linear(4, 4), nn.ReLU(), is_read

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the results."""
        inner = self.linear(x)
        return [self.relu(inner), inner] if self.is_read else [self.relu(inner)]


def list_annotated(model: nn.Module) -> list[str]:
    """Return the ops that the Quantizer has annotated."""
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model.eval(), (torch.randn(2, 4),)).module(), quantizer)
    return [node.name for node in prepared.graph.nodes if node.op == "call_function" and _is_annotated(node)]


def _is_annotated(node: torch.fx.Node) -> bool:
    annotation = node.meta.get("quantization_annotation")
    return annotation is not None and bool(annotation._annotated)


found = {is_read: list_annotated(Inner(is_read=is_read)) for is_read in (False, True)}
print(f"annotated, with the layer's result read by the relu alone: {found[False]}; and elsewhere: {found[True]}")
shown = found == {False: ["linear", "relu"], True: ["linear", "relu"]}
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
