"""Drawn graphs: small models of several claimed patterns, as plain data; how they are drawn and how they are built.

A graph is valid by construction: each pattern follows a value that it takes, with arguments from its op samples that
fit the value's shape. A drawing is a series of choices between options, the simplest first, so that Hypothesis
(`conformance.fuzz.search`) can shrink a graph by choosing earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.base import Capabilities
from fx_quant_conformance.conformance.claims.case import Case
from fx_quant_conformance.conformance.claims.claim import NO_WEIGHT, Claim
from fx_quant_conformance.conformance.claims.kinds import INTEGERS
from fx_quant_conformance.conformance.claims.pattern_plan import is_norm, is_taken
from fx_quant_conformance.conformance.claims.plan import VALUE_RANGES
from fx_quant_conformance.conformance.fuzz.options import JOINS, PAIRS, options_for
from fx_quant_conformance.conformance.ops.calls import Shape
from fx_quant_conformance.conformance.ops.fused_modules import BENDING, BY_CHANNEL, EPILOGUES
from fx_quant_conformance.conformance.ops.op_model import (
    MODEL_OF,
    Input,
    OneInput,
    PatternModel,
    Step,
    ThreeInputs,
    TwoInputs,
)
from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.conformance.ops.variants import Arguments
from fx_quant_conformance.conformance.ops.weighted import LayerShape
from fx_quant_conformance.conformance.whole_models.setups import ModelSetup
from fx_quant_conformance.refimpl.config.patterns import is_chain, leaf_name, pattern_name

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several options."""

INPUTS = ("x", "y", "z")
SHAPES: tuple[Shape, ...] = (
    (1, 1, 3, 4),
    (1, 3),
    (1, 2, 6),
    (1, 4, 5, 6),
    (2, 8, 7, 5),
    (3, 9),
    (2, 8, 7),
    (1, 16, 4, 4),
    (2, 3, 9, 8),
    (4, 65),
    (1, 2, 3, 4, 5),
)
"""Shapes of the first input; most are images, which most patterns take."""
CHANNELS = (1, 2, 4, 5, 8, 9, 16)
VALUE_RANGES_DRAWN = ("signed", "positive", "negative", "skewed", "wide", "saturating_function")
VALUE_RANGES_TRAINED = VALUE_RANGES_DRAWN[:4]
"""Value ranges for training, whose steps are for values of about 1."""
MOST_CALLS = 7
MOST_ELEMENTS = 1024
"""Maximal size of a value or weight: larger ones show little more, and fill a script."""
GO_ON = (False, True, True, True, True, True, True, True)

_NEW = "a new input"
_VALUE_RANGES = {value_range.name: value_range for value_range in VALUE_RANGES}
_OPS = {leaf_name(op): op for op in (*EPILOGUES, *RECORDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCall:
    """One pattern, applied to values."""

    name: str
    """The name of the result."""
    pattern: str
    ops: tuple[str, ...]
    """The names of the pattern's ops, in forward order."""
    inputs: tuple[str, ...]
    """The names of the values that the first op takes."""
    arguments: Mapping[str, Any]
    """The arguments of the samples of the first op."""
    shape: Shape = ()
    """The shape of the result."""

    def make_steps(self, channels: Callable[[Sequence[Step]], int]) -> list[Step]:
        """Build the pattern's ops; ``channels`` counts the output channels of the steps before."""
        root, *epilogues = (_OPS[name] for name in self.ops)
        steps = [RECORDS[root].step(root, self.arguments)]
        for op in epilogues:
            steps.append(EPILOGUES[op](channels(steps)))
        return steps

    def __str__(self) -> str:
        base = RECORDS[_OPS[self.ops[0]]].base()
        away = {key.lstrip("_"): value for key, value in self.arguments.items() if value != base.get(key, value)}
        words = [*self.inputs, *(f"{key}={value}" for key, value in away.items())]
        return f"{self.name} = {self.pattern}({', '.join(words)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGraph:
    """A drawn graph. Values are named: inputs ``x``, ``y``, ``z``, results ``v0``, ``v1``, …"""

    shapes: tuple[Shape, ...]
    value_range: str
    seed: int
    calls: tuple[DrawnCall, ...]
    outputs: tuple[str, ...]

    def to_json(self) -> str:
        """Return the graph as JSON, by which equal graphs are recognised."""
        return json.dumps(asdict(self), sort_keys=True)

    def to_case(self) -> Case:
        """Return the graph as a case of the suite. Its weights come from torch's generator: see ``seed``."""
        inputs = tuple(Input(shape=shape) for shape in self.shapes)
        return Case(
            name="drawn", build=partial(_build, self), inputs=inputs, value_range=_VALUE_RANGES[self.value_range]
        )

    def __str__(self) -> str:
        inputs = [f"{name} = input of shape {shape}" for name, shape in zip(INPUTS, self.shapes, strict=False)]
        return "\n".join([*inputs, *map(str, self.calls), f"return {', '.join(self.outputs)}"])


def subgraph_of(graph: DrawnGraph, selected: Sequence[DrawnCall]) -> DrawnGraph | None:
    """Return the graph of some calls; results of other calls become inputs. None: there are too many inputs."""
    results = {call.name for call in selected}
    read = dict.fromkeys(name for call in selected for name in call.inputs if name not in results)
    if len(read) > len(INPUTS) or not selected:
        return None
    shapes = dict(zip(INPUTS, graph.shapes, strict=False)) | {call.name: call.shape for call in graph.calls}
    renamed = dict(zip(read, INPUTS, strict=False))
    calls = tuple(replace(call, inputs=tuple(renamed.get(name, name) for name in call.inputs)) for call in selected)
    used = {name for call in calls for name in call.inputs}
    outputs = tuple(call.name for call in calls if call.name not in used or call.name in graph.outputs)
    return replace(graph, shapes=tuple(shapes[name] for name in read), calls=calls, outputs=outputs)


# -- building ---------------------------------------------------------------------------------------------------------


class _Drawn(PatternModel):
    """A graph's calls, each on inputs or earlier results."""

    def __init__(self, graph: DrawnGraph, steps: Sequence[Sequence[Step]]) -> None:
        super().__init__([step for each in steps for step in each])
        self.graph, self.lengths = graph, [len(each) for each in steps]

    def run(self, *values: Any) -> Any:
        """Apply the calls; return the outputs."""
        value_of = dict(zip(INPUTS, values, strict=False))
        number = 0
        for call, length in zip(self.graph.calls, self.lengths, strict=True):
            operands = tuple(value_of[name] for name in call.inputs)
            for _ in range(length):
                operands = (self._call_step(number, self.steps[number], operands),)
                number += 1
            value_of[call.name] = operands[0]
        outputs = tuple(value_of[name] for name in self.graph.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


class _One(_Drawn, OneInput):
    pass


class _Two(_Drawn, TwoInputs):
    pass


class _Three(_Drawn, ThreeInputs):
    pass


_MODELS = {1: _One, 2: _Two, 3: _Three}


def _build(graph: DrawnGraph) -> nn.Module:
    shapes = dict(zip(INPUTS, graph.shapes, strict=False))
    steps = []
    for call in graph.calls:
        operands = [shapes[name] for name in call.inputs]
        steps.append(call.make_steps(partial(_count_channels, operands)))
        shapes[call.name] = _compute_shape(operands, steps[-1])
    return _MODELS[len(graph.shapes)](graph, steps)


def _count_channels(operands: Sequence[Shape], steps: Sequence[Step]) -> int:
    shape = _compute_shape(operands, steps)
    return shape[1] if len(shape) > 1 else shape[0]


def _compute_shape(operands: Sequence[Shape], steps: Sequence[Step]) -> Shape:
    """Return the shape of the steps' result for operands of these shapes."""
    model = MODEL_OF[len(operands)](steps).eval()
    with torch.no_grad():
        return tuple(model(*map(torch.zeros, operands)).shape)


# -- drawing ----------------------------------------------------------------------------------------------------------


def patterns_of(claims: Iterable[Claim], setup: ModelSetup) -> dict[str, tuple[Any, ...]]:
    """Return the chains of ops in the tables that a setup quantizes statically: name → ops, in forward order."""
    return {
        pattern_name(claim.entry.normal_pattern): claim.ops
        for claim in claims
        if claim.kind in INTEGERS and claim.dtypes.input_dtype == setup.activation
        if claim.flow == setup.flow or claim.entry.fuser_method is None  # what is fused may have no class for training
        if is_chain(claim.entry.normal_pattern) and _can_draw(*claim.ops)
    }


def waived_patterns(claims: Iterable[Claim], setup: ModelSetup, waived: Collection[str]) -> frozenset[str]:
    """Return the patterns with a waived claim of a setup's dtype and scheme, in either flow: functions have no QAT."""
    return frozenset(
        claim.pattern
        for claim in claims
        if claim.id in waived and claim.dtypes.input_dtype == setup.activation
        if claim.scheme in (setup.scheme, NO_WEIGHT)
    )


def _can_draw(root: Any, *epilogues: Any) -> bool:
    """Tell whether a pattern can be drawn: not in place, where an op would change what other ops read.

    What follows by channel takes no value of another rank than its channels are in.
    """
    is_in_place = leaf_name(root).endswith("_")
    return root in RECORDS and not is_in_place and all(op in EPILOGUES and op not in BY_CHANNEL for op in epilogues)


@dataclass(kw_only=True)
class Drawing:
    """A graph in the making: what it chooses from, and its values so far."""

    choose: Choose
    patterns: Mapping[str, Sequence[Any]]
    """Name → ops."""
    capabilities: Capabilities
    is_trained: bool = False
    has_numbers: bool = True
    """Whether a number may be an operand."""
    shapes: dict[str, Shape] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    calls: list[DrawnCall] = field(default_factory=list)

    def draw(self) -> DrawnGraph:
        """Draw a graph; it may have no calls."""
        value_ranges = VALUE_RANGES_TRAINED if self.is_trained else VALUE_RANGES_DRAWN
        value_range, seed = self.choose(value_ranges), self.choose(range(64))
        self._add_input(self.choose(SHAPES))
        for number in range(MOST_CALLS):
            if number and not self.choose(GO_ON):
                break
            self._add_call(self.choose(range(len(self.patterns))))
        read = {name for call in self.calls for name in call.inputs}
        unread = [call.name for call in self.calls if call.name not in read]
        also = [call.name for call in self.calls[-2:] if call.name in read and self.choose((False, False, False, True))]
        shapes = tuple(self.shapes[name] for name in self.inputs)
        return DrawnGraph(
            shapes=shapes, value_range=value_range, seed=seed, calls=tuple(self.calls), outputs=(*unread, *also)
        )

    def _add_input(self, shape: Shape) -> str:
        name = INPUTS[len(self.inputs)]
        self.inputs.append(name)
        self.shapes[name] = shape
        return name

    def _add_call(self, number: int) -> None:
        """Add a pattern after a value that it takes: the one of this number, or the next that some value fits."""
        names = list(self.patterns)
        ordered = (*names[number:], *names[:number])
        pattern, places = next(((each, places) for each in ordered if (places := self._find_places(each))), ("", {}))
        if not places:
            return
        taken, ops = self.choose(list(places)), self.patterns[pattern]
        inputs, arguments = self._complete(ops[0], taken, self.choose(places[taken]))
        if not self._is_taken(ops, RECORDS[ops[0]].resolve(arguments)):
            return
        call = DrawnCall(
            name=f"v{len(self.calls)}",
            pattern=pattern,
            ops=tuple(map(leaf_name, ops)),
            inputs=inputs,
            arguments=arguments,
        )
        shape = self._shape_of(call)
        if shape is not None:
            self.calls.append(replace(call, shape=shape))
            self.shapes[call.name] = shape

    def _find_places(self, pattern: str) -> dict[str, list[dict[str, Any]]]:
        """Return the values that a pattern may follow, the latest first, and its options there."""
        named = ((name, self._list_options(pattern, shape)) for name, shape in reversed(self.shapes.items()))
        return {name: options for name, options in named if options}

    def _list_options(self, pattern: str, shape: Shape) -> list[dict[str, Any]]:
        """Return the samples that fit and that the backend takes; a norm after a linear layer takes two axes.

        Epilogues are drawn with the arguments of their record, and not where the backend limits these; nor is what it
        declares conditions on.
        """
        ops = self.patterns[pattern]
        root = ops[0]
        is_limited = any(op in BENDING and leaf_name(op) in self.capabilities.limits for op in ops[1:])
        is_limited |= bool(self.capabilities.conditions_for(leaf_name(root)))
        if is_limited or (any(map(is_norm, ops)) and root is nn.Linear and len(shape) != 2):
            return []
        return [
            each
            for each in options_for(root, shape)
            if self._is_taken(ops, each) and (self.has_numbers or isinstance(each.get("other", ""), str))
        ]

    def _is_taken(self, ops: Sequence[Any], arguments: Arguments) -> bool:
        limits = self.capabilities.limits.get(leaf_name(ops[0]), {})
        return is_taken(limits, self.is_trained and any(map(is_norm, ops)), arguments)

    def _complete(self, root: Any, name: str, option: Arguments) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Choose what an option leaves open: other operands, channels."""
        shape, arguments = self.shapes[name], dict(option)
        if root in WEIGHTED:
            return (name,), arguments | {"shape": self._choose_layer(root, shape)}
        if root in PAIRS:
            partners = self._find_partners(shape, _broadcasts) if arguments["other"] == "tensor" else []
            return self._add_shapes(arguments, name, *(self.choose(partners) for _ in partners[:1]))
        if root in JOINS:
            dim = None if root is torch.stack else arguments["dim"] % len(shape)
            partners = self._find_partners(shape, partial(_joins_along, dim))
            return self._add_shapes(arguments, name, *(self.choose(partners) for _ in range(self.choose((1, 0, 2)))))
        return (name,), arguments

    def _find_partners(self, shape: Shape, fits: Callable[[Shape, Shape], bool]) -> list[str]:
        """Return the values that fit one of this shape, the latest first; then a new input, if one more may be."""
        names = [name for name, second in reversed(self.shapes.items()) if fits(shape, second)]
        return [*names, _NEW] if len(self.inputs) < len(INPUTS) else names

    def _add_shapes(self, arguments: Arguments, *operands: str) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Return the operands' names, new inputs entered with the first one's shape, and the arguments with shapes."""
        names = list[str]()
        for name in operands:
            is_room = len(self.inputs) < len(INPUTS)
            names.append(name if name != _NEW else self._add_input(self.shapes[names[0]]) if is_room else names[0])
        return tuple(names), {**arguments, "shape": tuple(self.shapes[name] for name in names)}

    def _choose_layer(self, root: Any, shape: Shape) -> LayerShape:
        """Channels and groups; a linear layer has no groups."""
        is_linear = root in (nn.Linear, F.linear)
        c_in, c_out = shape[-1 if is_linear else 1], self.choose(CHANNELS)
        groups = 1 if is_linear else self.choose([each for each in CHANNELS if c_in % each == c_out % each == 0])
        return LayerShape(c_in=c_in, c_out=c_out, groups=groups, batch=shape[0])

    def _shape_of(self, call: DrawnCall) -> Shape | None:
        """Return the shape of a call's result; None: it is too large, has no axes, or is too small to train a norm."""
        operands = [self.shapes[name] for name in call.inputs]
        with torch.random.fork_rng(devices=[]):
            steps = call.make_steps(partial(_count_channels, operands))
            sizes = [parameter.numel() for parameter in MODEL_OF[len(operands)](steps).parameters()]
        shape = _compute_shape(operands, steps)
        is_starved = any(is_norm(_OPS[name]) for name in call.ops) and prod(shape) <= shape[1]
        return None if is_starved or not shape or max((prod(shape), *sizes)) > MOST_ELEMENTS else shape


def _broadcasts(shape: Shape, second: Shape) -> bool:
    """Tell whether a second operand keeps the shape of the first."""
    return len(second) <= len(shape) and all(b in (1, a) for a, b in zip(shape[::-1], second[::-1], strict=False))


def _joins_along(dim: int | None, shape: Shape, second: Shape) -> bool:
    return len(shape) == len(second) and all(
        a == b for axis, (a, b) in enumerate(zip(shape, second, strict=True)) if axis != dim
    )
