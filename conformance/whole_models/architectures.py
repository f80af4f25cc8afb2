"""Small float models to take through the whole flow: graphs of a few patterns, and the table of these and of the zoo.

Sizes are tiny (a forward takes milliseconds). Weights come from torch's generator: seed it before building.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_quant_conformance.conformance.claims.case import Case, ValueRange
from fx_quant_conformance.conformance.ops.op_model import Input, Role
from fx_quant_conformance.conformance.whole_models.zoo import Encoder, MobileNet, Recommender, ResNet, Tagger, UNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model to build and its inputs."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    needs: tuple[Any, ...]
    """The ops that a config must claim for the model to test it."""
    ranges: tuple[tuple[float, float], ...] = ((-1.0, 1.0),)
    """The ranges of its activations, in turn."""
    is_small: bool = True
    """Whether it is a few ops, cheap enough for any run."""

    def case(self) -> Case:
        """Return the model as a case of the suite."""
        value_range = ValueRange(name="zoo", ranges=self.ranges, goes_beyond=True)
        return Case(name=self.name, build=lambda: settle(self.build()), inputs=self.inputs, value_range=value_range)


# -- graphs of several patterns ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """conv + bn + relu + conv, added to their input, and a relu of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.after = nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 8, H, W); give the same shape."""
        return self.relu(x + self.after(self.relu(self.bn(self.conv(x)))))


class Reused(nn.Module):
    """A value that is added to a convolution's result is read again: a kernel may not write over it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 8, H, W)."""
        x = self.stem(x)
        return (self.conv(x) + x) * x


class Branches(nn.Module):
    """A value with one observer that three consumers read; their results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.deep = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 8, H, W)."""
        x = self.stem(x)
        return self.wide(x) + self.deep(x) + self.pool(x)


class Joined(nn.Module):
    """cat of branches whose ranges differ by a factor of hundreds, two of them twice: five in all."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.small, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(32, 8, 1)
        self.wide.weight.data *= 8
        self.small.weight.data /= 8

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 4, H, W); give (N, 8, H, W)."""
        small = self.small(x)
        return self.last(torch.cat([self.wide(x) * self.deep(x), x, small, x, small], 1))


class FloatBetween(nn.Module):
    """Quantized, float, quantized: neither GELU nor a difference is in the configs of native engines."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.gelu, self.after = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 9)

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 16); give (N, 9)."""
        x = self.before(x)
        return self.after(self.gelu(x) - x)


class SharedRelu(nn.Module):
    """One module without state at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(16, 24), nn.Linear(24, 16), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 16); give the same shape."""
        return self.relu(x + self.relu(self.second(self.relu(self.first(x)))))


class SharedConv(nn.Module):
    """One convolution at two places, and another with its weights, so that one weight has inputs of three grids."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.twin = copy.deepcopy(self.shared)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 8, H, W); give the same shape."""
        return self.twin(self.shared(self.shared(x)))


class SharedLinear(nn.Module):
    """One module with a weight at two places, so that its results have two ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 16); give (N, 4)."""
        return self.last(self.shared(self.shared(x)))


class Chunked(nn.Module):
    """A gated unit: the two halves of one result, by chunk, multiplied; then pieces by split, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(16, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        """Take rows (N, 16); give (N, 8)."""
        value, gate = torch.chunk(self.both(x), 2, dim=-1)
        left, right = torch.split(value * F.hardswish(gate), [9, 7], dim=-1)
        return self.last(torch.cat([right, left], dim=-1))


class TwoOutputs(nn.Module):
    """Two outputs that are computed from one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.pool = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 4, H - 2, W - 2) and (N, 8)."""
        x = F.relu(self.stem(x))
        return self.head(x), torch.flatten(self.pool(x), 1)


class ReadInside(nn.Module):
    """A layer's result that a relu reads, a sum beside it, and the caller, who gets the relu's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, H, W); give (N, 8, H, W) twice and (N, 4, H, W)."""
        x = self.stem(x)
        rectified = self.relu(x)
        return x, rectified, self.head(rectified + x)


class LeNet(nn.Module):
    """An image of one channel, flattened into a linear layer. (LeCun et al. 1998)"""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.pool = nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)
        self.hidden, self.classify = nn.Linear(6 * 4 * 3, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 1, 12, 10); give the scores of ten classes, (N, 10)."""
        x = torch.flatten(self.pool(self.relu(self.conv(x))), 1)
        return self.classify(self.relu(self.hidden(x)))


class Large(nn.Module):
    """An image of more than 64 pixels each way, which is returned pooled, and its averages over wide windows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(8, 8, 3), nn.MaxPool2d(3, stride=2)
        self.average = nn.AvgPool2d((16, 31))

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 8, 67, 65); give (N, 8, 32, 31) and (N, 8, 2, 1)."""
        pooled = self.pool(self.conv(x))
        return pooled, self.average(pooled)


class Excited(nn.Module):
    """Squeeze and excite: a product that broadcasts one operand over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.pool = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1), nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 8, H, W); give the same shape."""
        return x * self.gate(self.up(F.relu(self.down(self.pool(x)))))


class Functional(nn.Module):
    """Weights as arguments of functions, and moves between them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3) / 5), nn.Parameter(torch.randn(8) / 4)
        self.matrix = nn.Parameter(torch.randn(9, 72) / 8)

    def forward(self, x: Tensor) -> Any:
        """Take images (N, 3, 8, 8); give (N, 9)."""
        x = F.relu(F.conv2d(x, self.kernel, self.bias, stride=2, padding=1))
        return F.linear(torch.flatten(F.max_pool2d(x, 2, stride=1), 1), self.matrix)


class TwoBranches(nn.Module):
    """A sum and a product of two inputs of different ranges, both read twice, the second one first."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.product = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Take rows twice (N, 16); give (N, 8)."""
        return self.sum(y + x) * self.product(x * y)


# -- the table --------------------------------------------------------------------------------------------------------

_ROWS = (Input(shape=(4, 16)),)
_IMAGES = (Input(shape=(2, 3, 9, 8)),)
_POSITIVE = ((-0.5, 2.0),)


def _tokens(*shape: int, of: int) -> Input:
    return Input(shape=shape, role=Role.INDEX, high=of)


def _row(
    build: Callable[[], nn.Module], name: str, inputs: tuple[Input, ...], *needs: Any, **options: Any
) -> Architecture:
    return Architecture(name=name, build=build, inputs=inputs, needs=needs, **options)


ARCHITECTURES: tuple[Architecture, ...] = (
    _row(Residual, "residual", (Input(shape=(2, 8, 7, 6)),), nn.Conv2d, operator.add),
    _row(Reused, "reused_summand", _IMAGES, nn.Conv2d, operator.add, operator.mul),
    _row(Branches, "branches", _IMAGES, nn.Conv2d, operator.add, ranges=_POSITIVE),
    _row(Joined, "cat_of_ranges", (Input(shape=(2, 4, 7, 6)),), nn.Conv2d, torch.cat, ranges=((-0.1, 3.0),)),
    _row(FloatBetween, "float_between", _ROWS, nn.Linear),
    _row(SharedRelu, "shared_relu", _ROWS, nn.Linear),
    _row(SharedConv, "shared_conv", (Input(shape=(2, 8, 5, 6)),), nn.Conv2d),
    _row(SharedLinear, "shared_linear", _ROWS, nn.Linear),
    _row(Chunked, "chunked", _ROWS, nn.Linear),
    _row(TwoOutputs, "two_outputs", _IMAGES, nn.Conv2d, ranges=_POSITIVE),
    _row(ReadInside, "read_inside", _IMAGES, nn.Conv2d, operator.add),
    _row(LeNet, "lenet", (Input(shape=(3, 1, 12, 10)),), nn.Conv2d, nn.Linear, ranges=_POSITIVE),
    _row(
        lambda: nn.Sequential(nn.Linear(641, 321), nn.ReLU(), nn.Linear(321, 9)),
        "many_rows",
        (Input(shape=(33, 641)),),
        nn.Linear,
    ),
    _row(Large, "large", (Input(shape=(1, 8, 67, 65)),), nn.Conv2d, nn.AvgPool2d),
    _row(Excited, "excited", (Input(shape=(2, 8, 5, 6)),), nn.Conv2d, operator.mul, ranges=((-3.0, 1.0),)),
    _row(Functional, "functional", (Input(shape=(2, 3, 8, 8)),), F.conv2d, F.linear),
    _row(TwoBranches, "two_inputs", _ROWS * 2, nn.Linear, operator.add, ranges=((-1.0, 1.0), (0.0, 50.0))),
    _row(ResNet, "resnet", (Input(shape=(2, 3, 32, 32)),), nn.Conv2d, nn.Linear, is_small=False),
    _row(MobileNet, "mobilenet", (Input(shape=(2, 3, 16, 16)),), nn.Conv2d, nn.Linear, is_small=False),
    _row(UNet, "unet", (Input(shape=(1, 3, 16, 16)),), nn.Conv2d, nn.ConvTranspose2d, is_small=False),
    _row(lambda: Encoder(6, 16), "transformer", (Input(shape=(2, 6, 16)),), nn.Linear, is_small=False),
    _row(Tagger, "lstm_tagger", (_tokens(2, 6, of=50),), nn.LSTM, is_small=False),
    _row(
        Recommender,
        "dlrm",
        (Input(shape=(3, 9)), _tokens(3, 4, of=40), _tokens(3, 2, of=40)),
        nn.Linear,
        is_small=False,
    ),
)


def settle(model: nn.Module) -> nn.Module:
    """Return the model in eval mode, its batch norms with statistics and parameters as after some training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.uniform_(-0.3, 0.3)
                module.running_var.uniform_(0.3, 1.5)
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return model.eval()
