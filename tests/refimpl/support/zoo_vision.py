"""Float models for the parity tests, after well-known networks for images: small ones, with their wiring."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(channels: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(channels)))


class ShuffleNet(nn.Module):
    """Channel split and shuffle, with sizes taken from the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv_bn(2, 1), nn.ReLU(), conv_bn(2, groups=2), nn.Conv2d(2, 2, 1))

    def forward(self, x: Tensor) -> Any:
        kept, changed = x.chunk(2, dim=1)
        y = torch.cat((kept, self.branch(changed)), dim=1)
        batch, channels, height, width = y.size()
        y = y.view(batch, 2, channels // 2, height, width)
        return torch.transpose(y, 1, 2).contiguous().view(batch, -1, height, width)


class Activations(nn.Module):
    """A convolution before every kind of activation."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(
            [
                nn.ReLU6(),
                nn.LeakyReLU(0.1),
                nn.ELU(),
                nn.Hardtanh(-0.5, 0.5),
                nn.Hardswish(),
                nn.Hardsigmoid(),
                nn.Sigmoid(),
                nn.Tanh(),
                nn.Softmax(dim=1),
                nn.PReLU(),
                nn.GELU(),
                nn.Softsign(),
            ]
        )
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in self.kinds])

    def forward(self, x: Tensor) -> Any:
        for conv, act in zip(self.convs, self.kinds, strict=True):
            x = act(conv(x))
        return x


class Gates(nn.Module):
    """An op with fixed qparams behind a producer, and the product with what it weighs; a PReLU with 8 bits of its own.

    Small, because default mappings observe histograms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList([nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1), nn.Hardsigmoid(), nn.PReLU()])
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in self.kinds])

    def forward(self, x: Tensor) -> Any:
        for layer, act in zip(self.layers, self.kinds, strict=True):
            x = x * act(layer(x))
        return x


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.group = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)
        self.conv2, self.instance = nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)
        self.conv3, self.layer = nn.Conv2d(4, 4, 1), nn.LayerNorm([8, 8])
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        x = self.instance(self.conv2(self.group(self.conv1(x))))
        return F.relu(self.bn(self.layer(self.conv3(x))))


class Video(nn.Module):
    """Three dimensions: a factorised convolution, pools, a batch norm with relu that follows no convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = (
            nn.Conv3d(2, 4, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(4, 4, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.bn, self.pool, self.relu = nn.BatchNorm3d(4), nn.MaxPool3d((1, 2, 2)), nn.ReLU()
        self.up = nn.ConvTranspose3d(4, 2, 2, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.time(F.relu(self.space(x))))
        return self.up(self.relu(self.bn(x)))


class Audio(nn.Module):
    """One dimension: dilated causal convolutions with padding, a gate of tanh and sigmoid, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.gate = nn.Conv1d(2, 4, 2, dilation=2), nn.Conv1d(2, 4, 2, dilation=2)
        self.out, self.up = nn.Conv1d(4, 2, 1), nn.ConvTranspose1d(2, 2, 2, 2)

    def forward(self, x: Tensor) -> Any:
        padded = F.pad(x, (2, 0))
        gated = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
        return self.up(self.out(gated) + x)


class GlobalPools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.max, self.fc = nn.Conv2d(4, 4, 3), nn.AdaptiveMaxPool2d(1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x).relu_()
        both = torch.cat([self.max(x), F.adaptive_avg_pool2d(x, 1)], dim=1)
        return self.fc(both.squeeze(-1).squeeze(-1))


class ConvBnChains(nn.Module):
    """Every fusion of two and three parts, in order, with a pooled skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(conv_bn(4), nn.ReLU()), conv_bn(4)
        self.c, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.bn, self.d = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 1)
        self.bn_of_transposed = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.c(self.b(self.a(x))))
        return self.bn_of_transposed(self.d(F.relu(self.bn(y)))) + y


class Upscaling(nn.Module):
    """Pixels shuffled and back, and interpolation to the size of another value; several outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.shuffle = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Any:
        fine = F.pixel_unshuffle(self.shuffle(F.relu(self.conv(x))), 2)
        coarse = self.down(fine)
        return {"coarse": coarse, "merged": fine + F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")}
