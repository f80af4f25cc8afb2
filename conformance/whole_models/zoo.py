"""Well-known architectures, tiny: a forward takes milliseconds, shapes, skips, branches and mixtures are the real ones.

Weights come from torch's generator: seed it before building.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """ResNet's basic block; `stride` 2 halves the image and projects the skip."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(c_out), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Any:
        """Take (N, c_in, H, W); give (N, c_out, H / stride, W / stride), rounded up."""
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.skip(x))


class ResNet(nn.Module):
    """Stem with max pooling, two basic blocks, average pooling, a classifier. (He et al. 2016)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.pool, self.blocks = nn.MaxPool2d(3, stride=2, padding=1), nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.average, self.classify = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give the scores of ten classes, (N, 10)."""
        return self.classify(torch.flatten(self.average(self.blocks(self.pool(self.stem(x)))), 1))


class Inverted(nn.Module):
    """MobileNet's inverted residual: expand, depthwise, squeeze and excite, project; hardswish between."""

    def __init__(self, width: int, hidden: int, kernel: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish())
        depthwise = nn.Conv2d(hidden, hidden, kernel, padding=kernel // 2, groups=hidden, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(hidden), nn.Hardswish())
        self.project = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))
        self.squeeze, self.down, self.up = nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, 8, 1), nn.Conv2d(8, hidden, 1)
        self.relu, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Any:
        """Take (N, width, H, W); give the same shape."""
        hidden = self.depthwise(self.expand(x))
        scale = self.gate(self.up(self.relu(self.down(self.squeeze(hidden)))))
        return x + self.project(scale * hidden)


class MobileNet(nn.Module):
    """Stem, two inverted residuals with depthwise convolutions of 3 and 5, hardswish, a classifier. (Howard 2019)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.Hardswish())
        self.blocks = nn.Sequential(Inverted(8, 16, 3), Inverted(8, 24, 5))
        self.pool, self.classify = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give the scores of ten classes, (N, 10)."""
        return self.classify(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class Double(nn.Sequential):
    """Two convolutions with batch norm and relu."""

    def __init__(self, c_in: int, c_out: int) -> None:
        first = (nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU())
        super().__init__(*first, nn.Conv2d(c_out, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU())


class UNet(nn.Module):
    """Down twice by max pooling, up twice by transposed convolutions, skips joined by cat. (Ronneberger et al. 2015)"""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.middle, self.bottom = Double(3, 8), Double(8, 12), Double(12, 16)
        self.pool, self.up1 = nn.MaxPool2d(2), nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=1)
        self.join1, self.join2, self.last = Double(24, 12), Double(16, 8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W), H and W multiples of 4; give two scores for each pixel, (N, 2, H, W)."""
        top = self.top(x)
        middle = self.middle(self.pool(top))
        x = self.join1(torch.cat([middle, self.up1(self.bottom(self.pool(middle)))], 1))
        return self.last(self.join2(torch.cat([top, self.up2(x)], 1)))


class Attention(nn.Module):
    """Two heads by view and transpose; matmul, softmax, matmul."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.softmax, self.heads = nn.Linear(width, width), nn.Softmax(dim=-1), (-1, length, 2, width // 2)
        self.whole = (-1, length, width)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*self.heads).transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        """Take sequences (N, length, width); give the same shape."""
        query, key, value = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        weights = self.softmax(torch.matmul(query, key.transpose(-2, -1)))
        return self.out(torch.matmul(weights, value).transpose(1, 2).reshape(*self.whole))


class Encoder(nn.Module):
    """A transformer's encoder layer, norms first, with GELU. (Vaswani et al. 2017)"""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(length, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Any:
        """Take sequences (N, length, width); give the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Tagger(nn.Module):
    """Token numbers, embedding, LSTM in both directions, a label for each token. (Huang et al. 2015)"""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 12, batch_first=True, bidirectional=True)
        self.label = nn.Linear(24, 7)

    def forward(self, tokens: Tensor) -> Any:
        """Take token numbers below 50, int64 (N, T); give the scores of seven labels for each, (N, T, 7)."""
        states, _ = self.lstm(self.table(tokens))
        return self.label(states)


class Recommender(nn.Module):
    """Dense features through linears, sparse ones through bags of embeddings, their products, linears. (Naumov 2019)"""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
        self.bags = nn.ModuleList([nn.EmbeddingBag(40, 12, mode="sum") for _ in range(2)])
        self.top = nn.Sequential(nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, users: Tensor, items: Tensor) -> Any:
        """Take dense features (N, 9) and two bags of numbers below 40, int64 (N, any); give a probability, (N, 1)."""
        x, user, item = self.bottom(dense), self.bags[0](users), self.bags[1](items)
        return self.top(torch.cat([x, user, x * item, user * item], 1))
