"""Models drawn by Hypothesis, valid by construction: steps of a table on values of three shapes, in nested modules.

A program is plain data: what the falsifying example shows is the program, and shrinking works on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.refimpl.support.graph_ops import ANY, EVERY, OPS, SHAPES


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
    takes_names: bool = False  # the model has, and reads, attributes with the names that the flow takes


class Block(nn.Module):
    """Some steps of a program: takes all values so far, gives all values."""

    def __init__(self, steps: list[Step], made: dict[str, nn.Module]) -> None:
        super().__init__()
        self.steps, self.parts = steps, nn.ModuleList()
        for step in steps:
            make = EVERY[step.op].make
            if make is not None and not (step.shares and step.op in made):
                made[step.op] = make()
            self.parts.append(made[step.op] if make is not None else nn.Identity())

    def forward(self, *values: Any) -> Any:
        seen = list(values)
        for step, part in zip(self.steps, self.parts, strict=True):
            seen.append(EVERY[step.op].call(part, *(seen[index] for index in step.operands)))
        return seen


FLOWS_NAMES = (
    "activation_post_process_0",
    "activation_post_process_2",
    "_scale_0",
    "_zero_point_0",
    "blocks_0_parts_0_scale_0",
    "blocks_0_parts_0_input_zero_point_0",
    "_packed_weight_0",
    "mul_folded",
)


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
        for name in FLOWS_NAMES if program.takes_names else ():
            self.register_buffer(name, torch.rand(()) + 0.5)

    def run(self, *values: Any) -> Any:
        for block in self.blocks:
            values = block(*values)
        if self.program.takes_names:
            last = values[-1]
            for name in FLOWS_NAMES:
                last = last * self.get_buffer(name)
            values = (*values[:-1], last)
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
def programs(
    draw: st.DrawFn, max_steps: int = 7, names: Sequence[str] = tuple(OPS), may_take_names: bool = False
) -> Program:
    """Draw a program of these ops: operands are earlier values of the right shape, more often late ones."""
    shapes = draw(st.lists(st.sampled_from(sorted(SHAPES)), min_size=1, max_size=2))
    inputs = tuple(shapes)
    steps = []
    for _ in range(draw(st.integers(1, max_steps))):
        step = draw(_steps(shapes, names))
        gives = EVERY[step.op].gives
        shapes.append(shapes[step.operands[0]] if gives == ANY else gives)
        steps.append(step)
    extra = draw(st.none() | st.integers(0, len(shapes) - 1))
    form = draw(st.sampled_from(("tuple", "dict"))) if extra is not None else "tensor"
    return Program(inputs, tuple(steps), extra, form, may_take_names and draw(st.booleans()))


@st.composite
def _steps(draw: st.DrawFn, shapes: list[str], ops: Sequence[str]) -> Step:
    places = defaultdict(list)  # of every shape, the latest first
    for index in reversed(range(len(shapes))):
        places[shapes[index]].append(index)
        places[ANY].append(index)
    names = [name for name in ops if places[EVERY[name].takes[0]]]
    weighted = [name for name in names if EVERY[name].make is not None]
    # Half of the steps have weights: without them little is quantized.
    name = draw(st.sampled_from(weighted) | st.sampled_from(names)) if weighted else draw(st.sampled_from(names))
    operands = [draw(st.sampled_from(places[EVERY[name].takes[0]]))]
    operands += [draw(st.sampled_from(places[shapes[operands[0]]])) for _ in EVERY[name].takes[1:]]
    shares, opens_block = draw(st.integers(0, 7)) == 7, draw(st.integers(0, 2)) == 2
    return Step(name, tuple(operands), shares and name in weighted, opens_block)
