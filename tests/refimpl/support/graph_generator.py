"""Models drawn by Hypothesis, valid by construction: steps of a table on values of three shapes, in nested modules.

A program is plain data: what the falsifying example shows is the program, and shrinking works on it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
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
        takes=(MAPS,), make=lambda: nn.Linear(4, 8), gives=ROWS,
        call=lambda m, x: m(F.adaptive_avg_pool2d(x, (1, 1)).flatten(1)),
    ),
    "mean of maps": _function(lambda x: x.mean([2, 3]).repeat(1, 2), MAPS, gives=ROWS),
    "mean of words": _function(lambda x: torch.mean(x, dim=1), WORDS, gives=ROWS),
    "last word": _function(lambda x: x[:, -1], WORDS, gives=ROWS),
    "words": _function(lambda x: torch.stack([x, x, x, x, x], dim=1), ROWS, gives=WORDS),
}  # fmt: skip
WEIGHTED = tuple(name for name, op in OPS.items() if op.make is not None)


@dataclass(frozen=True, slots=True)
class Step:
    """One op on earlier values; ``shares`` calls the last module that was made for the same op again."""

    op: str
    operands: tuple[int, ...]
    shares: bool = False
    opens_block: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """Shapes of the inputs, steps, and which values are returned in which form."""

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    extra_output: int | None = None
    form: str = "tensor"  # or "tuple" or "dict", for more than one output


class Block(nn.Module):
    """Some steps of a program: takes all values so far, gives all values."""

    def __init__(self, steps: list[Step], made: dict[str, nn.Module]) -> None:
        super().__init__()
        self.steps, self.parts = steps, nn.ModuleList()
        for step in steps:
            make = OPS[step.op].make
            if make is not None and not (step.shares and step.op in made):
                made[step.op] = make()
            self.parts.append(made[step.op] if make is not None else nn.Identity())

    def forward(self, *values: Any) -> Any:
        seen = list(values)
        for step, part in zip(self.steps, self.parts, strict=True):
            seen.append(OPS[step.op].call(part, *(seen[index] for index in step.operands)))
        return seen


class Generated(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        blocks: list[list[Step]] = [[]]
        for step in program.steps:
            if step.opens_block and blocks[-1]:
                blocks.append([])
            blocks[-1].append(step)
        made: dict[str, nn.Module] = {}
        self.blocks = nn.ModuleList([Block(steps, made) for steps in blocks])

    def run(self, *values: Any) -> Any:
        for block in self.blocks:
            values = block(*values)
        if self.program.extra_output is None:
            return values[-1]
        extra = values[self.program.extra_output]
        return {"last": values[-1], "extra": extra} if self.program.form == "dict" else (values[-1], extra)


class OneInput(Generated):
    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class TwoInputs(Generated):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(x, y)


def build(program: Program) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Make the model of a program in eval mode, and two batches. The same every time."""
    torch.default_generator.manual_seed(0)
    model = (OneInput if len(program.inputs) == 1 else TwoInputs)(program).eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean, module.running_var = torch.randn_like(module.bias), torch.rand_like(module.bias) + 0.5
    return model, [tuple(torch.randn(SHAPES[shape]) for shape in program.inputs) for _ in range(2)]


@st.composite
def programs(draw: st.DrawFn, max_steps: int = 7) -> Program:
    """Draw a program: operands are earlier values of the right shape, more often late ones."""
    shapes = draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=2))
    inputs = tuple(shapes)
    steps = []
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(_steps(shapes))
        gives = OPS[step.op].gives
        shapes.append(shapes[step.operands[0]] if gives == ANY else gives)
        steps.append(step)
    extra = draw(st.none() | st.integers(0, len(shapes) - 1))
    return Program(
        inputs, tuple(steps), extra, draw(st.sampled_from(("tuple", "dict"))) if extra is not None else "tensor"
    )


@st.composite
def _steps(draw: st.DrawFn, shapes: list[str]) -> Step:
    places = defaultdict(list)  # of every shape, the latest first
    for index in reversed(range(len(shapes))):
        places[shapes[index]].append(index)
        places[ANY].append(index)
    names = [name for name, op in OPS.items() if places[op.takes[0]]]
    # Half of the steps have weights: without them little is quantized.
    name = draw(st.sampled_from([name for name in names if name in WEIGHTED]) | st.sampled_from(names))
    operands = [draw(st.sampled_from(places[OPS[name].takes[0]]))]
    operands += [draw(st.sampled_from(places[shapes[operands[0]]])) for _ in OPS[name].takes[1:]]
    shares, opens_block = draw(st.integers(0, 7)) == 7, draw(st.integers(0, 2)) == 2
    return Step(name, tuple(operands), shares and name in WEIGHTED, opens_block)
