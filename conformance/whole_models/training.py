"""Training steps of QAT: a few, so that weights and ranges are others than those of the float model. (QAT-02)"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fx_quant_conformance.conformance.claims.inputs import Batch
from fx_quant_conformance.conformance.stages.meaning import tensors_of

RATE = 0.01


def train_briefly(prepared: nn.Module, batches: Sequence[Batch]) -> None:
    """Take a step on each batch towards smaller outputs, relative to their size: so large values do not diverge."""
    for batch in batches:
        loss = torch.stack([output.square().mean() for output in tensors_of(prepared(*batch))]).sum()
        descend(prepared, loss / (1 + loss.detach()), RATE)


def descend(model: nn.Module, loss: Tensor, rate: float) -> None:
    """Take one step of gradient descent, if anything leads to the loss.

    (torch.optim would do, but to import it takes longer than all else here.)
    """
    if not loss.requires_grad:
        return
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(rate * gradient)
