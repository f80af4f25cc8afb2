"""Models with batch norms that torchao folds, rightly and wrongly, and what find_changes names of each.

The tensors are small integers, the variances 1/4 and 4, and eps is 0. In float64 a folded batch norm
then gives the same bits as one that is not, whatever the order of operations: no number on the way has 53 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fx_quant_conformance.refimpl.exported.pt2e_changes import ChangeKind as Kind


class Model(nn.Module):
    """A function of parts and inputs as a module."""

    def __init__(self, call: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self, *inputs)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = conv(), conv(), norm()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.first(x)), self.second(x)


class Constant(nn.Module):
    """A weight that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = torch.ones(2, 2, 3, 3, dtype=torch.float64), norm()

    def forward(self, x: Tensor) -> Any:
        return self.norm(F.conv2d(x, self.weight))


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(2, 2, 3, padding=1, **options)


def norm(channels: int = 2, **options: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, **{"eps": 0.0, **options})


def norm_of_rows(channels: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(channels, eps=0.0)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def layers(**options: Any) -> Any:
    return {"conv": conv(**options), "norm": norm(), "other": norm()}


def settle(model: nn.Module) -> nn.Module:
    """Give a model small odd integers, and each batch norm a variance; in eval mode and in float64."""
    draw = torch.Generator().manual_seed(1)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = 2.0 * torch.randint(0, 3, tensor.shape, generator=draw) - 1
    norms = (part for part in model.modules() if isinstance(part, _BatchNorm))
    for number, part in enumerate(norms):
        if part.running_var is not None:
            part.running_var.fill_((0.25, 4.0)[number % 2])  # by odd weights: no norm leaves its input as it is
    return model.double().eval()


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(2)).double()


def export(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    return torch.export.export(model, inputs, **options).module()


class Folded(NamedTuple):
    """A model, the kinds of what is named, and the shapes of its inputs."""

    make: Callable[[], nn.Module]
    kinds: tuple[Kind, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ((2, 2, 4, 4),)

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return settle(self.make()), tuple(integers(*shape) for shape in self.shapes)


def of(call: Callable[..., Any], *kinds: Kind, bias: bool = True, **parts: Any) -> Folded:
    """Return a function of a convolution ``conv``, the batch norms ``norm`` and ``other``, and parts of its own."""
    return Folded(lambda: Model(call, **layers(bias=bias), **parts), kinds)


def linear(part: nn.Module) -> Model:
    """Return a linear layer whose result a batch norm reads, and a sum."""
    return Model(lambda m, x: m.norm(y := m.layer(x)) + y, layer=nn.Linear(2, 3), norm=part)


def _normalize(m: Any, x: Tensor, weight: Tensor, eps: float = 0.0, training: bool = False) -> Tensor:
    return F.batch_norm(x, m.norm.running_mean, m.norm.running_var, weight, m.norm.bias, training, 0.1, eps)


RIGHT = {
    "alone": Folded(lambda: nn.Sequential(conv(), norm(), nn.ReLU())),
    "no bias": Folded(lambda: nn.Sequential(conv(bias=False), norm())),
    "not affine": Folded(lambda: nn.Sequential(conv(), norm(affine=False))),
    "padding by name": Folded(lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding="same"), norm())),
    "groups": Folded(lambda: nn.Sequential(conv(groups=2), norm())),
    "transposed": Folded(lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), norm(3))),
    "linear": Folded(lambda: nn.Sequential(nn.Linear(2, 3), norm_of_rows(3)), shapes=((4, 2),)),
    "linear, of sequences": Folded(lambda: linear(norm_of_rows(4)), shapes=((5, 4, 2),)),  # torchao folds no such
    "one layer and norm, twice": of(lambda m, x: (m.norm(m.conv(x)), m.norm(m.conv(x + 1)))),
    "one norm, twice of one result": of(lambda m, x: m.norm(y := m.conv(x)) * 2 + m.norm(y)),
    "shape and dtype": of(
        lambda m, x: m.norm(y := m.conv(x.type_as(m.conv.weight))) + torch.zeros_like(y) + y.new_ones(y.shape)
    ),
    "dead code": of(lambda m, x: (y := m.conv(x), m.conv(x + 1), y * 2, m.norm(y))[-1]),
    "a dead norm behind a fold": of(lambda m, x: (y := m.conv(m.norm(m.first(x))), m.other(y), y)[-1], first=conv()),
    "reads of the norm": of(lambda m, x: (m.norm(m.conv(x)), m.norm.weight * 2, m.norm.running_mean + 1)),
    "the layer's bias is the norm's": of(lambda m, x: m.norm(F.conv2d(x, m.conv.weight, m.norm.bias))),
    "in place behind the norm": of(lambda m, x: m.norm(m.conv(x)).relu_()),
    "dropout between": of(lambda m, x: (m.norm(m.drop(y := m.conv(x))), y), drop=nn.Dropout()),
    "a copy between, result": of(lambda m, x: m.norm((y := m.conv(x)).clone()) + y),
    "a copy between, levels": of(lambda m, x: (m.norm(m.conv(x).clone()), m.other(m.conv(x[..., ::2]).clone()))),
    "a copy between, weight": of(lambda m, x: (m.norm(m.conv(x).clone()), m.conv.weight.square().sum())),
}
"""Models of which nothing is named."""

WRONG = {
    "residual": of(lambda m, x: m.norm(y := m.conv(x)) + y, Kind.RESULT_READ),
    "returned": of(lambda m, x: (m.norm(y := m.conv(x)), y), Kind.RESULT_READ),
    "in a list": of(lambda m, x: torch.cat([m.norm(y := m.conv(x)), y]), Kind.RESULT_READ),
    "cast": of(lambda m, x: m.norm(y := m.conv(x)) + y.double(), Kind.RESULT_READ),
    "written in place": of(lambda m, x: (y := m.conv(x), y[:, 0].add_(1), m.norm(y))[-1], Kind.RESULT_READ),
    "a dead norm": of(lambda m, x: (y := m.conv(x), m.norm(y), y * 2)[-1], Kind.RESULT_READ),
    "linear, result": Folded(lambda: linear(norm_of_rows(3)), (Kind.RESULT_READ,), ((4, 2),)),
    "two norms": of(lambda m, x: (m.norm(y := m.conv(x)), m.other(y)), Kind.NORM_DROPPED),
    "a norm of a norm": of(lambda m, x: m.other(m.norm(m.conv(x))), Kind.NORM_DROPPED),
    "a norm of itself": of(lambda m, x: m.norm(m.norm(m.conv(x))), Kind.NORM_DROPPED),
    "a norm for each level": of(lambda m, x: (m.norm(m.conv(x)), m.other(m.conv(x[..., ::2]))), Kind.NORM_DROPPED),
    "another eps": of(
        lambda m, x: (m.norm(m.conv(x)), _normalize(m, m.conv(x), m.norm.weight, eps=3.0)), Kind.NORM_DROPPED
    ),
    "one norm, no bias": of(lambda m, x: (m.norm(m.conv(x)), m.norm(m.conv(x + 1))), Kind.BIAS_LOST, bias=False),
    "one norm, two biases": of(
        lambda m, x: (m.norm(m.conv(x)), m.norm(F.conv2d(x, m.conv.weight, m.second))),
        Kind.BIAS_LOST,
        second=parameter(2),
    ),
    "called without the norm": of(lambda m, x: (m.norm(m.conv(x)), m.conv(x + 1)), Kind.TENSOR_READ),
    "a regulariser": of(lambda m, x: (m.norm(m.conv(x)), m.conv.weight.square().sum()), Kind.TENSOR_READ),
    "bias read": of(lambda m, x: (m.norm(m.conv(x)), m.conv.bias + 1), Kind.TENSOR_READ),
    "tied": Folded(Tied, (Kind.TENSOR_READ,)),
    "one bias of two layers": of(
        lambda m, x: (m.norm(m.conv(x)), m.other(F.conv2d(x, m.weight, m.conv.bias))),
        Kind.TENSOR_READ,
        Kind.TENSOR_READ,
        weight=parameter(2, 2, 1, 1),
    ),
    "the name of the new bias": of(
        lambda m, x: (m.norm(F.conv2d(x, m.weight)), m.weight_bias + 1),
        Kind.NAME_TAKEN,
        weight=parameter(2, 2, 3, 3),
        weight_bias=parameter(2),
    ),
    "statistics of the batch": of(
        lambda m, x: _normalize(m, m.conv(x), m.norm.weight, eps=1.0, training=True), Kind.BATCH_STATISTICS
    ),
    "no batch": Folded(lambda: nn.Sequential(nn.Conv1d(2, 4, 3), norm_of_rows(4)), (Kind.WITHOUT_BATCH,), ((2, 6),)),
}
"""Models that prepare_pt2e changes, and what is named."""

REFUSED = {
    "a buffer": of(lambda m, x: m.norm(F.conv2d(x, m.weight)), Kind.RAISES, weight=torch.ones(2, 2, 3, 3)),
    "a constant": Folded(Constant, (Kind.RAISES,)),
    "a weight that is computed": of(lambda m, x: m.norm(F.conv2d(x, m.conv.weight * 2)), Kind.RAISES),
    "a weight that is an input": Folded(
        lambda: Model(lambda m, x, w: m.norm(F.conv2d(x, w)), norm=norm()),
        (Kind.RAISES,),
        ((2, 2, 4, 4), (2, 2, 3, 3)),
    ),
    "a norm's weight that is computed": of(lambda m, x: _normalize(m, m.conv(x), m.norm.weight + 1), Kind.RAISES),
    "a buffer of the new bias's name": of(
        lambda m, x: (m.norm(F.conv2d(x, m.weight)), m.weight_bias + 1),
        Kind.RAISES,
        weight=parameter(2, 2, 3, 3),
        weight_bias=torch.ones(2),
    ),
    "no statistics": Folded(lambda: nn.Sequential(conv(), norm(eps=1.0, track_running_stats=False)), (Kind.RAISES,)),
    "transposed, in groups": Folded(
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2, groups=2), norm(4)), (Kind.RAISES,)
    ),
}
"""Models for which torchao raises."""
