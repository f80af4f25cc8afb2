"""Models of one pattern, which run its ops one after the other, and the inputs of such a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, nn

_PARAMETERS, _STATISTICS = ("weight", "bias"), ("mean", "variance")


class Role(Enum):
    """The kind of an input of a model."""

    ACTIVATION = "activation"
    """A float tensor that the claim's QConfig quantizes (at run time, where the claim is dynamic)."""

    STATE = "state"
    """A float tensor that is handed through or quantized inside of the op, such as a hidden state."""

    INDEX = "index"
    """Integers in 0 … high − 1."""

    OFFSETS = "offsets"
    """Integers, ascending, the first 0, the last at most `high`: where bags begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of a model: its shape, and what it is."""

    shape: tuple[int, ...]
    """All dimensions, the batch included."""

    role: Role = Role.ACTIVATION
    """The kind of its values."""

    high: int = 0
    """One more than the largest index, or the largest offset; unused in float inputs."""

    is_int32: bool = False
    """Integers are int32, not int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One op of a pattern: a module, a function or a method's name, and the arguments after its tensors."""

    op: nn.Module | Callable[..., Any] | str
    arguments: tuple[Any, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()
    parameters: tuple[Tensor | None, ...] = ()
    """A function takes them after its inputs."""
    statistics: tuple[Tensor, ...] = ()
    """A function takes them after ``parameters``; they are not trained."""
    takes_list: bool = False


class PatternModel(nn.Module):
    """Runs the steps of a pattern one after the other; the first takes all inputs.

    ``parameters`` of a step (weight, bias) follow its tensors. Subclasses give ``forward`` its number of inputs, for
    tracing. ``gives_inner``: it returns what each step gives, in order, as a tuple.
    """

    gives_inner = False

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        for number, step in enumerate(steps):
            if isinstance(step.op, nn.Module):
                self.add_module(f"op{number}", step.op)
            for name, parameter in zip(_PARAMETERS, step.parameters, strict=False):
                self.register_parameter(f"{name}{number}", None if parameter is None else nn.Parameter(parameter))
            for name, value in zip(_STATISTICS, step.statistics, strict=False):
                self.register_buffer(f"{name}{number}", value)

    def run(self, *values: Any) -> Any:
        """Apply the steps to the inputs."""
        results = list[Any]()
        for number, step in enumerate(self.steps):
            values = (self._call_step(number, step, values),)
            results += values
        return tuple(results) if self.gives_inner else values[0]

    def _call_step(self, number: int, step: Step, values: tuple[Any, ...]) -> Any:
        keywords = dict(step.keywords)
        if isinstance(step.op, nn.Module):
            return step.op(*values, **keywords)
        if isinstance(step.op, str):
            return getattr(values[0], step.op)(*values[1:], *step.arguments, **keywords)
        names = (*_PARAMETERS[: len(step.parameters)], *_STATISTICS[: len(step.statistics)])
        parameters = [getattr(self, f"{name}{number}") for name in names]
        tensors = (list(values),) if step.takes_list else values
        return step.op(*tensors, *parameters, *step.arguments, **keywords)


class OneInput(PatternModel):
    """A pattern of one input."""

    def forward(self, x: Any) -> Any:
        """Return what the last step gives for the pattern's one input."""
        return self.run(x)


class TwoInputs(PatternModel):
    """A pattern of two inputs."""

    def forward(self, x: Any, y: Any) -> Any:
        """Return what the last step gives; both inputs go to the first step."""
        return self.run(x, y)


class ThreeInputs(PatternModel):
    """A pattern of three inputs."""

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        """Return what the last step gives; all three inputs go to the first step."""
        return self.run(x, y, z)


MODEL_OF: dict[int, type[PatternModel]] = {1: OneInput, 2: TwoInputs, 3: ThreeInputs}
