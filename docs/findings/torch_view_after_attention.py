"""torch: a program that views the result of attention cannot be decomposed, as runtimes decompose it."""

# finding: 129
# engine: torch.export (executorch)
# claimed: attention, its axes swapped back, made contiguous, then viewed, as in GPT-2
# fault of: decomposition
# largest error: raises
# cpu: all
# claims: none: whole models
# reason: torch's decomposition of attention leaves a result that view refuses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import export


class Attention(nn.Module):
    """Attention of four heads; its result is taken as one row for each token."""

    def __init__(self, *, is_viewed: bool) -> None:
        super().__init__()
        self.is_viewed = is_viewed

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows, by a view of what is contiguous, or by reshape."""
        heads = x.view(2, 8, 4, 8).transpose(1, 2)
        joined = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).contiguous()
        return joined.view(16, 32) if self.is_viewed else joined.reshape(16, 32)


def run_decomposed(*, is_viewed: bool) -> str:
    """Return what decomposing a model ends with, which runs as it is and as an exported program."""
    model, x = Attention(is_viewed=is_viewed).eval(), torch.randn(2, 8, 32)
    program = export(model, (x,))
    assert torch.equal(program.module()(x), model(x))
    try:
        program.run_decompositions()
    except ValueError as error:
        return str(error).partition("\n")[0]
    return "right"


found = {name: run_decomposed(is_viewed=name == "view") for name in ("view", "reshape")}
print(found)
shown = "Cannot view a tensor" in found["view"]
print("the fault shows" if shown else "the fault does not show with this version")
raise SystemExit(not shown)
