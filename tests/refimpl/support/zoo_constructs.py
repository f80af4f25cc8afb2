"""Small models with what real networks hold between their layers, on which torch's flow is wrong, or ours was.

Heads of detectors, adapters, masks, norms for each level, tied weights, statements in place, numbers, the flow's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

IMAGES, ROWS, WORDS = (8, 3, 8, 8), (64, 8), (16, 6, 8)
Body = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """Layers for images, rows and words; `body` is the forward."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.conv, self.conv2, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.norm2, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.a, self.b, self.c, self.layer_norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.low, self.high = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.gain, self.softmax, self.drop = nn.Parameter(torch.rand(8) + 0.5), nn.Softmax(-1), nn.Dropout(0.1)
        self.register_buffer("hidden", torch.ones(6, 6, dtype=torch.bool).triu(1))
        self.register_buffer("minus", torch.full((6, 6), -math.inf).triu(1))
        self.register_buffer("steps", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class OwnNames(nn.Module):
    """Attributes with names that the flow would take."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process_0, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("last_input_scale_0", torch.tensor(3.0))
        self.last_scale_0 = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.activation_post_process_0(x))) * self.last_input_scale_0 * self.last_scale_0


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


class Tied(nn.Module):
    """An embedding whose weight the decoder reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return F.linear(F.relu(self.layer(self.embed(x))), self.embed.weight)


class ParametrizedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.b(F.relu(self.a(x)))


def rms_norm(net: Any, x: Tensor) -> Any:
    y = net.a(x)
    return net.b(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * net.gain)


def attention(mask: Callable[[Any, Tensor], Tensor]) -> Body:
    def attend(net: Any, x: Tensor) -> Any:
        scores = (net.a(x) @ net.b(x).transpose(1, 2)) * 0.35
        return net.softmax(mask(net, scores)) @ net.c(x)

    return attend


def head(net: Any, x: Tensor) -> Any:
    y = net.conv(x).sigmoid()
    return torch.cat([y[:, :2] * 2 - 0.5, (y[:, 2:] * 2) ** 2], 1)


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


def adapter(net: Any, x: Tensor) -> Any:
    return net.b(F.linear(x, net.a.weight + 0.1 * (net.low @ net.high), net.a.bias))


def standardized(net: Any, x: Tensor) -> Any:
    weight = net.conv2.weight
    mean, deviation = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
    return net.last(F.conv2d(net.conv(x), (weight - mean) / (deviation + 1e-5), padding=1))


def counted(net: Any, x: Tensor) -> Any:
    net.steps.add_(1)
    return net.b(F.relu(net.a(x)))


def squeeze(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    return net.last(y * F.hardsigmoid(net.last(F.adaptive_avg_pool2d(y, 1))))


CONSTRUCTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    name: (lambda body=body: Model(body), lambda shape=shape: torch.randn(shape))  # type: ignore[misc]
    for name, (body, shape) in {
        "detection head": (head, IMAGES),
        "boxes by item": (boxes, IMAGES),
        "tanh scaled": (lambda net, x: net.last(torch.tanh(net.conv(x)) * 3.0 + 1.0), IMAGES),
        "hardsigmoid shifted": (lambda net, x: net.last(F.hardsigmoid(net.conv(x)) * 3 - 1), IMAGES),
        "cat of a sigmoid": (lambda net, x: torch.cat([net.conv(x).sigmoid(), net.last(net.conv(x))], 1), IMAGES),
        "squeeze and excite": (squeeze, IMAGES),
        "residual block in place": (inplace_block, IMAGES),
        "statement": (lambda net, x: (lambda y: (y.mul_(0.25), net.last(y))[1])(net.conv(x)), IMAGES),
        "statement of a module": (lambda net, x: (lambda y: (net.relu(y), net.last(y))[1])(net.conv(x)), IMAGES),
        "folded weight that is read": (lambda net, x: net.norm(net.conv(x)) + net.conv.weight.sum(), IMAGES),
        "penalty": (lambda net, x: (net.norm(net.conv(x)), net.conv.weight.square().mean()), IMAGES),
        "dtype of a weight": (lambda net, x: net.b(F.relu(net.a(x)).to(net.b.weight.dtype)), ROWS),
        "shape of a weight": (lambda net, x: net.b(F.relu(net.a(x)).reshape(-1, net.b.weight.shape[1])), ROWS),
        "transposed weight": (lambda net, x: net.b(F.relu(net.a(x))) @ net.a.weight.t(), ROWS),
        "adapter": (adapter, ROWS),
        "weight standardization": (standardized, IMAGES),
        "scaled weight": (lambda net, x: net.b(F.linear(x, net.a.weight * 0.5, bias=net.a.bias)), ROWS),
        "added mask": (attention(lambda net, scores: scores + net.minus), WORDS),
        "filled mask": (attention(lambda net, scores: scores.masked_fill(net.hidden, -math.inf)), WORDS),
        "mask of smallest floats": (
            attention(lambda net, scores: scores + net.hidden.float() * torch.finfo(torch.float32).min), WORDS
        ),
        "no mask": (attention(lambda net, scores: scores), WORDS),
        "rms norm": (rms_norm, WORDS),
        "gated": (lambda net, x: F.glu(net.last(net.conv(x)), 1), IMAGES),
        "dropout by flag": (lambda net, x: net.b(F.dropout(F.relu(net.a(x)), 0.5, net.training)), ROWS),
        "drop path": (
            lambda net, x: net.b(x + net.a(x) * (torch.rand_like(x[:, :1]) < 1 - 0.5 * net.training)), ROWS
        ),
        "counter": (counted, ROWS),
        "keywords": (
            lambda net, x: F.linear(input=torch.mul(net.a(x), other=torch.sigmoid(net.b(x))), weight=net.c.weight), ROWS
        ),
        "times ten": (lambda net, x: net.b(net.a(x) * 10), ROWS),
        "plus a hundred": (lambda net, x: net.a(x) + 100, ROWS),
        "dead code": (lambda net, x: (net.c(x).sigmoid(), net.b(F.relu(net.a(x))))[1], ROWS),
    }.items()
}  # fmt: skip
CONSTRUCTS |= {
    "normalizes pixels": (
        lambda: Model(lambda net, x: net.conv(x * (1 / 255))), lambda: torch.randint(0, 256, IMAGES).float()
    ),
    "own names": (OwnNames, lambda: torch.randn(ROWS)),
    "norms per level": (Levels, lambda: torch.randn(IMAGES)),
    "two norms of a convolution": (TwoNorms, lambda: torch.randn(IMAGES)),
    "tied embedding": (Tied, lambda: torch.randint(0, 12, (4, 6))),
    "weight norm": (ParametrizedRows, lambda: torch.randn(ROWS)),
}  # fmt: skip


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
