"""The ops of drawn models: ``OPS``, which torch does right, and ``CONSTRUCTS``, which real models hold besides.

``OPS`` are compared with torch graph by graph. On ``CONSTRUCTS`` torch is wrong, or cannot trace them: statements in
place, reads of parameters, computed weights, numbers, dead code, calls spelled in every way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, MAPS, WORDS = "rows", "maps", "words"
SHAPES: Mapping[str, tuple[int, ...]] = {ROWS: (3, 8), MAPS: (3, 4, 6, 6), WORDS: (3, 5, 8)}
ANY = "any"  # the shape of the first operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A step: shapes of its operands, its module if it has one, and the call."""

    takes: tuple[str, ...]
    call: Callable[..., Any]  # (module or None, operands…) → value
    make: Callable[[], nn.Module] | None = None
    gives: str = ANY


def _module(make: Callable[[], nn.Module], *takes: str) -> Op:
    return Op(takes=takes or (ANY,), make=make, call=lambda module, x: module(x))


def _function(call: Callable[..., Any], *takes: str, gives: str = ANY) -> Op:
    return Op(takes=takes or (ANY,), call=lambda _, *operands: call(*operands), gives=gives)


def _attention(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(x, y.transpose(1, 2)).softmax(-1), y)


def _heads(x: Tensor) -> Tensor:
    return x.view(x.size(0), x.size(1), 2, -1).transpose(1, 2).contiguous().permute(0, 2, 1, 3).reshape(x.shape)


def _swapped(x: Tensor) -> Tensor:
    halves = torch.chunk(x, 2, 1)
    return torch.cat([halves[1], halves[0]], 1)


def _folded(x: Tensor) -> Any:
    halves = x.split(4, 1)  # type: ignore[no-untyped-call]
    return (halves[0] + halves[1]).repeat(1, 2)


OPS: dict[str, Op] = {
    # weighted
    "linear": _module(lambda: nn.Linear(8, 8), ROWS),
    "linear without bias": _module(lambda: nn.Linear(8, 8, bias=False), WORDS),
    "linear on words": _module(lambda: nn.Linear(8, 8), WORDS),
    "F.linear": Op(takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: F.linear(x, m.weight, m.bias)),
    "F.linear on words": Op(takes=(WORDS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: F.linear(x, m.weight)),
    "linear norm": _module(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), ROWS),
    "linear relu": _module(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ROWS),
    "conv": _module(lambda: nn.Conv2d(4, 4, 3, padding=1), MAPS),
    "pointwise": _module(lambda: nn.Conv2d(4, 4, 1, bias=False), MAPS),
    "depthwise": _module(lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), MAPS),
    "conv relu": _module(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), MAPS),
    "conv norm": _module(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), MAPS),
    "conv norm relu": _module(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), MAPS),
    "F.conv2d": Op(
        takes=(MAPS,),
        make=lambda: nn.Conv2d(4, 4, 3),
        call=lambda m, x: F.conv2d(x, m.weight, m.bias, (1, 1), (1, 1), (1, 1), 1),
    ),
    "lstm": Op(takes=(WORDS,), make=lambda: nn.LSTM(8, 8, batch_first=True), call=lambda m, x: m(x)[0]),
    "norm": _module(lambda: nn.BatchNorm2d(4), MAPS),
    "norm relu": _module(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), MAPS),
    "layer norm": _module(lambda: nn.LayerNorm(8), WORDS),
    # one operand
    "ReLU": _module(nn.ReLU),
    "F.relu": _function(F.relu),
    ".relu": _function(lambda x: x.relu()),
    "torch.relu": _function(torch.relu),
    "Hardswish": _module(nn.Hardswish),
    "F.leaky_relu": _function(lambda x: F.leaky_relu(x, 0.1)),
    "ELU": _module(nn.ELU),
    "Sigmoid": _module(nn.Sigmoid),
    ".tanh": _function(lambda x: x.tanh()),
    "F.hardsigmoid": _function(F.hardsigmoid),
    "softmax": _module(lambda: nn.Softmax(dim=1)),
    "F.hardtanh": _function(lambda x: F.hardtanh(x, -2.0, 2.0)),
    "ReLU6": _module(nn.ReLU6),
    "Dropout": _module(nn.Dropout),
    "Identity": _module(nn.Identity),
    "exp": _function(lambda x: torch.exp(-x.abs())),
    "x * 0.5": _function(lambda x: x * 0.5),
    "torch.add(x, 1.5)": _function(lambda x: torch.add(x, 1.5)),
    "relu of x + 1": _function(lambda x: F.relu(x + 1)),
    "MaxPool2d": _module(lambda: nn.MaxPool2d(3, 1, 1), MAPS),
    "F.avg_pool2d": _function(lambda x: F.avg_pool2d(x, 3, 1, 1), MAPS),
    "AdaptiveAvgPool2d": _module(lambda: nn.AdaptiveAvgPool2d(6), MAPS),
    "interpolate": _function(lambda x: F.interpolate(x, size=(6, 6)), MAPS),
    "heads": _function(_heads, WORDS),
    "reshape": _function(lambda x: x.reshape(-1, 4, 2).transpose(1, 2).contiguous().view(-1, 8), ROWS),
    "flatten": _function(lambda x: torch.flatten(x, 1).view(x.shape)),
    "unsqueeze": _function(lambda x: x.unsqueeze(0).squeeze(0)),
    "chunk": _function(_swapped, ROWS),
    "split": _function(_folded, ROWS),
    "clamp": _function(lambda x: torch.clamp(x, -1.0, 1.0)),
    # more operands
    "x + y": _function(operator.add, ANY, ANY),
    "torch.add": _function(torch.add, ANY, ANY),
    "add relu": _function(lambda x, y: F.relu(torch.add(x, y)), ANY, ANY),
    "x * y": _function(operator.mul, ANY, ANY),
    "mul relu": _function(lambda x, y: torch.relu(x * y), ANY, ANY),
    "x - y": _function(operator.sub, ANY, ANY),
    "cat": _function(lambda x, y: torch.cat([x, y], 0)[:3], ANY, ANY),
    "cat of three": _function(lambda x, y, z: torch.cat((x, y, z), dim=1)[:, ::3], ANY, ANY, ANY),
    "stack": _function(lambda x, y: torch.stack([x, y], 1)[:, 0], ANY, ANY),
    "matmul": _function(lambda x, y: torch.matmul(x, y.t()) @ y, ROWS, ROWS),
    "attention": _function(_attention, WORDS, WORDS),
    # to another shape
    "head": Op(
        takes=(MAPS,),
        make=lambda: nn.Linear(4, 8),
        gives=ROWS,
        call=lambda m, x: m(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1)),
    ),
    "mean of maps": _function(lambda x: x.mean([2, 3]).repeat(1, 2), MAPS, gives=ROWS),
    "mean of words": _function(lambda x: torch.mean(x, dim=1), WORDS, gives=ROWS),
    "last word": _function(lambda x: x[:, -1], WORDS, gives=ROWS),
    "words": _function(lambda x: torch.stack([x, x, x, x, x], dim=1), ROWS, gives=WORDS),
}


# ---- what torch does wrong, or cannot trace ------------------------------------------------------------------------


def _statement(write: Callable[..., Any], *takes: str) -> Op:
    """Return a step that writes to a value, and goes on with the value."""

    def call(_: Any, x: Tensor, *others: Tensor) -> Tensor:
        y = x + 0.5
        write(y, *others)
        return y

    return Op(takes=takes or (ANY,), call=call)


def _set_item(y: Any) -> None:
    y[:, 0] = 0.25


def _augment_item(y: Any) -> None:
    y[:, 1:2] += 1


def _augment_alias(y: Tensor) -> None:
    alias = y
    alias += 1


def _write_to_a_view(y: Tensor) -> None:
    y.transpose(0, 1)[0].mul_(0.5)


def _read_before_and_after(x: Tensor) -> Tensor:
    y = x * 1.5
    view, before = y[:, :1], y - 1
    y.relu_()
    return y + view + before


def _use_nothing_of_it(x: Tensor) -> Tensor:
    F.relu(x * 2) + torch.sigmoid(x)
    return x + 0.25


class _Tied(nn.Module):
    """Two layers with one weight, and a reader of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(F.relu(self.first(x)))
        return y @ self.first.weight.t()


class _NormAndReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x)) + self.conv.weight.mean() * self.norm.weight[:, None, None]


CONSTRUCTS: dict[str, Op] = {
    "y.mul_": _statement(lambda y: y.mul_(0.25)),
    "y.add_(z)": _statement(lambda y, z: y.add_(z), ANY, ANY),
    "y.relu_": _statement(lambda y: y.relu_()),
    "F.relu(y, inplace)": _statement(lambda y: F.relu(y, inplace=True)),
    "torch.tanh_": _statement(torch.tanh_),
    "y.copy_": _statement(lambda y, z: y.copy_(z * 2), ANY, ANY),
    "y[:, 0] = 0.25": _statement(_set_item),
    "y[:, 1:2] += 1": _statement(_augment_item),
    "alias += 1": _statement(_augment_alias),
    "view.mul_": _statement(_write_to_a_view),
    "y.clamp_ of a part": _statement(lambda y: y[:, 0].clamp_(0, 0.5)),
    "y.fill_ of a part": _statement(lambda y: y[:, 0].fill_(0.5)),
    "read before and after": _function(_read_before_and_after),
    "dead code": _function(_use_nothing_of_it),
    "x * 2 - 0.5": _function(lambda x: x * 2 - 0.5),
    "2 - x": _function(lambda x: 2 - x),
    "sigmoid * 2 - 0.5": _function(lambda x: torch.sigmoid(x) * 2 - 0.5),
    "tanh * 3 + 1": _function(lambda x: torch.tanh(x) * 3 + 1),
    "cat of a sigmoid": _function(lambda x, y: torch.cat([x.sigmoid(), y], 0)[:3], ANY, ANY),
    "reads its weight": Op(takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: m(x) + m.weight.sum(0) * 0.1),
    "reads its dtype": Op(takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: m(x.to(m.weight.dtype))),
    "reads its size": Op(
        takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: m(x).reshape(-1, m.weight.shape[0])
    ),
    "other layer's weight": Op(
        takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: F.linear(F.relu(m(x)), m.weight)
    ),
    "norm and reader": _module(_NormAndReader, MAPS),
    "tied": _module(_Tied, ROWS),
    "computed weight": Op(
        takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: F.linear(x, m.weight * 0.5, m.bias + 1)
    ),
    "standardized weight": Op(
        takes=(MAPS,),
        make=lambda: nn.Conv2d(4, 4, 1),
        call=lambda m, x: F.conv2d(x, (m.weight - m.weight.mean()) / (m.weight.std() + 1e-5)),
    ),
}


# ---- calls in every spelling ---------------------------------------------------------------------------------------

SPELLINGS = ("positional", "by keyword", "short")
NO_DEFAULT = object()


def spell(function: Callable[..., Any], arguments: Mapping[str, tuple[Any, Any]], spelling: str) -> Any:
    """Call a function with arguments (value, default) by name, spelled in one of three ways."""
    values = {name: value for name, (value, _) in arguments.items()}
    if spelling == "positional":
        return function(*values.values())
    if spelling == "by keyword":
        return function(**values)
    given = {name: value for name, (value, default) in arguments.items() if value is not default}
    positional = [value for (value, default) in arguments.values() if default is NO_DEFAULT]
    return function(*positional, **dict(list(given.items())[len(positional) :]))


Arguments = Callable[..., dict[str, tuple[Any, Any]]]
_X = NO_DEFAULT


def _linear(m: Any, x: Tensor) -> dict[str, tuple[Any, Any]]:
    return {"input": (x, _X), "weight": (m.weight, _X), "bias": (m.bias, None)}


def _conv(m: Any, x: Tensor) -> dict[str, tuple[Any, Any]]:
    return {
        "input": (x, _X),
        "weight": (m.weight, _X),
        "bias": (m.bias, None),
        "stride": (1, 1),
        "padding": (0, 0),
        "dilation": (1, 1),
        "groups": (1, 1),
    }


def _norm(m: Any, x: Tensor) -> dict[str, tuple[Any, Any]]:
    return {"input": (x, _X), "normalized_shape": ([8], _X), "weight": (m.weight, None), "bias": (m.bias, None)}


def _pool(m: Any, x: Tensor) -> dict[str, tuple[Any, Any]]:
    return {"input": (x, _X), "kernel_size": (3, _X), "stride": (1, None), "padding": (1, 0)}


def _clamp(m: Any, x: Tensor) -> dict[str, tuple[Any, Any]]:
    return {"input": (x, _X), "min": (-1.0, None), "max": (1.0, None)}


SPELLED: dict[str, tuple[Callable[..., Any], Arguments, tuple[str, ...], Callable[[], nn.Module] | None]] = {
    "F.linear": (F.linear, _linear, (ROWS,), lambda: nn.Linear(8, 8)),
    "F.conv2d": (F.conv2d, _conv, (MAPS,), lambda: nn.Conv2d(4, 4, 1)),
    "F.layer_norm": (F.layer_norm, _norm, (WORDS,), lambda: nn.LayerNorm(8)),
    "torch.add": (torch.add, lambda m, x, y: {"input": (x, _X), "other": (y, _X)}, (ANY, ANY), None),
    "torch.add of a number": (torch.add, lambda m, x: {"input": (x, _X), "other": (0.5, _X)}, (ANY,), None),
    "torch.matmul": (torch.matmul, lambda m, x, y: {"input": (x, _X), "other": (y.t() @ y, _X)}, (ROWS, ROWS), None),
    "F.relu": (F.relu, lambda m, x: {"input": (x, _X), "inplace": (False, False)}, (ANY,), None),
    "F.hardtanh": (
        F.hardtanh,
        lambda m, x: {"input": (x, _X), "min_val": (-1.0, -1.0), "max_val": (1.0, 1.0)},
        (ANY,),
        None,
    ),
    "F.dropout": (F.dropout, lambda m, x: {"input": (x, _X), "p": (0.5, 0.5), "training": (False, True)}, (ANY,), None),
    "torch.clamp": (torch.clamp, _clamp, (ANY,), None),
    "torch.transpose": (
        torch.transpose,
        lambda m, x: {"input": (x.transpose(0, 1), _X), "dim0": (0, _X), "dim1": (1, _X)},
        (ANY,),
        None,
    ),
    "F.max_pool2d": (F.max_pool2d, _pool, (MAPS,), None),
}


def _spelled(name: str, spelling: str) -> Op:
    function, arguments, takes, make = SPELLED[name]

    def call(module: Any, *operands: Any) -> Any:
        return spell(function, arguments(module, *operands), spelling)

    return Op(takes=takes, call=call, make=make)


CONSTRUCTS |= {f"{name}, {spelling}": _spelled(name, spelling) for name in SPELLED for spelling in SPELLINGS}
CONSTRUCTS |= {
    "module by keyword": Op(takes=(ROWS,), make=lambda: nn.Linear(8, 8), call=lambda m, x: m(input=x)),
    "cat by keyword": _function(lambda x, y: torch.cat(tensors=[x, y], dim=0)[:3], ANY, ANY),
}
EVERY: Mapping[str, Op] = {**OPS, **CONSTRUCTS}
_CHAINS = {
    name: tuple(f"{name}, {spelling}" for spelling in SPELLINGS)
    for name, (_, _, takes, _) in SPELLED.items()
    if len(takes) == 1
}
GROUPS = {**{op: (op,) for op in CONSTRUCTS if op.rpartition(", ")[0] not in _CHAINS}, **_CHAINS}
"""The constructs; those that spell one call of one operand together."""
