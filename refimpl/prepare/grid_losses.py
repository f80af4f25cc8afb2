"""What an op with a number loses by sharing the grid of its input, as a config may say (rules OBS-07, OBS-19)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from math import inf, log10
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fx_quant_conformance.refimpl.config.backend_config import SHARE
from fx_quant_conformance.refimpl.errors import warn_user
from fx_quant_conformance.refimpl.graph.tracing import positional_arguments_of
from fx_quant_conformance.refimpl.prepare.plan import Plan, Slot

LOUD = 12.0
"""Decibels, which are two bits, above which convert warns. (OBS-19)"""

_SUMS: frozenset[Any] = frozenset({operator.add, torch.add, "add"})
_DIFFERENCES: frozenset[Any] = frozenset({operator.sub, torch.sub, "sub"})
_PRODUCTS: frozenset[Any] = frozenset({operator.mul, torch.mul, "mul"})
_QUOTIENTS: frozenset[Any] = frozenset({operator.truediv, torch.div, torch.true_divide, "div"})


class LinearOp(NamedTuple):
    """What an op with one tensor x and a number computes: factor · x + shift."""

    factor: float
    shift: float
    number: float
    """As the model has it."""

    def map_range(self, low: float, high: float) -> tuple[float, float]:
        """Return the range of the results for values from `low` to `high`."""
        ends = sorted((self.factor * low + self.shift, self.factor * high + self.shift))
        return ends[0], ends[1]


def read_linear_op(root: Node) -> LinearOp | None:
    """Return what an arithmetic op of one tensor and a number computes; None for any other op."""
    operands = positional_arguments_of(root, at_least=2)
    number = next((each for each in operands if isinstance(each, (int, float)) and not isinstance(each, bool)), None)
    is_plain = len(operands) == 2 and any(isinstance(each, Node) for each in operands)
    if number is None or not is_plain or not root.kwargs.keys() <= {"input", "other"}:
        return None
    is_second = operands[1] is number
    if root.target in _SUMS:
        return LinearOp(1.0, float(number), float(number))
    if root.target in _DIFFERENCES:
        return (
            LinearOp(1.0, -float(number), float(number)) if is_second else LinearOp(-1.0, float(number), float(number))
        )
    if root.target in _PRODUCTS:
        return LinearOp(float(number), 0.0, float(number))
    return LinearOp(1 / number, 0.0, float(number)) if root.target in _QUOTIENTS and is_second and number else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridLoss:
    """The precision that an op with a number loses where its input and its result are on one grid. (OBS-19)"""

    node: str
    """The match's last node."""
    pattern: str
    """The pattern's name."""
    number: float
    """The op's number."""
    of_input: float
    """Decibels by which the input is less precise than on a grid of its own."""
    of_result: float
    """Decibels by which the result is less precise than on a grid of its own."""

    @property
    def decibels(self) -> float:
        """The larger of the two."""
        return max(self.of_input, self.of_result)

    def __str__(self) -> str:
        return f"OBS-19: it loses {_spell(self.decibels)} on the grid of its input"


def _spell(decibels: float) -> str:
    return "all precision" if decibels == inf else f"{decibels:.0f} dB"


def measure_loss(node: str, pattern: str, line: LinearOp, width: float) -> GridLoss:
    """Compute what is lost on a shared grid of that width: it holds both the input's range and the result's. (OBS-19)

    By a factor c the wider of the two has that width, and the other is |c| or 1/|c| times as wide: 20·lg|c| dB. By a
    shift c both are |c| narrower than what the grid holds: 20·lg(W/(W - |c|)) dB.
    """
    of_input = of_result = 0.0
    if abs(line.factor) > 1:
        of_input = 20 * log10(abs(line.factor))
    elif line.factor:
        of_result = -20 * log10(abs(line.factor))
    if line.shift:
        own = width - abs(line.shift)
        of_input = of_result = 20 * log10(width / own) if own > 0 else inf
    return GridLoss(node=node, pattern=pattern, number=line.number, of_input=of_input, of_result=of_result)


def find_losses(
    graph: Graph, plan: Plan, floating: Collection[str], find_width: Callable[[Slot], float | None]
) -> tuple[GridLoss, ...]:
    """Compute what each op with a number loses in a prepared graph. (OBS-19)

    `floating`: the last nodes of the matches that convert leaves in float. `find_width`: of the grid of a slot.
    """
    nodes, slots = {node.name: node for node in graph.nodes}, {slot.name: slot for slot in plan.slots}
    losses = []
    for decision in plan.decisions:
        if decision.observation is not SHARE or not decision.is_quantized or decision.node in floating:
            continue
        line = read_linear_op(nodes[decision.root])
        slot = next((slots[str(user.target)] for user in nodes[decision.node].users if str(user.target) in slots), None)
        width = None if line is None or slot is None or slot.rule == "OBS-17" else find_width(slot)
        if line is not None and width is not None:
            losses.append(measure_loss(decision.node, decision.pattern, line, width))
    return tuple(losses)


def warn_of_losses(losses: Iterable[GridLoss], own_results: Collection[str] = ()) -> None:
    """Warn once for each node that loses more than `LOUD`. (OBS-19)

    `own_results`: nodes whose results have grids of their own, as torch's kernels choose them.
    """
    for loss in losses:
        decibels = loss.of_input if loss.node in own_results else loss.decibels
        if decibels > LOUD:  # rule: OBS-19
            warn_user(
                f"convert: {loss.node} ({loss.pattern} with the number {loss.number:g}) loses {_spell(decibels)}: "
                "the config lets its input and its result share a grid. Give the config's entry for it "
                "_set_num_tensor_args_to_observation_type({1: OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT, …}), or give "
                "the op no QConfig"
            )
