"""Float models for the parity tests, after well-known networks for images: small ones, with their wiring."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(into: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(OrderedDict(conv=conv, bn=nn.BatchNorm2d(out)))


def conv_bn_act(
    into: int, out: int, act: nn.Module, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(conv_bn(into, out, kernel, stride, groups), act)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Any:
        scale = self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))
        return scale * x


class EfficientNet(nn.Module):
    """SiLU, which no config quantizes, and squeeze-excite with a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = conv_bn_act(4, 8, nn.SiLU(), 1), conv_bn_act(8, 8, nn.SiLU(), groups=8)
        self.excite, self.project = SqueezeExcite(8, nn.SiLU(), nn.Sigmoid()), conv_bn(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.project(self.excite(self.depthwise(self.expand(x)))) + x


class DenseNet(nn.Module):
    """Norm and relu before the convolution: a batch norm that nothing folds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, 2, 3, padding=1, bias=False)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Any:
        features = [x]
        features.append(self.conv1(self.relu(self.norm1(torch.cat(features, 1)))))
        features.append(self.conv2(F.relu(self.norm2(torch.cat(features, 1)))))
        return self.pool(torch.cat(features, 1))


class ShuffleNet(nn.Module):
    """Channel split and shuffle, with sizes taken from the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(conv_bn_act(2, 2, nn.ReLU(), 1), conv_bn(2, 2, groups=2), nn.Conv2d(2, 2, 1))

    def forward(self, x: Tensor) -> Any:
        kept, changed = x.chunk(2, dim=1)
        y = torch.cat((kept, self.branch(changed)), dim=1)
        batch, channels, height, width = y.size()
        y = y.view(batch, 2, channels // 2, height, width)
        return torch.transpose(y, 1, 2).contiguous().view(batch, -1, height, width)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.shuffle = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, x: Tensor) -> Any:
        y = self.shuffle(self.conv2(F.relu(self.conv1(x))))
        return F.pixel_unshuffle(y, 2)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 2, 3, 2, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2, 6, 2, 2), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, 2, bias=False), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Any:
        return self.decoder(self.encoder(x))


class FeaturePyramid(nn.Module):
    """Several outputs by name; interpolation to the size of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.laterals = nn.ModuleDict({"low": nn.Conv2d(4, 4, 1), "high": nn.Conv2d(4, 4, 1)})

    def forward(self, x: Tensor) -> Any:
        low = F.relu(self.low(x))
        high = F.relu(self.high(low))
        top = self.laterals["high"](high)
        merged = self.laterals["low"](low) + F.interpolate(top, size=low.shape[-2:], mode="nearest")
        return {"top": top, "merged": merged}


class SpatialAttention(nn.Module):
    """CBAM-like: mean and max over channels, cat, conv, sigmoid, mul."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.conv = nn.Conv2d(4, 4, 1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        pooled = torch.cat([torch.mean(x, dim=1, keepdim=True), torch.max(x, dim=1, keepdim=True)[0]], dim=1)
        return x * torch.sigmoid(self.conv(pooled))


class Activations(nn.Module):
    """A convolution before every kind of activation."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList([
            nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.Hardtanh(-0.5, 0.5), nn.Hardswish(), nn.Hardsigmoid(),
            nn.Sigmoid(), nn.Tanh(), nn.Softmax(dim=1), nn.PReLU(), nn.GELU(), nn.Softsign(),
        ])  # fmt: skip
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in self.kinds])

    def forward(self, x: Tensor) -> Any:
        for conv, act in zip(self.convs, self.kinds, strict=True):
            x = act(conv(x))
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
        self.a, self.b = conv_bn_act(4, 4, nn.ReLU()), conv_bn(4, 4)
        self.c, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.bn, self.d = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 1)
        self.bn_of_transposed = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.c(self.b(self.a(x))))
        return self.bn_of_transposed(self.d(F.relu(self.bn(y)))) + y
