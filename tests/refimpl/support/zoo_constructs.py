"""Small models with what real networks hold between their layers, on which torch's flow is wrong, or ours was.

One of each kind: what else there is of the kind has tests of its own, of shared grids, of statements in place, of
weights that are read or computed, of masks, of constants of training and of the flow's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGES, ROWS, WORDS = (8, 3, 8, 8), (64, 8), (16, 6, 8)
Body = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Layers for images, rows and words; `body` is the forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.conv2, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.norm2, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.a, self.b, self.c, self.softmax = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1)
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("minus", torch.full((6, 6), -math.inf).triu(1))
        self.register_buffer("steps", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Levels(nn.Module):
    """A detector's head: convolutions shared by all levels, a norm and a number for each. (EfficientDet, RTMDet)"""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(0.5 + level)) for level in range(3)])
        for norm in self.norms:
            norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5

    def forward(self, x: Tensor) -> Any:
        levels = (x, F.max_pool2d(x, 2), F.max_pool2d(x, 4))
        towers = (F.relu(norm(self.tower(level))) for norm, level in zip(self.norms, levels, strict=True))
        return [self.out(tower) * scale for tower, scale in zip(towers, self.scales, strict=True)]


class TwoNorms(nn.Module):
    """A convolution whose result two norms take, and another op."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.left, self.right = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm in (self.left, self.right):
            norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return torch.cat([self.left(y), self.right(y), y], 1)


def rms_norm(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    return net.b(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * net.gain)


def attention(net: Any, x: Tensor) -> Any:
    scores = (net.a(x) @ net.b(x).transpose(1, 2)) * 0.35
    return net.softmax(scores + net.minus) @ net.c(x)


def boxes(net: Any, x: Tensor) -> Any:
    y = net.conv(x).sigmoid()
    y[:, 0:2] = y[:, 0:2] * 2 - 0.5
    y[:, 2:4] = (y[:, 2:4] * 2) ** 2
    return y


def inplace_block(net: Any, x: Tensor) -> Any:
    y = net.relu(net.norm(net.conv(x)))
    z = net.norm2(net.conv2(y))
    z += y
    return net.last(net.relu(z))


def counted(net: Any, x: Tensor) -> Any:
    net.steps.add_(1)
    return net.b(F.relu(net.a(x)))


def squeeze(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    return net.last(y * F.hardsigmoid(net.last(F.adaptive_avg_pool2d(y, 1))))


CONSTRUCTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    name: (lambda body=body: Model(body), lambda shape=shape: torch.randn(shape))  # type: ignore[misc]
    for name, (body, shape) in {
        "boxes by item": (boxes, IMAGES),
        "squeeze and excite": (squeeze, IMAGES),
        "residual block in place": (inplace_block, IMAGES),
        "statement": (lambda net, x: (lambda y: (y.mul_(0.25), net.last(y))[1])(net.conv(x)), IMAGES),
        "added mask": (attention, WORDS),
        "rms norm": (rms_norm, WORDS),
        "dropout by flag": (lambda net, x: net.b(F.dropout(F.relu(net.a(x)), 0.5, net.training)), ROWS),
        "counter": (counted, ROWS),
        "plus a hundred": (lambda net, x: net.a(x) + 100, ROWS),
    }.items()
}
CONSTRUCTS |= {
    "normalizes pixels": (
        lambda: Model(lambda net, x: net.conv(x * (1 / 255))),
        lambda: torch.randint(0, 256, IMAGES).float(),
    ),
    "norms per level": (Levels, lambda: torch.randn(IMAGES)),
    "two norms of a convolution": (TwoNorms, lambda: torch.randn(IMAGES)),
}


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Make a model in eval mode, with settled norms, and example inputs; the same each time."""
    torch.default_generator.manual_seed(0)
    make, draw = CONSTRUCTS[name]
    model = make().eval()
    if isinstance(model, Model):
        for norm in (model.norm, model.norm2):
            norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
            nn.init.uniform_(norm.weight, 1.0, 2.0)
    return model, (draw(),)
