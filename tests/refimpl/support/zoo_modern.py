"""Models for the parity tests: architectures of the last years, each small, with what is special about it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SqueezeNet(nn.Module):
    """Fire modules; a dropout before the convolution that classifies, its input a cat that shares observers."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.one, self.three = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 3, padding=1)
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(12, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.squeeze(x))
        return self.classifier(torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)).flatten(1)


class InceptionBlocks(nn.Module):
    """Two blocks of branches that end in a cat; one branch of each begins or ends with a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 3, padding=1)
        self.c, self.d, self.last = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        x = torch.cat([F.relu(self.a(x)), F.relu(self.b(F.avg_pool2d(x, 3, 1, 1)))], 1)
        x = torch.cat([F.relu(self.c(x)), F.relu(self.d(x)), F.max_pool2d(x, 3, 1, 1)], 1)
        return F.adaptive_avg_pool2d(self.last(x), 1).flatten(1)


class SharedHead(nn.Module):
    """A detector: one head of convolutions is called for each level of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.tower = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
        self.score, self.box = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        first = self.stem(x)
        levels = [first, self.down(first)]
        towers = [self.tower(level) for level in levels]
        return [torch.sigmoid(self.score(each)) for each in towers], [self.box(each) for each in towers]


class ConvNeXt(nn.Module):
    """A depthwise convolution, LayerNorm over the channels put last, an inverted bottleneck, a scale for each layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.depthwise = (
            nn.Conv2d(4, width, 2, stride=2),
            nn.Conv2d(width, width, 7, padding=3, groups=width),
        )
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.scale = nn.GELU(), nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(self.act(self.up(y))).permute(0, 3, 1, 2)


class WindowAttention(nn.Module):
    """Swin: attention within windows, rolled by half of one, with a bias by relative position; a table of buffers."""

    def __init__(self, width: int = 8, window: int = 4, shift: int = 2) -> None:
        super().__init__()
        self.window, self.shift, self.width = window, shift, width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj, self.softmax = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Softmax(dim=-1)
        self.bias = nn.Parameter(torch.randn(window**2, window**2) / 4)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        n, w = x.size(1) // self.window, self.window
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(-1, n, w, n, w, self.width).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, self.width)
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = torch.matmul(query * self.width**-0.5, key.transpose(-2, -1))
        x = self.proj(torch.matmul(self.softmax(scores + self.bias), value))
        x = x.view(-1, n, n, w, w, self.width).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * w, n * w, self.width)
        return torch.roll(x, (self.shift, self.shift), (1, 2))


class FaceNet(nn.Module):
    """PReLU after every convolution, whose output has 8 bits where all else has 7; dropout and a linear at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.PReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.PReLU(), nn.Conv2d(8, 4, 1))
        self.drop, self.out = nn.Dropout(0.2), nn.Linear(4 * 64, 6)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.drop(torch.flatten(self.body(self.stem(x)), 1)))


class CausalDecoder(nn.Module):
    """GPT: attention that a buffer of ones below the diagonal masks, pre-norm, a tied scale of the scores."""

    mask: Tensor

    def __init__(self, width: int = 8, length: int = 5) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.act = nn.Hardswish()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.ones(length, length).tril() == 0)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = torch.matmul(query, key.transpose(-2, -1)).masked_fill(self.mask, -1e4)
        x = x + self.proj(torch.matmul(scores.softmax(dim=-1), value))
        return x + self.down(self.act(self.up(x)))
