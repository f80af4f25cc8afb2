"""The vendor's own modules: an activation that torch does not have, and a linear layer fused with it."""

from __future__ import annotations

from torch import Tensor, nn

from fx_quant_conformance.refimpl import nni


class Squash(nn.Module):
    """x / (1 + |x|): between -1 and 1, and cheap where there is no exponential function."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of x's shape."""
        return x / (1 + x.abs())


class LinearSquash(nni._FusedModule):  # type: ignore[misc]
    """A linear layer and Squash, which the machine runs as one kernel. The flow knows a fused module by its base."""

    def __init__(self, linear: nn.Module, squash: nn.Module) -> None:
        super().__init__(linear, squash)


def fuse_linear_squash(is_qat: bool, linear: nn.Linear, squash: Squash) -> LinearSquash:
    """Make one module of two; the arguments come in the pattern's order."""
    return LinearSquash(linear, squash)


def fuse_linear_relu(is_qat: bool, linear: nn.Linear, relu: nn.ReLU) -> nni.LinearReLU:
    """Make torch's own fused module of two."""
    return nni.LinearReLU(linear, relu)
