"""Real architectures for the flow benchmark, in plain torch: their wiring and, of the first two, their sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

# expansion kernel, channels inside, channels out, squeeze-excite, hardswish, stride: MobileNetV3-Small
_MOBILE_ROWS = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def _conv_bn(into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(out)]


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside the identity, or beside a 1 x 1 convolution where the size changes."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv_bn(into, out, 3, stride), nn.ReLU(inplace=True), *_conv_bn(out, out, 3))
        self.beside = nn.Identity() if (into, stride) == (out, 1) else nn.Sequential(*_conv_bn(into, out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return self.relu(self.body(x) + self.beside(x))


class SqueezeExcite(nn.Module):
    """Scales channels by a gate computed of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4 // 8 * 8)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Any:
        return self.gate(x) * x


class InvertedResidual(nn.Module):
    """Expand, convolve each channel, gate, project; beside the identity where the size stays."""

    def __init__(self, into: int, kernel: int, inner: int, out: int, *, gated: bool, hard: bool, stride: int) -> None:
        super().__init__()
        act = nn.Hardswish if hard else nn.ReLU
        expand = [] if inner == into else [*_conv_bn(into, inner, 1), act()]
        depthwise = [*_conv_bn(inner, inner, kernel, stride, groups=inner), act()]
        gate = [SqueezeExcite(inner)] if gated else []
        self.body = nn.Sequential(*expand, *depthwise, *gate, *_conv_bn(inner, out, 1))
        self.is_residual = (into, stride) == (out, 1)

    def forward(self, x: Tensor) -> Any:
        return x + self.body(x) if self.is_residual else self.body(x)


class Attention(nn.Module):
    """An encoder layer: attention of several heads, two linears with GELU, a layer norm before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Any:
        seen = self.norm1(x)
        parts = (self.query, self.key, self.value)
        query, key, value = (part(seen).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        shares = (torch.matmul(query, key.transpose(-2, -1)) * self.scale).softmax(-1)
        x = x + self.out(torch.matmul(shares, value).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


def resnet18() -> nn.Module:
    """Stem, eight residual blocks, pool and head: 11.7 million weights."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Residual(into, out, 1 + (into != out)) for into, out in pairwise(widths)]
    stem = [*_conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def mobilenet_v3() -> nn.Module:
    """Eleven inverted residuals, nine of them with squeeze-excite: 2.5 million weights."""
    blocks, into = [], 16
    for kernel, inner, out, gated, hard, stride in _MOBILE_ROWS:
        blocks.append(InvertedResidual(into, kernel, inner, out, gated=gated, hard=hard, stride=stride))
        into = out
    head = [*_conv_bn(96, 576, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    last = [nn.Linear(576, 1024), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1024, 1000)]
    return nn.Sequential(*_conv_bn(3, 16, 3, 2), nn.Hardswish(), *blocks, *head, *last)


def transformer() -> nn.Module:
    """Six encoder layers of width 128 and four heads, and a head: 1.2 million weights."""
    return nn.Sequential(*(Attention(128, 4) for _ in range(6)), nn.LayerNorm(128), nn.Linear(128, 16))


# name → the model, and the shape of its input
ARCHITECTURES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet18": (resnet18, (1, 3, 64, 64)),
    "MobileNetV3": (mobilenet_v3, (1, 3, 64, 64)),
    "transformer": (transformer, (1, 16, 128)),
}
