"""Small float networks of the families that people quantize, in plain torch, for what stands between their layers.

`FAMILIES` has a function for each, which returns a model in eval mode and its example inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]


class Rotary(nn.Module):
    """A decoder block: rotary positions, a cache that is joined to, a causal mask, grouped heads, RMS norms, SwiGLU."""

    frequencies: Tensor

    def __init__(self, width: int = 16, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size)
        self.out, self.gate, self.up = nn.Linear(width, width), nn.Linear(width, 24), nn.Linear(width, 24)
        self.down = nn.Linear(24, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, self.size, 2) / self.size))

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale

    def turn(self, x: Tensor, places: Tensor) -> Tensor:
        angles = torch.cat([places[:, None] * self.frequencies] * 2, -1)
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angles.cos() + turned * angles.sin()

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, steps, width = x.shape
        past = keys.shape[2]
        y = self.norm(x)
        q = self.q(y).view(rows, steps, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(rows, steps, 2 * self.groups, self.size).transpose(1, 2).chunk(2, 1)
        places = torch.arange(past + steps, dtype=x.dtype)
        q, k = self.turn(q, places[past:]), self.turn(k, places[past:])
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        mask = torch.full((steps, past + steps), -math.inf).triu(past + 1)
        repeats = self.heads // self.groups
        scores = q @ keys.repeat_interleave(repeats, 1).transpose(-2, -1) / math.sqrt(self.size) + mask
        mixed = scores.softmax(-1) @ values.repeat_interleave(repeats, 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, width))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), keys, values


class Encoder(nn.Module):
    """Tokens and places, attention with a padding mask, GELU, layer norms; the first token's result."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.qkv, self.out, self.norms = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.ModuleList(nn.LayerNorm(16) for _ in "ab"),
        )
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = self.norms[0](x + self.out(mixed.transpose(1, 2).flatten(2)))
        return torch.tanh(self.norms[1](x + self.down(F.gelu(self.up(x))))[:, 0])


class Vision(nn.Module):
    """Patches, a token of its own, places, attention, a scale for each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16) * 0.1)
        self.attention, self.norm, self.head = (
            nn.MultiheadAttention(16, 4, batch_first=True),
            nn.LayerNorm(16),
            nn.Linear(16, 5),
        )
        self.gamma = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Any:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.places
        z = self.norm(y)
        y = y + self.gamma * self.attention(z, z, z, need_weights=False)[0]
        return self.head(y[:, 1:].mean(1))


class Windows(nn.Module):
    """Shifted windows with a bias by relative place."""

    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(9, 2))
        places = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("index", (apart[..., 0] * 3 + apart[..., 1]).flatten())

    def forward(self, x: Tensor) -> Any:
        rows, height, width, size = x.shape
        y = torch.roll(x, (-1, -1), (1, 2)).view(rows, height // 2, 2, width // 2, 2, size)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, size)
        q, k, v = self.qkv(y).reshape(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias[self.index].view(4, 4, 2).permute(2, 0, 1)
        y = ((q * 0.5 @ k.transpose(-2, -1) + bias).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, size)
        y = self.out(y).view(rows, height // 2, width // 2, 2, 2, size).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(y.reshape(rows, height, width, size), (1, 1), (1, 2))


class StateSpace(nn.Module):
    """A selective scan: steps and gates are computed, states run on."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.steps, self.out = nn.Linear(6, 16), nn.Linear(8, 8), nn.Linear(8, 6)
        self.conv = nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.rate = nn.Parameter(torch.rand(8).log())

    def forward(self, x: Tensor) -> Any:
        y, gate = self.into(x).chunk(2, -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        step = F.softplus(self.steps(y))
        decay = torch.exp(-torch.exp(self.rate) * step)
        state, states = torch.zeros_like(y[:, 0]), []
        for place in range(4):
            state = decay[:, place] * state + step[:, place] * y[:, place]
            states.append(state)
        return self.out(torch.stack(states, 1) * F.silu(gate))


class UNet(nn.Module):
    """Down and up with a joined skip, group norms, an embedded time."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.up, self.last, self.norm = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(11, 3, 3, 1, 1), nn.GroupNorm(2, 8)
        self.time = nn.Linear(8, 8)

    def forward(self, x: Tensor, time: Tensor) -> Any:
        angles = time[:, None] * torch.exp(torch.arange(4) * -0.8)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        y = self.down(x) + embedded[:, :, None, None]
        y = y + self.middle(F.silu(self.norm(y)))
        return self.last(torch.cat([self.up(y), x], 1))


class Pyramid(nn.Module):
    """A feature pyramid: lateral layers, upsampled and added; several results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
        self.lateral_one, self.lateral_two, self.smooth = (
            nn.Conv2d(8, 6, 1),
            nn.Conv2d(12, 6, 1),
            nn.Conv2d(6, 6, 3, 1, 1),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = F.relu(self.one(x))
        two = F.relu(self.two(one))
        top = self.lateral_two(two)
        merged = self.lateral_one(one) + F.interpolate(top, scale_factor=2.0, mode="nearest")
        return {"0": self.smooth(merged), "1": top, "pool": F.max_pool2d(top, 1, 2)}


class Detector(nn.Module):
    """A head of YOLO: boxes from a grid and anchors, scores, the best of which are kept."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 14, 3, 2, 1)
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [3.0, 1.5]]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.conv(x).unflatten(1, (2, 7)).permute(0, 1, 3, 4, 2)
        rows = torch.arange(y.shape[2], dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1)
        centre, size = (y[..., :2].sigmoid() * 2 - 0.5 + grid) * 8, (y[..., 2:4].sigmoid() * 2) ** 2
        boxes = torch.cat([centre, size * self.anchors[:, None, None]], -1).flatten(1, 3)
        scores, classes = (y[..., 4:5].sigmoid() * y[..., 5:].sigmoid()).flatten(1, 3).max(-1)
        best, places = scores.topk(3, 1)
        return boxes.gather(1, places[..., None].expand(-1, -1, 4)), best, classes.gather(1, places)


class Segmenter(nn.Module):
    """Atrous layers, pooled context, upsampled logits and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Conv2d(3, 6, 3, padding=2, dilation=2), nn.Conv2d(3, 6, 1)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        near = F.relu(self.near(x))
        far = F.interpolate(self.far(F.adaptive_avg_pool2d(x, 1)), size=near.shape[-2:], mode="bilinear")
        logits = F.interpolate(self.head(torch.cat([near, far], 1)), scale_factor=2.0, mode="bilinear")
        return logits, logits.argmax(1)


class Speech(nn.Module):
    """A front end: pre-emphasis, power, a mel bank, a logarithm that is normalized, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.rand(6, 8))
        self.conv, self.out = nn.Conv1d(6, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]], 1)
        frames = x.unfold(1, 8, 4) * torch.hann_window(8)
        mel = torch.log(torch.einsum("btf,mf->bmt", frames.square(), self.bank).clamp(min=1e-4))
        mel = (mel - mel.mean(-1, keepdim=True)) / (mel.std(-1, keepdim=True) + 1e-3)
        return self.out(F.gelu(self.conv(mel)).amax(-1)).log_softmax(-1)


class Graph(nn.Module):
    """Messages gathered along edges, added up at their ends, divided by the degree."""

    sources: Tensor
    targets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(6, 6), nn.Linear(12, 4)
        self.register_buffer("sources", torch.tensor([0, 1, 2, 3, 0]))
        self.register_buffer("targets", torch.tensor([1, 2, 3, 0, 2]))

    def forward(self, x: Tensor) -> Any:
        messages = F.leaky_relu(self.message(x[self.sources]), 0.2)
        total = torch.zeros_like(x).index_add(0, self.targets, messages)
        degree = torch.bincount(self.targets, minlength=4).clamp(min=1)[:, None]
        return self.update(torch.cat([x, total / degree], -1)).softmax(0)


class Recommender(nn.Module):
    """Bags of items, dense features, all pairs of products, and a score."""

    pairs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.items, self.dense, self.top = nn.Embedding(30, 8), nn.Linear(5, 8), nn.Linear(11, 1)
        self.register_buffer("pairs", torch.tril_indices(3, 3, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Any:
        x = F.relu(self.dense(dense))
        features = torch.cat([x[:, None], self.items(ids)], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([x, products], 1))).squeeze(-1)


class Gated(nn.Module):
    """A gated unit and its transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.back = nn.Conv1d(1, 8, 3, padding=1), nn.ConvTranspose1d(4, 1, 4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.back(F.glu(self.conv(x), dim=1)))


class Squeeze(nn.Module):
    """Squeeze and excitation, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(6, 6, 3, 1, 1), nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> Any:
        y = F.hardswish(self.conv(x))
        scale = F.hardsigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return x + y * scale


class Experts(nn.Module):
    """A mixture of two of three experts, by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        picked = each.gather(1, chosen[..., None].expand(-1, -1, each.shape[-1]))
        return (weights[..., None] * picked).sum(1)


class Shuffle(nn.Module):
    """Channels are split, one half is worked on, and they are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Conv2d(4, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        kept, worked = x.chunk(2, 1)
        joined = torch.cat([kept, F.relu(self.branch(worked))], 1)
        return joined.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


class Contrast(nn.Module):
    """Two towers whose normalized results are compared, at a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 6), nn.Linear(5, 6)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return a @ b.t() * self.temperature.exp()


class Fourier(nn.Module):
    """Coordinates to sines and cosines, then layers; a skip in the middle."""

    powers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 16), nn.Linear(28, 16), nn.Linear(16, 3)
        self.register_buffer("powers", 2.0 ** torch.arange(3))

    def forward(self, x: Tensor) -> Any:
        angles = (x[..., None] * self.powers).flatten(1)
        encoded = torch.cat([angles.sin(), angles.cos()], -1)
        y = F.relu(self.first(encoded))
        return torch.sigmoid(self.last(F.relu(self.second(torch.cat([y, encoded], -1)))))


class Recurrent(nn.Module):
    """A cell of its own, in two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Linear(9, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = state = torch.zeros(x.shape[0], 4)
        for place in range(2):
            i, f, g = self.gates(torch.cat([x[:, place], hidden], -1)).chunk(3, -1)
            state = f.sigmoid() * state + i.sigmoid() * g.tanh()
            hidden = state.tanh()
        return self.out(hidden)


class SuperResolution(nn.Module):
    """Pixels are shuffled up, and the upsampled input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 12, 3, 1, 1)

    def forward(self, x: Tensor) -> Any:
        y = F.pixel_shuffle(self.up(F.prelu(self.conv(x), torch.full((8,), 0.2))), 2)
        return (y + F.interpolate(x, scale_factor=2.0, mode="bicubic", align_corners=False)).clamp(0, 1)


class Pointwise(nn.Module):
    """Points: a shared network, the largest over all points, a transform that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.transform, self.one, self.two = nn.Linear(3, 9), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        turned = x @ (self.transform(x.mean(1)).view(-1, 3, 3) + torch.eye(3))
        return self.two(F.relu(self.one(turned)).amax(1))


class Quantizing(nn.Module):
    """The nearest entry of a codebook, and how far it is."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.encode(x)
        apart = y.square().sum(1, keepdim=True) - 2 * y @ self.codes.t() + self.codes.square().sum(1)
        place = apart.argmin(1)
        return self.decode(self.codes[place]), place


class Weighted(nn.Module):
    """A weight that is normalized by its own length, and one that is computed of two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.weight, self.a, self.b = (
            nn.Parameter(torch.randn(4, 8)),
            nn.Parameter(torch.randn(4, 2)),
            nn.Parameter(torch.randn(2, 8)),
        )

    def forward(self, x: Tensor) -> Any:
        return F.linear(F.elu(self.first(x)), self.weight + 0.5 * self.a @ self.b)


class Filled(nn.Module):
    """A tensor is filled in place, by slices and where a mask says so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.zeros(x.shape[0], 6)
        y = torch.slice_scatter(y, self.linear(x), 1, 1, 5)
        return y.masked_fill(y < -1.0, 0.25) + F.pad(x, (1, 1), mode="replicate")


class Norms(nn.Module):
    """What normalizes in other ways: local response, instances, and a standardized weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 6, 3, 1, 1), nn.Parameter(torch.randn(4, 6, 1, 1))

    def forward(self, x: Tensor) -> Any:
        y = F.instance_norm(F.local_response_norm(F.relu(self.conv(x)), 3))
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 1e-5)
        return F.avg_pool2d(F.conv2d(y, weight), 2)


def _image(side: int = 8, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side)


class Ranked(nn.Module):
    """Values in order, the largest so far, and how far rows are from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        apart = torch.cdist(y, y.flip(1) + 3).sum(-1, keepdim=True)
        ordered: Tensor = torch.sort(y, -1, descending=True).values
        result: Tensor = self.last(ordered + y.cummax(1).values / apart)
        return result


class Turned(nn.Module):
    """Pairs that are turned as complex numbers, and mixed by a Fourier transform."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("turns", torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.3, 0.1, 0.03])))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(x).unflatten(-1, (4, 2)))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(self.turns), self.turns)).flatten(-2)
        result: Tensor = self.last(torch.fft.fft2(turned).real)
        return result


class Attending(nn.Module):
    """A layer of a Transformer, and one of attention to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.layer(x)
        result: Tensor = self.last(hidden + self.attention(hidden, y, y, need_weights=False)[0])
        return result


class Generated(nn.Module):
    """A convolution whose weight a layer makes of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.make, self.last = nn.Conv2d(3, 4, 1), nn.Linear(4, 16), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        weight = self.make(y.mean((0, 2, 3))).reshape(4, 4, 1, 1)
        result: Tensor = self.last(F.conv2d(y, weight))
        return result


class Overwriting(nn.Module):
    """Activations that overwrite what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 8), nn.Hardswish(inplace=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.first(x))
        result: Tensor = self.last(F.relu(self.act(y * y.mean(-1, keepdim=True)), inplace=True))
        return result


class Masked(nn.Module):
    """Attention without a scale, whose mask is the least float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, value = self.first(x).chunk(2, -1)
        least = torch.finfo(torch.float32).min
        weights = (query @ query.mT + (1 - mask[:, None].float()) * least).softmax(-1)
        result: Tensor = self.last(weights @ value)
        return result


INPUTS: dict[type[nn.Module], Callable[[], tuple[Any, ...]]] = {
    Rotary: lambda: (torch.randn(2, 3, 16), torch.randn(2, 2, 2, 4), torch.randn(2, 2, 2, 4)),
    Encoder: lambda: (torch.randint(0, 40, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])),
    Vision: lambda: (_image(),),
    Windows: lambda: (torch.randn(2, 4, 4, 8),),
    StateSpace: lambda: (torch.randn(2, 4, 6),),
    UNet: lambda: (_image(), torch.tensor([1.0, 7.0])),
    Pyramid: lambda: (_image(16),),
    Detector: lambda: (_image(),),
    Segmenter: lambda: (_image(),),
    Speech: lambda: (torch.randn(2, 40),),
    Graph: lambda: (torch.randn(4, 6),),
    Recommender: lambda: (torch.randn(3, 5), torch.randint(0, 30, (3, 2))),
    Gated: lambda: (torch.randn(2, 1, 16),),
    Squeeze: lambda: (_image(6, 6),),
    Experts: lambda: (torch.randn(5, 6),),
    Shuffle: lambda: (_image(6, 8),),
    Contrast: lambda: (torch.randn(3, 8), torch.randn(4, 5)),
    Fourier: lambda: (torch.rand(6, 2),),
    Recurrent: lambda: (torch.randn(3, 2, 5),),
    SuperResolution: lambda: (torch.rand(2, 3, 6, 6),),
    Pointwise: lambda: (torch.randn(2, 7, 3),),
    Quantizing: lambda: (torch.randn(8, 6),),
    Weighted: lambda: (torch.randn(5, 6),),
    Filled: lambda: (torch.randn(5, 4),),
    Norms: lambda: (_image(),),
    Overwriting: lambda: (torch.randn(4, 8),),
    Masked: lambda: (torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])),
    Ranked: lambda: (torch.randn(2, 4, 8),),
    Turned: lambda: (torch.randn(2, 5, 8),),
    Attending: lambda: (torch.randn(2, 4, 8), torch.randn(2, 3, 8)),
    Generated: lambda: (_image(),),
}
"""What each family is given."""


def make(family: type[nn.Module], seed: int = 0) -> Made:
    """Return a model of a family in eval mode, and example inputs."""
    torch.manual_seed(seed)
    return family().eval(), INPUTS[family]()


FAMILIES: dict[str, type[nn.Module]] = {family.__name__: family for family in INPUTS}
