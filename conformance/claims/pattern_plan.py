"""Pattern plans: how the float models of a claim's pattern are built, for any arguments of its root op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_quant_conformance.backends.base import Taken
from fx_quant_conformance.conformance.claims.claim import Claim
from fx_quant_conformance.conformance.claims.qconfigs import qconfig_for
from fx_quant_conformance.conformance.claims.registry import Registered, read_inputs
from fx_quant_conformance.conformance.ops.fused_modules import (
    BENDING,
    BY_CHANNEL,
    EPILOGUES,
    MEMBERS,
    QAT_OF,
    make_epilogue,
    root_of,
)
from fx_quant_conformance.conformance.ops.op_model import MODEL_OF, Input, OneInput, PatternModel, Step
from fx_quant_conformance.conformance.ops.table import RECORDS, WEIGHTED
from fx_quant_conformance.conformance.ops.variants import Arguments, OpRecord
from fx_quant_conformance.conformance.ops.weighted import count_out_channels
from fx_quant_conformance.refimpl import MatchAllNode
from fx_quant_conformance.refimpl.config.patterns import is_chain, leaf_name, leaves

_JOINS = frozenset((torch.add, operator.add, torch.sub, operator.sub, torch.mul, operator.mul))
"""What may join a second input to the result of a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """A fused or QAT module that is made of the first ops of a pattern."""

    count: int
    """How many of the pattern's ops it is made of."""
    make: Callable[[list[Any]], Any]
    """Makes it of these ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """An op that adds a second input to the result of a chain."""

    op: Any
    chain: tuple[Any, ...]
    is_first: bool
    """Whether this result is the first operand."""
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternPlan:
    """How the models of a pattern are built."""

    root: Any
    """The op whose arguments are varied, by ``samples``."""
    samples: OpRecord
    epilogues: tuple[Any, ...]
    """The ops after the root."""
    fusion: Fusion | None
    """The module that is made of the first of the pattern's ops, if any."""
    addition: Addition | None
    """Where a second input is added, if one is."""
    holds_qat: bool
    """Whether the user's model holds a QAT module."""
    registered: Registered | None = None
    """A vendor's builder, which makes the model of the root op instead of the suite."""
    limits: Mapping[str, Mapping[str, Taken]] = field(default_factory=dict)
    """The limits that the backend declares, which hold for epilogues too."""

    @property
    def is_single_op(self) -> bool:
        """Whether the pattern is only the root op."""
        return self.fusion is None and not self.epilogues and self.addition is None and self.registered is None

    @property
    def has_second_input(self) -> bool:
        """Whether something is added to the result of the root op, in the suite's own model."""
        return self.registered is None and (self.addition is not None or torch.add in self.epilogues)

    @property
    def has_norm(self) -> bool:
        """Whether a batch norm follows the root op."""
        return any(map(is_norm, self.epilogues))

    @property
    def bends(self) -> bool:
        """Whether a epilogue clamps or bends the result away from zero."""
        rest = () if self.addition is None else self.addition.rest
        return any(op in BENDING for op in (*self.epilogues, *rest))

    def fits(self, arguments: Arguments) -> bool:
        """Tell whether a batch norm after the root, or a slope for each channel, takes its result.

        It does with a batch; after a linear op, of rank 2.
        """
        norms = [op for op in self.epilogues if is_norm(op)]
        is_sloped = self.root in WEIGHTED and any(op in BY_CHANNEL for op in self.epilogues)
        if not norms and not is_sloped:
            return True
        rank = len(self.samples.inputs(arguments)[0].shape)
        if self.root is nn.Linear or (self.root is F.linear and not norms):
            return rank == 2
        return rank == 2 + int((norms or [self.root])[0].__name__[-2])

    def inputs_for(self, arguments: Arguments) -> tuple[Input, ...]:
        """Return the model's inputs: the root's, then those that a vendor's builder adds."""
        inputs = self.samples.inputs(arguments)
        if self.registered is None or self.registered.more_inputs is None:
            return inputs
        return (*inputs, *read_inputs(self.registered.more_inputs, self.output_shape_for(arguments)))

    def output_shape_for(self, arguments: Arguments) -> tuple[int, ...]:
        """Return the shape of the root op's result."""
        inputs = self.samples.inputs(arguments)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = MODEL_OF[len(inputs)]([self.samples.step(self.root, arguments)])
            output: Any = model(*(torch.zeros(each.shape) for each in inputs))
        return tuple(output.shape)

    def build(self, arguments: Arguments) -> nn.Module:
        """Build the float model; its weights come from torch's generator."""
        if self.registered is not None and self.registered.around_root is not None:
            return self.registered.around_root(self._build_root(arguments))
        channels = count_out_channels(arguments) if self.epilogues and self.root in WEIGHTED else 0
        steps = [self.samples.step(self.root, arguments)]
        for op in self.epilogues:
            if op is not torch.add:
                takes = partial(is_taken, self.limits.get(leaf_name(op), {}), False)
                steps.append(make_epilogue(op, channels, takes))
        if self.fusion is not None:
            count = self.fusion.count
            if torch.add in self.epilogues[: count - 1]:
                modules: list[Any] = [steps[0].op, torch.add, *(step.op for step in steps[1:])]
                return SecondInputModel(self.fusion.make(modules))
            steps = [Step(op=self.fusion.make([step.op for step in steps[:count]])), *steps[count:]]
        model = MODEL_OF[len(self.samples.inputs(arguments))](steps)
        return model if self.addition is None else AddedModel(model, self.addition)

    def _build_root(self, arguments: Arguments) -> nn.Module:
        """The root as a vendor's builder gets it: the module itself, or a model that calls the function."""
        step = self.samples.step(self.root, arguments)
        if isinstance(step.op, nn.Module) and not step.keywords:
            return step.op
        return MODEL_OF[len(self.samples.inputs(arguments))]([step])


def plan_registered(claim: Claim, registered: Registered) -> PatternPlan | str:
    """Return the plan of a pattern around whose root a vendor builds the model, or the reason why there is none.

    The root is a weighted op of the pattern, else the first op in it that the suite knows, else the entry's
    ``root_module``.
    """
    ops = [root_of(leaf) for leaf in claim.ops]
    known = [op for op in (*ops, claim.entry.root_module) if op in RECORDS]
    if not known:
        return f"no op of {claim.pattern} is known to the suite, nor a root_module: register a build without root"
    root = next((op for op in known if op in WEIGHTED), known[0])
    others = tuple(op for op in ops if op is not root)
    return PatternPlan(
        root=root,
        samples=RECORDS[root],
        epilogues=others,
        fusion=None,
        addition=None,
        holds_qat=False,
        registered=registered,
    )


def plan_pattern(claim: Claim) -> PatternPlan | str:
    """Return the plan of a claim's pattern, or the reason why the suite cannot build it."""
    pattern = claim.entry.normal_pattern
    addition = _read_addition(pattern)
    chain = addition.chain if addition else tuple(leaves(pattern))
    if not addition and not is_chain(pattern):
        return _cannot_build("a pattern that is not a chain of ops", claim)
    root, fusion, members = _open_module(chain[0], claim)
    epilogues = (*members, *chain[1:])
    samples = RECORDS.get(root)
    if samples is None:
        return _cannot_build(leaf_name(root), claim)
    unknown = [op for op in epilogues if op not in EPILOGUES and op is not torch.add]
    if addition:
        unknown += [op for op in (addition.op,) if op not in _JOINS] + [
            op for op in addition.rest if op not in EPILOGUES
        ]
    if unknown:
        return _cannot_build(f"{leaf_name(unknown[0])} after {leaf_name(root)}", claim)
    return PatternPlan(
        root=root, samples=samples, epilogues=epilogues, fusion=fusion, addition=addition, holds_qat=chain[0] in QAT_OF
    )


def is_taken(limits: Mapping[str, Taken], is_trained_norm: bool, arguments: Arguments) -> bool:
    """Tell whether arguments, as the op gets them, are within the backend's limits, and run in the float model.

    torch's QAT modules of a convolution and a batch norm take no word for the padding: they split it in letters.
    """
    for name, taken in limits.items():
        if name in arguments and not (taken(arguments[name]) if callable(taken) else arguments[name] in taken):
            return False
    return not (is_trained_norm and (arguments.get("_uneven") or isinstance(arguments.get("padding"), str)))


def is_norm(op: Any) -> bool:
    """Tell whether an op is a batch norm's class."""
    return isinstance(op, type) and issubclass(op, nn.modules.batchnorm._BatchNorm)


def _cannot_build(what: str, claim: Claim) -> str:
    for leaf in claim.ops:
        if isinstance(leaf, str) and not hasattr(torch.Tensor, leaf):
            return f"torch.Tensor has no method {leaf}: the entry can never match"
    register = f"fx_quant_conformance.register({claim.pattern}, build, inputs)"
    return f"the suite cannot build {what}; make it buildable with {register}"


# -- fused and QAT modules --------------------------------------------------------------------------------------------


def _open_module(leaf: Any, claim: Claim) -> tuple[Any, Fusion | None, tuple[Any, ...]]:
    """Open a fused or QAT module: its root, how it is made of its members, and the other members."""
    kind = QAT_OF.get(leaf, leaf)
    root, *others = MEMBERS.get(kind, (kind,))
    if leaf not in QAT_OF and not others:
        return leaf, None, ()

    def make(modules: list[Any]) -> Any:
        module = kind(*modules) if others else modules[0]
        return _make_trainable(leaf, claim, module) if leaf in QAT_OF else module

    return root, Fusion(count=1 + len(others), make=make), tuple(others)


def _make_trainable(kind: Any, claim: Claim, module: Any) -> Any:
    """Make a QAT module that the user's model holds as such, or inside of another module."""
    module.train()
    for name, inner in module.named_children():
        if type(inner) is QAT_OF[kind]:
            setattr(module, name, _make_trainable(kind, claim, inner))
            return module
    for each in module.modules():
        each.qconfig = qconfig_for(claim)
    return kind.from_float(module)


# -- second inputs ----------------------------------------------------------------------------------------------------


def _read_addition(pattern: Any) -> Addition | None:
    """Read (op, chain, any) and (op, any, chain), and such a pattern with the ops after it."""
    if not isinstance(pattern, tuple):
        return None
    if len(pattern) == 2 and (inner := _read_addition(pattern[1])) is not None and not isinstance(pattern[0], tuple):
        return replace(inner, rest=(*inner.rest, pattern[0]))
    if len(pattern) != 3 or MatchAllNode not in pattern[1:]:
        return None
    op, first, second = pattern
    is_first = second is MatchAllNode
    return Addition(op=op, chain=tuple(leaves(first if is_first else second)), is_first=is_first)


class AddedModel(nn.Module):
    """A chain whose result is added to a second input; then the ops after the addition."""

    def __init__(self, chain: PatternModel, added: Addition) -> None:
        super().__init__()
        self.chain, self.added = chain, added
        steps = [EPILOGUES[op](0) for op in added.rest]
        self.rest = nn.Sequential(*(step.op if isinstance(step.op, nn.Module) else OneInput([step]) for step in steps))

    def forward(self, x: Any, y: Any) -> Any:
        """Add in the pattern's order."""
        result = self.chain(x)
        return self.rest(self.added.op(result, y) if self.added.is_first else self.added.op(y, result))


class SecondInputModel(nn.Module):
    """A module of two inputs, such as a fused convolution and addition."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.op = module

    def forward(self, x: Any, y: Any) -> Any:
        """Pass both on."""
        return self.op(x, y)
