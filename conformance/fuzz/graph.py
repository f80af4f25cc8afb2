"""Drawn graphs: small models of several claimed patterns, as plain data; how they are drawn and how they are built.

A graph is valid by construction: each pattern is put behind a value that it takes, with arguments that the table of
recipes has for it and that fit the value's shape. What is drawn is a series of choices between options, the simplest
first, so that whatever makes them (Hypothesis, in fuzz.py) can shrink a graph by choosing earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from backends.base import Capabilities
from conformance.claims.case import Case
from conformance.claims.claim import NO_WEIGHT, Claim
from conformance.claims.pattern_plan import is_norm, is_taken
from conformance.claims.plan import REGIMES
from conformance.claims.qconfigs import INTEGERS, kind_of
from conformance.fuzz.options import JOINS, PAIRS, options_for
from conformance.ops.calls import Shape
from conformance.ops.fused_modules import FOLLOWERS
from conformance.ops.op_model import MODEL_OF, Input, OneInput, PatternModel, Step, ThreeInputs, TwoInputs
from conformance.ops.table import OP_SAMPLES, WEIGHTED
from conformance.ops.variants import Arguments
from conformance.ops.weighted import LayerShape
from conformance.whole_models.flow import ModelSetup
from refimpl.patterns import is_chain, leaf_name, leaves, pattern_name

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of several options."""

INPUTS = ("x", "y", "z")
SHAPES: tuple[Shape, ...] = (
    (1, 1, 3, 4), (1, 3), (1, 2, 6), (1, 4, 5, 6), (2, 8, 7, 5), (3, 9), (2, 8, 7), (1, 16, 4, 4), (2, 3, 9, 8),
    (4, 65), (1, 2, 3, 4, 5),
)  # fmt: skip
"""Of the first input; most are images, which most patterns take."""
CHANNELS = (1, 2, 4, 5, 8, 9, 16)
REGIMES_DRAWN = ("signed", "positive", "negative", "skewed", "wide", "saturating_function")
REGIMES_TRAINED = REGIMES_DRAWN[:4]
"""Steps of training are for values of about 1."""
MOST_CALLS = 7
MOST_ELEMENTS = 1024
"""Of a value or of a weight: larger ones say little more, and fill a script."""
GO_ON = (False, True, True, True, True, True, True, True)

_REGIMES = {regime.name: regime for regime in REGIMES}
_OPS = {leaf_name(op): op for op in (*FOLLOWERS, *OP_SAMPLES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCall:
    """One pattern at work: its name, the values that its first op takes, and what the recipe of that op is given.

    ``shape``: that of the result.
    """

    name: str
    pattern: str
    inputs: tuple[str, ...]
    arguments: Mapping[str, Any]
    shape: Shape = ()

    @property
    def ops(self) -> list[Any]:
        """The pattern's ops, in forward order."""
        return _ops_of(self.pattern)

    def steps(self, channels: Callable[[Sequence[Step]], int]) -> list[Step]:
        """Make its ops; ``channels`` counts those that come out of the ones before."""
        root, *rest = self.ops
        arguments = dict(self.arguments)
        if root in WEIGHTED:
            arguments["shape"] = LayerShape(*arguments["shape"])
        steps = [OP_SAMPLES[root].step(root, arguments)]
        for op in rest:
            steps.append(FOLLOWERS[op](channels(steps)))
        return steps

    def __str__(self) -> str:
        base = OP_SAMPLES[self.ops[0]].base()
        away = {key.lstrip("_"): value for key, value in self.arguments.items() if value != base.get(key, value)}
        words = [*self.inputs, *(f"{key}={value}" for key, value in away.items())]
        return f"{self.name} = {self.pattern}({', '.join(words)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGraph:
    """A drawn graph. Values are named: inputs ``x``, ``y``, ``z``, results ``v0``, ``v1``, …"""

    shapes: tuple[Shape, ...]
    regime: str
    seed: int
    calls: tuple[DrawnCall, ...]
    outputs: tuple[str, ...]

    def text(self) -> str:
        """Return the graph as JSON: what ``graph_of`` takes."""
        return json.dumps(asdict(self), sort_keys=True)

    def case(self) -> Case:
        """Return the graph as a case of the suite. Its weights come from torch's generator: see ``seed``."""
        inputs = tuple(Input(shape=shape) for shape in self.shapes)
        return Case(name="drawn", build=partial(_built, self), inputs=inputs, regime=_REGIMES[self.regime])

    def __str__(self) -> str:
        inputs = [f"{name} = input of shape {shape}" for name, shape in zip(INPUTS, self.shapes, strict=False)]
        return "\n".join([*inputs, *map(str, self.calls), f"return {', '.join(self.outputs)}"])


def graph_of(text: str) -> DrawnGraph:
    """Read a graph back. Raises ValueError for what is no JSON."""
    row = _tupled(json.loads(text))
    return DrawnGraph(**row | {"calls": tuple(DrawnCall(**call) for call in row["calls"])})


def subgraph_of(graph: DrawnGraph, kept: Sequence[DrawnCall]) -> DrawnGraph | None:
    """Return the graph of some of the calls; what the others gave are inputs. None: there would be too many."""
    given = {call.name for call in kept}
    read = dict.fromkeys(name for call in kept for name in call.inputs if name not in given)
    if len(read) > len(INPUTS) or not kept:
        return None
    shapes = dict(zip(INPUTS, graph.shapes, strict=False)) | {call.name: call.shape for call in graph.calls}
    renamed = dict(zip(read, INPUTS, strict=False))
    calls = tuple(replace(call, inputs=tuple(renamed.get(name, name) for name in call.inputs)) for call in kept)
    used = {name for call in calls for name in call.inputs}
    outputs = tuple(call.name for call in calls if call.name not in used or call.name in graph.outputs)
    return replace(graph, shapes=tuple(shapes[name] for name in read), calls=calls, outputs=outputs)


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tupled, value))
    return {key: _tupled(each) for key, each in value.items()} if isinstance(value, dict) else value


# -- building ---------------------------------------------------------------------------------------------------------


class _Drawn(PatternModel):
    """A graph's calls, each on values that were there before."""

    def __init__(self, graph: DrawnGraph, steps: Sequence[Sequence[Step]]) -> None:
        super().__init__([step for each in steps for step in each])
        self.graph, self.lengths = graph, [len(each) for each in steps]

    def run(self, *values: Any) -> Any:
        """Apply the calls; return the outputs."""
        found = dict(zip(INPUTS, values, strict=False))
        number = 0
        for call, length in zip(self.graph.calls, self.lengths, strict=True):
            given = tuple(found[name] for name in call.inputs)
            for _ in range(length):
                given = (self._call_step(number, self.steps[number], given),)
                number += 1
            found[call.name] = given[0]
        outputs = tuple(found[name] for name in self.graph.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


class _One(_Drawn, OneInput):
    pass


class _Two(_Drawn, TwoInputs):
    pass


class _Three(_Drawn, ThreeInputs):
    pass


_MODELS = {1: _One, 2: _Two, 3: _Three}


def _built(graph: DrawnGraph) -> nn.Module:
    shapes = dict(zip(INPUTS, graph.shapes, strict=False))
    steps = []
    for call in graph.calls:
        given = [shapes[name] for name in call.inputs]
        steps.append(call.steps(partial(_channels, given)))
        shapes[call.name] = _result(given, steps[-1])
    return _MODELS[len(graph.shapes)](graph, steps)


def _channels(given: Sequence[Shape], steps: Sequence[Step]) -> int:
    shape = _result(given, steps)
    return shape[1] if len(shape) > 1 else shape[0]


def _result(given: Sequence[Shape], steps: Sequence[Step]) -> Shape:
    """The shape of what the steps make of values of these shapes."""
    model = MODEL_OF[len(given)](steps).eval()
    with torch.no_grad():
        found: torch.Tensor = model(*map(torch.zeros, given))
    return tuple(found.shape)


# -- drawing ----------------------------------------------------------------------------------------------------------


def patterns_of(claims: Iterable[Claim], setup: ModelSetup) -> tuple[str, ...]:
    """List the patterns that a setup quantizes statically and that can be drawn: chains of ops that the tables have."""
    names = dict.fromkeys(
        pattern_name(claim.entry.normal_pattern)
        for claim in claims
        if kind_of(claim.dtypes) in INTEGERS and claim.dtypes.input_dtype == setup.activation
        if claim.flow == setup.flow or claim.entry.fuser_method is None  # what is fused may have no class for training
        if is_chain(claim.entry.normal_pattern) and _can_draw(*leaves(claim.entry.normal_pattern))
    )
    return tuple(names)


def waived_patterns(claims: Iterable[Claim], setup: ModelSetup, waived: Collection[str]) -> frozenset[str]:
    """Name the patterns with a claim, of a setup's dtype and scheme, that a waiver covers.

    A claim of either flow counts, for a function has none of its own in training.
    """
    return frozenset(
        claim.pattern
        for claim in claims
        if claim.id in waived and claim.dtypes.input_dtype == setup.activation
        if claim.scheme in (setup.scheme, NO_WEIGHT)
    )


def _can_draw(root: Any, *rest: Any) -> bool:
    """In place, an op would change what other ops read: none of those is drawn."""
    is_in_place = leaf_name(root).endswith("_")
    return root in OP_SAMPLES and not is_in_place and all(op in FOLLOWERS for op in rest)


@dataclass(kw_only=True)
class Drawing:
    """A graph on its way: what is chosen from, and what is there so far.

    ``has_numbers``: whether one may be an operand.
    """

    choose: Choose
    patterns: Sequence[str]
    capabilities: Capabilities
    is_trained: bool = False
    has_numbers: bool = True
    shapes: dict[str, Shape] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    calls: list[DrawnCall] = field(default_factory=list)

    def graph(self) -> DrawnGraph:
        """Draw a graph; it may have no calls."""
        regimes = REGIMES_TRAINED if self.is_trained else REGIMES_DRAWN
        regime, seed = self.choose(regimes), self.choose(range(64))
        self._enter(self.choose(SHAPES))
        for number in range(MOST_CALLS):
            if number and not self.choose(GO_ON):
                break
            self._call(self.choose(range(len(self.patterns))))
        read = {name for call in self.calls for name in call.inputs}
        unread = [call.name for call in self.calls if call.name not in read]
        more = [call.name for call in self.calls[-2:] if call.name in read and self.choose((False, False, False, True))]
        shapes = tuple(self.shapes[name] for name in self.inputs)
        return DrawnGraph(shapes=shapes, regime=regime, seed=seed, calls=tuple(self.calls), outputs=(*unread, *more))

    def _enter(self, shape: Shape) -> str:
        name = INPUTS[len(self.inputs)]
        self.inputs.append(name)
        self.shapes[name] = shape
        return name

    def _call(self, number: int) -> None:
        """Put a pattern behind a value that it takes: the one of this number, or the next that some value fits."""
        every = [*self.patterns[number:], *self.patterns[:number]]
        pattern, takers = next(((each, found) for each in every if (found := self._takers(each))), ("", {}))
        if not takers:
            return
        name = self.choose(list(takers))
        inputs, arguments = self._completed(_root(pattern), name, self.choose(takers[name]))
        call = DrawnCall(name=f"v{len(self.calls)}", pattern=pattern, inputs=inputs, arguments=arguments)
        shape = self._shape_of(call)
        if shape is not None:
            self.calls.append(replace(call, shape=shape))
            self.shapes[call.name] = shape

    def _takers(self, pattern: str) -> dict[str, list[dict[str, Any]]]:
        """The values that a pattern may follow, the latest first, and its options there."""
        found = {name: self._options(pattern, shape) for name, shape in reversed(self.shapes.items())}
        return {name: options for name, options in found.items() if options}

    def _options(self, pattern: str, shape: Shape) -> list[dict[str, Any]]:
        """What the table has and the backend takes; a norm behind a linear layer takes two axes."""
        root = _root(pattern)
        limits, is_normed = self.capabilities.limits.get(leaf_name(root), {}), any(map(is_norm, _ops_of(pattern)))
        if is_normed and root is nn.Linear and len(shape) != 2:
            return []
        return [
            each for each in options_for(root, shape)
            if is_taken(limits, self.is_trained and is_normed, each)
            and (self.has_numbers or isinstance(each.get("other", ""), str))
        ]  # fmt: skip

    def _completed(self, root: Any, name: str, found: Arguments) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Choose what the options leave open: other operands, channels."""
        shape, arguments = self.shapes[name], dict(found)
        if root in WEIGHTED:
            return (name,), arguments | {"shape": self._layer(root, shape)}
        if root in PAIRS:
            others = self._partners(shape, _broadcasts) if arguments["other"] == "tensor" else []
            return self._with_shapes(arguments, name, *(self.choose(others) for _ in others[:1]))
        if root in JOINS:
            dim = None if root is torch.stack else arguments["dim"] % len(shape)
            others = self._partners(shape, partial(_joins_along, dim))
            return self._with_shapes(arguments, name, *(self.choose(others) for _ in range(self.choose((1, 0, 2)))))
        return (name,), arguments

    def _partners(self, shape: Shape, goes_with: Callable[[Shape, Shape], bool]) -> list[str]:
        """The values that go with one of this shape, the latest first; then an input of its own, if there may be."""
        found = [name for name, other in reversed(self.shapes.items()) if goes_with(shape, other)]
        return [*found, _NEW] if len(self.inputs) < len(INPUTS) else found

    def _with_shapes(self, arguments: Arguments, name: str, *others: str) -> tuple[tuple[str, ...], dict[str, Any]]:
        entered = list[str]()
        for other in others:
            is_room = len(self.inputs) < len(INPUTS)
            entered.append(other if other != _NEW else self._enter(self.shapes[name]) if is_room else name)
        names = (name, *entered)
        return names, {**arguments, "shape": tuple(self.shapes[each] for each in names)}

    def _layer(self, root: Any, shape: Shape) -> LayerShape:
        """Channels and groups; a linear layer has no groups."""
        is_linear = root in (nn.Linear, F.linear)
        c_in, c_out = shape[-1 if is_linear else 1], self.choose(CHANNELS)
        groups = 1 if is_linear else self.choose([each for each in CHANNELS if c_in % each == c_out % each == 0])
        return LayerShape(c_in=c_in, c_out=c_out, groups=groups, batch=shape[0])

    def _shape_of(self, call: DrawnCall) -> Shape | None:
        """The shape of what a call gives; None: it is too large, has no axes, or is too little to train a norm on."""
        given = [self.shapes[name] for name in call.inputs]
        with torch.random.fork_rng(devices=[]):
            steps = call.steps(partial(_channels, given))
            sizes = [parameter.numel() for step in steps for parameter in _parameters(step)]
        shape = _result(given, steps)
        is_starved = any(map(is_norm, call.ops)) and prod(shape) <= shape[1]
        return None if is_starved or not shape or max((prod(shape), *sizes)) > MOST_ELEMENTS else shape


_NEW = "a new input"


def _ops_of(pattern: str) -> list[Any]:
    return [_OPS[name] for name in pattern.split("+")]


def _root(pattern: str) -> Any:
    return _ops_of(pattern)[0]


def _broadcasts(shape: Shape, other: Shape) -> bool:
    """Whether another operand keeps the shape of the first."""
    return len(other) <= len(shape) and all(b in (1, a) for a, b in zip(shape[::-1], other[::-1], strict=False))


def _joins_along(dim: int | None, shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and all(
        a == b for axis, (a, b) in enumerate(zip(shape, other, strict=True)) if axis != dim
    )


def _parameters(step: Step) -> Iterator[torch.Tensor]:
    if isinstance(step.op, nn.Module):
        yield from step.op.parameters()
    yield from (parameter for parameter in step.parameters if parameter is not None)
