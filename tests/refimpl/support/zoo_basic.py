"""Float models of a few layers, of many shapes (see `zoo`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + x)


class CatThenConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.cat((F.relu(self.a(x)), self.b(x)), dim=1))


class SharedConv(nn.Module):
    """One convolution with its state, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.conv(self.conv(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class ConvNet(nn.Module):
    """conv, bn, relu, pool and head in one, two or three dimensions."""

    def __init__(self, d: int) -> None:
        super().__init__()
        conv, bn, pool, average = (getattr(nn, f"{n}{d}d") for n in ("Conv", "BatchNorm", "MaxPool", "AvgPool"))
        self.body = nn.Sequential(conv(4, 6, 3, padding=1), bn(6), nn.ReLU(), pool(2), conv(6, 4, 1), average(2))

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.body(x))


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).view(-1, 2, 4).transpose(1, 2).contiguous().permute(0, 2, 1)
        y = torch.unsqueeze(y, 1).squeeze(1).reshape(x.size(0), -1)
        return self.b(torch.flatten(y, 1))


class Functions(nn.Module):
    """Weights as function arguments, positional."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.kernel = nn.Parameter(torch.randn(2, 1, 3))

    def forward(self, x: Tensor) -> Any:
        y = F.relu(F.linear(x, self.weight, self.bias))
        return F.conv1d(y.unsqueeze(1), self.kernel, None, 1, 1)


class FloatIsland(nn.Module):
    """An op between that no config quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.exp(-torch.abs(self.a(x))))


class DeadBranch(nn.Module):
    """A value that two consumers and the output read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return [self.b(y), F.relu(self.c(y)), y]


class PoolFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        y = F.max_pool2d(self.conv(x), 2)
        return F.adaptive_avg_pool2d(F.avg_pool2d(y, 2), (1, 1)).flatten(1)


class LinearBn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.bn(self.a(x)))


class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4 * (i + 1), 4, 3, padding=1) for i in range(3)])

    def forward(self, x: Tensor) -> Any:
        seen = [x]
        for layer in self.layers:
            seen.append(F.relu(layer(torch.cat(seen, 1))))
        return torch.cat(seen, 1)


class ReluOnly(nn.Module):
    """Nothing upstream is observed."""

    def forward(self, x: Tensor) -> Any:
        return F.relu(x).reshape(-1, 4)


def settle(norm: Any) -> None:
    """Give a batch norm statistics and parameters as after training."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    norm.weight.data.uniform_(0.5, 1.5)
    norm.bias.data.normal_()
