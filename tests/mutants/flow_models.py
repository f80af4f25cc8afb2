"""Models whose flow may go wrong without a claim that shows it: what they read, branch, draw and hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.whole_models.architectures import settle

Made = tuple[nn.Module, tuple[Tensor, ...]]


class Branches(nn.Module):
    """Two convolutions of one shape, each with a norm of its own; their results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.left_norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.right, self.right_norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 4, H, W)."""
        return F.relu(self.left_norm(self.left(x))) + F.relu(self.right_norm(self.right(x)))


class Reader(nn.Module):
    """A weight that a norm is folded into, and that forward also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 4, H, W)."""
        return self.norm(self.conv(x)) + self.conv.weight.sum()


class Scaled(nn.Module):
    """Numbers and a buffer as operands, and values that are dropped in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Buffer(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 8); give the same shape."""
        x = F.dropout(F.relu(self.first(x)), 0.5, self.training)
        return self.last(self.second(x) * self.gain + 0.5)


class Statement(nn.Module):
    """An op in place whose result is not assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 8); give the same shape."""
        y = self.first(x)
        y.mul_(0.25)
        return self.last(y)


def branches() -> Made:
    """Return a model, with norms as after some training, and its inputs."""
    return settle(Branches()), (torch.randn(2, 3, 5, 5),)


def reader() -> Made:
    """Return a model, with a norm as after some training, and its inputs."""
    return settle(Reader()), (torch.randn(2, 3, 5, 5),)


def statement() -> Made:
    """Return a model and its inputs."""
    return Statement(), (torch.randn(6, 8),)


def scaled() -> Made:
    """Return a model and its inputs."""
    return Scaled(), (torch.randn(6, 8),)
