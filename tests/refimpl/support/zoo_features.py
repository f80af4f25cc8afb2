"""Float models for the parity tests, one feature of Python, of fx or of the flow each."""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.nn.quantized as nnq
import torch.nn.functional as F
from torch import Tensor, nn


class SpelledOutConvs(nn.Module):
    """Convolutions with weights as arguments, every argument in the form that torch's packing functions take."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(4, 4, *[3] * d)) for d in (1, 2, 3))
        self.transposed, self.bias = nn.Parameter(torch.randn(4, 4, 2, 2)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        y = F.relu(F.conv2d(x, self.w2, self.bias, (1, 1), (1, 1), (1, 1), 1))
        y = F.conv1d(y.flatten(2), self.w1, self.bias, (1,), (1,), (1,), 1)
        y = F.conv3d(y.reshape(-1, 4, 4, 4, 4), self.w3, self.bias, (1, 1, 1), (1, 1, 1), (1, 1, 1), 1)
        y = torch.relu(y).reshape(-1, 4, 8, 8)
        return F.conv_transpose2d(y, self.transposed, self.bias, (2, 2), (0, 0), (0, 0), 1, (1, 1))


class FunctionalTransposed(nn.Module):
    """Arguments that torch's packing functions do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(4, 2, 2)), nn.Parameter(torch.randn(4, 3, 2, 2))

    def forward(self, x: Tensor) -> Any:
        return F.conv_transpose1d(x.flatten(2), self.w1, stride=2), F.conv_transpose2d(x, self.w2, None, 2)


class FunctionalLinears(nn.Module):
    """One weight used by two linears, a method relu, and a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        y = F.linear(x, self.weight, self.bias).relu()
        y = F.linear(y, self.weight)
        return F.linear(y, self.weight.t(), bias=self.bias)


class FunctionalNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(3)])
        self.weight, self.bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.row = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Any:
        y = F.instance_norm(self.convs[0](x), weight=self.weight, bias=self.bias)
        y = F.layer_norm(self.convs[1](y), [8], self.row, self.row)
        return F.group_norm(self.convs[2](y), 2, self.weight, self.bias)


class FunctionalActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])

    def forward(self, x: Tensor) -> Any:
        x = F.hardswish(self.fc[0](x))
        x = F.leaky_relu(self.fc[1](x), 0.2)
        x = F.elu(self.fc[2](x))
        x = F.relu6(F.hardsigmoid(self.fc[3](x)))
        x = F.hardtanh(self.fc[4](x), -2.0, 2.0)
        x = torch.clamp(self.fc[5](x), -1.0, 1.0)
        x = F.dropout(torch.sigmoid(self.fc[6](x)), 0.5, self.training)
        return F.softmax(self.fc[7](x.tanh()), dim=1)


class Float(nn.Module):
    """torch's FloatFunctional, which eager mode needs and FX replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.plus = nn.Linear(8, 8), nn.Linear(8, 8), nnq.FloatFunctional()
        self.times, self.relu, self.shrink, self.join = (nnq.FloatFunctional() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        y = self.plus.add(self.a(x), self.b(x))
        y = self.times.mul(y, x)
        y = self.relu.add_relu(y, x)
        y = self.shrink.mul_scalar(y, 0.5)
        return self.join.cat([y, x], dim=1)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.conv1(x))
        y += self.conv2(x)
        y *= x
        z = F.relu_(self.conv3(y))
        z.mul_(2)
        return torch.relu_(z.add_(y))


class Defaults(nn.Module):
    """Arguments that the example inputs leave out; a nested result with a value twice, an input and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, ignored: Any = None, *, also_ignored: float = 1.0) -> Any:
        y = self.a(x)
        return {"heads": [self.b(y), (y, F.relu(y))], "input": x, "size": x.size(0)}


class Reductions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return torch.mean(y, (2, 3)), y.sum(1), torch.max(y, 1)[0], y.mean(), torch.min(y), y.amax(1), torch.sort(y)[0]


class Permutations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.flatten, self.unflatten = nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Unflatten(1, (4, 64))
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x).permute(0, 2, 3, 1).contiguous()
        y = torch.permute(y, (0, 3, 1, 2)).transpose(2, 3).swapaxes(0, 0)
        y = self.fc(self.unflatten(self.flatten(y)))
        return y.repeat_interleave(2, dim=1).detach().clone().unsqueeze(-1).squeeze(-1).narrow(1, 0, 2)


class ScalarOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(torch.add(self.a(x), 3.0))
        y = 2 * self.b(y) + 0.5
        y = torch.mul(y, 0.25).relu()
        return (y - 1) / 3 + x.size(0)


class SharedAlias(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.relu(self.b(self.relu(self.a(x))))


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())])
        self.second = nn.ModuleDict({"deep": nn.Sequential(nn.Sequential(nn.Linear(8, 4)), nn.Identity())})

    def forward(self, x: Tensor) -> Any:
        for layer in self.first:
            x = layer(x)
        return self.second["deep"](x)
