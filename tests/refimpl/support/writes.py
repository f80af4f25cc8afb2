"""Forwards that write in place, by name: statements whose result is read later, and writes to inputs and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Run = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """A convolution, and what the statements of the tests need; `forward` is the test's."""

    def __init__(self, body: Run) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.conv, self.factor = nn.Conv2d(3, 4, 1), nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout()
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("cache", torch.zeros(4, 6, 6))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


STATEMENTS: dict[str, Run] = {}


def statement(body: Run) -> Run:
    STATEMENTS[body.__name__] = body
    return body


@statement
def method(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.mul_(net.factor)
    return y + 1


@statement
def function(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    torch.relu_(y)
    return y + 1


@statement
def flag(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    F.leaky_relu(y, 0.2, inplace=True)
    return y + 1


@statement
def module(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    net.relu(y)
    return y + 1


@statement
def copied(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.copy_(x.sum(1, keepdim=True))
    return y * 2


@statement
def masked_item(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y[x[:, :1].expand(-1, 4, -1, -1) < 0] = 0.5
    return y * 2


@statement
def augmented_item(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y[:, 0] += 1
    return y * 2


@statement
def augmented_alias(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    z = y
    z += 1
    return y * 2


@statement
def augmented_number(net: Any, x: Tensor) -> Any:
    size = x.size(2)
    larger = size
    larger += 1
    return net.conv(x).reshape(-1, 4, size * size)


@statement
def without_twin(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y[:, 1].fill_(2.0)
    y[:, 2].zero_()
    return y + net.conv(x)


@statement
def chained(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.mul_(2).add_(1)
    return y * 3


@statement
def read_before(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    z = y + 1
    y.relu_()
    return y * z


@statement
def through_views(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    view = y.transpose(2, 3)
    view[:, :, 0].clamp_(0, 0.1)
    return y + view


@statement
def views_beside_each_other(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    left, right = y[:, :2], y[:, 1:3]
    left.mul_(2)
    right.sub_(1)
    return torch.cat([y, left, right], 1)


@statement
def part_of_a_tuple(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    parts = y.chunk(2, 1)
    y[:, 0].mul_(2)
    return parts[0] + parts[1]


@statement
def data(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.data.mul_(2)
    return y + 1


@statement
def shape(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    y.unsqueeze_(1)
    return y.sum(1)


@statement
def residual(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    return net.relu(y) - 0.1 + y  # y is what the relu left


@statement
def copy_of_a_view(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    z = y.reshape(4, -1)
    z.mul_(2)
    return z + 1  # nothing reads y, whether or not z shares its memory


@statement
def part_of_pair(net: Any, x: Tensor) -> Any:
    weights, places = net.conv(x).sigmoid().topk(2, 1)
    weights /= weights.sum(1, keepdim=True)
    return net.conv(x) * (weights.sum(1, keepdim=True) + places.ge(0).sum(1, keepdim=True))


@statement
def part_of_pair_by_name(net: Any, x: Tensor) -> Any:
    largest = torch.max(net.conv(x), 1)
    largest.values.mul_(2)
    return largest[0] + 1


@statement
def part_of_pair_of_integers(net: Any, x: Tensor) -> Any:
    pair = (x > -100).long().sort(1)
    pair[0].add_(5)
    return torch.where(pair.values.sum(1, keepdim=True) > 15, net.conv(x), 0.0)


@statement
def size(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    rows, channels, _, _ = y.shape
    rows *= 2
    return y.reshape(rows, 2, 6, 6) + channels


@statement
def part_of_statistics(net: Any, x: Tensor) -> Any:
    variance, mean = torch.var_mean(net.conv(x), (2, 3))
    variance.add_(1)
    return mean / variance


OUTSIDE: dict[str, Run] = {}


def outside(body: Run) -> Run:
    OUTSIDE[body.__name__] = body
    return body


@outside
def part_of_input(net: Any, x: Tensor) -> Any:
    x[:, 0].zero_()
    return net.conv(x)


@outside
def counter(net: Any, x: Tensor) -> Any:
    net.count.add_(1)
    return net.conv(x) * net.count


@outside
def augmented_counter(net: Any, x: Tensor) -> Any:
    net.count += 1
    return net.conv(x) * net.count


@outside
def assigned_counter(net: Any, x: Tensor) -> Any:
    net.count = net.count + 1
    return net.conv(x) * net.count


@outside
def cache(net: Any, x: Tensor) -> Any:
    y = net.conv(x)
    net.cache[0] = y[0, 0]
    return y + net.cache
