"""Float models for the parity tests, one feature of Python, of fx or of the flow each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.ao.nn.quantized as nnq
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


class FunctionalConvs(nn.Module):
    """Convolutions of all dimensions with weights as arguments, with and without relu."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(4, 4, *[3] * d)) for d in (1, 2, 3))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        y = F.relu(F.conv2d(x, self.w2, self.bias, stride=1, padding=1))
        y = F.conv1d(y.flatten(2), self.w1, self.bias, 1, 1)
        y = F.conv3d(y.reshape(-1, 4, 4, 4, 4), self.w3, None, padding=1)
        return torch.relu(y)


class SpelledOutConvs(nn.Module):
    """The same with every argument in the form that torch's packing functions take."""

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


class InPlaceOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        y += self.b(x)
        y = F.relu(y, inplace=True)
        y *= x
        return torch.sub(self.c(y), x) / 2


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        first, second = self.a(x), self.b(x)
        both = torch.stack((first, second), dim=1)
        left, right = torch.split(both, 1, dim=1)
        return torch.cat([left.squeeze(1), right.squeeze(1), first[:, 2:4], second[..., -1:]], dim=-1)


class Scores(NamedTuple):
    low: Tensor
    high: Tensor


class NamedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return Scores(low=self.a(x), high=torch.relu(self.b(x)))


class NestedOutput(nn.Module):
    """Tuples in lists in dicts, a value twice, an input passed through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.b(x)
        return {"heads": [self.a(y), (y, F.relu(y))], "input": x, "size": x.size(0)}


class Defaults(nn.Module):
    """Arguments that the example inputs leave out, and arguments by keyword to submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner = nn.Linear(8, 8), TwoArguments()

    def forward(self, x: Tensor, ignored: Any = None, *, also_ignored: float = 1.0) -> Any:
        return self.inner(left=self.a(x), right=x)


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.fc(left) + right


class ShapeArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        batch, channels, height, width = x.shape
        y = self.conv(x).view(batch, channels, height * width // 16, 16)
        y = self.fc(y).reshape(batch * channels, -1)
        return y.expand(y.size(0), y.shape[1]).repeat(1, 2).unsqueeze(0)


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


class Matmuls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        left, right = self.a(x), self.b(x)
        return torch.matmul(left, right.t()) @ left, torch.mm(left, right.T)


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


class Dropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop1, self.drop2 = nn.Conv2d(4, 4, 1), nn.Dropout(), nn.Dropout2d()
        self.drop3, self.out = nn.Dropout(inplace=True), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.drop3(self.drop2(F.relu(self.drop1(self.conv(x))))))


class Identities(nn.Module):
    """Ops that do nothing, at the edges of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc, self.last = nn.Identity(), nn.Linear(8, 8), nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.fc(self.first(x).contiguous())).contiguous()


class DeadCode(nn.Module):
    """Values that nothing reads, and an input that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, ignored: Tensor) -> Any:
        self.unused(x)
        return self.used(x)


class Halves(nn.Module):
    """The same value asked for as static int8 and in float, in one order and the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x)
        return self.b(y) + torch.exp(y), torch.cos(x) + self.c(x)


class Parametrized(nn.Module):
    """A weight computed by a parametrisation; matching goes by the class without it. (PAT-03)"""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        parametrize.register_parametrization(self.fc, "weight", Doubled())

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.fc(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Inner(nn.Module):
    """The part that a case makes standalone, non-traceable or custom."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.fc(x))


class WithInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(8, 8), Inner(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.before(x)))


class Branching(nn.Module):
    """Data-dependent control flow: only a leaf can hold it. (CUS-02)"""

    def forward(self, x: Tensor) -> Any:
        return x if x.sum() > 0 else -x


class WithBranching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.branching, self.after = nn.Linear(8, 8), Branching(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.branching(self.before(x)))
