"""Models: the cases of a claim, from the tables of recipes, and the float model of each.

``plan_cases`` returns the cases of a claim, or the reason why none can be built: such a claim is UNEXERCISED. What a
vendor brings of his own is made buildable by ``register``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from backends.base import Capabilities, Taken
from conformance.claims.build import Preluded
from conformance.claims.case import Case, Regime
from conformance.claims.claim import NO_WEIGHT, Claim
from conformance.claims.qconfigs import Kind, kind_of, qconfig_for
from conformance.claims.quick import Turn, chosen
from conformance.claims.traits import moves_only
from conformance.ops.op_model import MODEL_OF, Input, PatternModel, Step
from conformance.ops.table import FOLLOWERS, PARTS, QAT_OF, RECIPES, WEIGHTED, out_channels
from conformance.ops.variants import Arguments, Recipe
from conformance.oracle.error_bounds import FUNCTION, Row, evaluates
from conformance.oracle.table import ROWS
from refimpl import ConfigError, MatchAllNode, ObservationType
from refimpl.patterns import is_chain, leaf_name, leaves, normal_form, pattern_name

# Where the grids lie: zero points in the middle, at both ends and away from them; full, narrow and wide ranges (scales
# from 2⁻¹² to 2⁴); s_x·s_w / s_y from tiny to above 1; biases up to where int32 ends.
REGIMES: tuple[Regime, ...] = (
    Regime(name="signed", ranges=((-1.0, 1.0), (-3.0, 0.0))),
    Regime(name="positive", ranges=((0.0, 2.0), (-0.5, 4.0))),
    Regime(name="negative", ranges=((-3.0, 0.0), (-1.0, 1.0))),
    Regime(name="skewed", ranges=((-0.5, 4.0), (0.0, 2.0))),
    Regime(name="symmetric", ranges=((-1.0, 1.0), (-0.5, 4.0)), is_symmetric=True),
    Regime(name="coarse_output", ranges=((-1.0, 1.0), (-2.0, 1.0)), output=64.0),
    Regime(name="fine_output", ranges=((-2.0, 1.0), (-1.0, 2.0)), output=2.0**-6),
    Regime(name="finest_output", ranges=((-2.0, 1.0), (-1.0, 2.0)), output=2.0**-10),
    Regime(name="narrow", ranges=((-(2.0**-6), 2.0**-6), (0.0, 2.0**-5)), bias=2.0**-6),
    Regime(name="wide", ranges=((-1000.0, 3080.0), (-2040.0, 2040.0))),
    Regime(name="ties", ranges=((-2.0, 1.0), (-0.5, 1.0)), has_ties=True),
    Regime(name="large_bias", ranges=((-1.0, 1.0), (0.0, 2.0)), bias=2.0**7),
    Regime(name="largest_bias", ranges=((-1.0, 1.0), (0.0, 2.0)), bias=math.inf),
    Regime(name="saturating_function", ranges=((-8.0, 8.0), (-5.0, 6.0))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a vendor registered for a pattern."""

    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]


_ALONE = Turn()
_REGISTERED: dict[str, Registered] = {}
_BY_REGISTER = "conformance.vendor.register"


def register(
    pattern: Any,
    build: Callable[[], nn.Module],
    inputs: Sequence[Sequence[int] | Input],
    *,
    roundings: int | None = None,
) -> None:
    """Make a pattern with a vendor's own module or function buildable. Call it where the backend is defined.

    `pattern`: as in ``BackendPatternConfig``, in forward order. `build`: returns a float model in eval mode whose
    forward holds the pattern once. `inputs`: a shape for each of its inputs (or an Input, for indices). `roundings`:
    how many float32 roundings an evaluation of the vendor's own op makes at most, each relative to its result: the
    oracle then takes the op itself in float64 for exact, and allows γ of that many; None: an op without a row in the
    oracle leaves its claims UNEXERCISED.

    Raises ConfigError for what is no pattern, a `build` that cannot be called, or no inputs.
    """
    shapes = tuple(each if isinstance(each, Input) else Input(shape=tuple(each)) for each in inputs)
    if not callable(build) or not shapes:
        found = f"found build={build!r}, inputs={inputs!r}"
        raise ConfigError(
            f"register({pattern!r}): {found}; give a callable that builds a model, and a shape for each input"
        )
    normal = normal_form(pattern)
    _REGISTERED[pattern_name(normal)] = Registered(build=build, inputs=shapes)
    for leaf in leaves(normal):
        if roundings is not None and (leaf not in ROWS or ROWS[leaf].source == _BY_REGISTER):
            ROWS[leaf] = Row(verifier=FUNCTION, spread=evaluates(roundings=roundings), source=_BY_REGISTER)


# -- from a claim to its cases ----------------------------------------------------------------------------------------


def plan_cases(
    claim: Claim,
    capabilities: Capabilities,
    *,
    limit: int | None = None,
    turn: Turn = _ALONE,
    has_prelude: bool = False,
) -> tuple[Case, ...] | str:
    """Return the cases of a claim, or the reason why the suite cannot build one.

    Within the limits that the backend declares. With a `limit` only so many for the claims on one op, of which this one
    has the given turn. ``has_prelude``: an identity may stand before the pattern, so that one of fixed qparams is also
    given inputs outside of them.
    """
    if kind_of(claim.dtypes) is Kind.OTHER:
        return f"no QConfig for activations of dtype {claim.dtypes.input_dtype}"
    registered = _REGISTERED.get(claim.pattern)
    if registered is not None:
        made = [
            Case(name=regime.name, build=registered.build, inputs=registered.inputs, regime=regime)
            for regime in REGIMES[:5]
        ]
        return chosen(made, limit, turn)
    models = _models(claim, capabilities)
    if isinstance(models, str):
        return models
    cases = _with_regimes(claim, models)
    if has_prelude and kind_of(claim.dtypes) is Kind.FIXED:
        cases = [_preluded(case) if number % 2 == 0 else case for number, case in enumerate(cases)]
    return chosen(cases, limit, turn)


def _preluded(case: Case) -> Case:
    return replace(
        case,
        name=f"{case.name} behind an identity",
        variant=f"{case.variant} behind an identity",
        build=lambda: Preluded(case.build()),
    )


def _with_regimes(claim: Claim, models: Sequence[Case]) -> list[Case]:
    """Give each case a regime, in turn; the base case meets those for which there are too few cases.

    And those of a coarse or the finest output and of a large bias, where a kernel's errors are small against a step or
    beyond the ends. A zero point of 0, with which wrong padding shows nothing, is not for what is padded. An op without
    a weight that computes meets all of them on its base case, and zero points at both ends on other shapes.
    """
    regimes = [regime for regime in REGIMES if _matters(regime, claim)]
    turns = [regime for regime in regimes if 2.0**-6 <= regime.output <= 1.0 and regime.bias <= 1.0]
    turn = zip(models, itertools.cycle(turns), strict=False)
    pairs = [(model, _shown_by(model, regime, turns)) for model, regime in turn]
    more = [(models[0], regime) for regime in regimes if regime not in [met for _, met in pairs]]
    if claim.scheme == NO_WEIGHT and not moves_only(claim):
        shapes = [each for each in models if each.varied == ("shape",)]
        ends = [regime for regime in turns if regime.name in ("positive", "negative")]
        more = [*itertools.product(models[:1], regimes), *itertools.product(shapes, ends)]
    pairs += [pair for pair in more if pair not in pairs]
    return [
        replace(case, name=f"{case.name} {regime.name}", variant=case.name, regime=regime) for case, regime in pairs
    ]


def _shown_by(model: Case, regime: Regime, turns: Sequence[Regime]) -> Regime:
    """The regime that is a model's turn, or another whose zero point is not 0."""
    is_padded = any(name in _PADDED for name in model.varied)
    return turns[-1] if is_padded and regime.ranges[0][0] == 0.0 else regime


_PADDED = ("padding", "padding_mode", "_network", "_uneven")


def _matters(regime: Regime, claim: Claim) -> bool:
    kind = kind_of(claim.dtypes)
    if kind in (Kind.DYNAMIC, Kind.FLOAT16, Kind.WEIGHT_ONLY):
        return regime.name == "signed" or 1.0 < regime.bias < math.inf
    shares = claim.entry.observation_type is not ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    if regime.output != 1.0 and (shares or kind is Kind.FIXED):
        return False
    if regime.bias == math.inf and _has_norm(claim):  # a norm would take the bias away, and a folded one is not this
        return False
    return regime.bias <= 1.0 or claim.scheme != NO_WEIGHT


def _models(claim: Claim, capabilities: Capabilities) -> list[Case] | str:
    pattern = claim.entry.normal_pattern
    added = _added(pattern)
    chain = added.chain if added else tuple(leaves(pattern))
    if not added and not is_chain(pattern):
        return _unknown("a pattern that is not a chain of ops", claim)
    root, wrap, rest = _opened(chain[0], claim)
    rest = (*rest, *chain[1:])
    recipe = RECIPES.get(root)
    if recipe is None:
        return _unknown(leaf_name(root), claim)
    unknown = [leaf for leaf in rest if leaf not in FOLLOWERS and leaf is not torch.add]
    if unknown:
        return _unknown(f"{leaf_name(unknown[0])} after {leaf_name(root)}", claim)
    is_trained_norm = (claim.flow == "qat" or chain[0] in QAT_OF) and any(map(_is_norm, rest))
    takes = partial(is_taken, capabilities.limits.get(leaf_name(root), {}), is_trained_norm)
    return list(_cases(recipe, root, wrap, rest, added, takes))


def is_taken(limits: Mapping[str, Taken], is_trained_norm: bool, arguments: Arguments) -> bool:
    """Tell whether arguments are within the backend's limits, and run in the float model.

    torch's QAT modules of a convolution and a batch norm do not take a word for the padding: they split it in letters.
    """
    for name, taken in limits.items():
        if name in arguments and not (taken(arguments[name]) if callable(taken) else arguments[name] in taken):
            return False
    return not (is_trained_norm and (arguments.get("_uneven") or isinstance(arguments.get("padding"), str)))


def _unknown(what: str, claim: Claim) -> str:
    for leaf in leaves(claim.entry.normal_pattern):
        if isinstance(leaf, str) and not hasattr(torch.Tensor, leaf):
            return f"torch.Tensor has no method {leaf}: the entry can never match"
    return f"no recipe for {what}: make it buildable with conformance.vendor.register({claim.pattern}, build, inputs)"


Wrap = Callable[[list[nn.Module]], nn.Module]


def _opened(leaf: Any, claim: Claim) -> tuple[Any, tuple[int, Wrap] | None, tuple[Any, ...]]:
    """Open a fused or QAT module: its root, how to make it of its parts (and of how many), and the other parts."""
    wraps: list[Wrap] = []
    if leaf in QAT_OF:
        wraps.append(partial(_trainable, leaf, claim))
        leaf = QAT_OF[leaf]
    parts = PARTS.get(leaf, (leaf,))
    if len(parts) > 1:
        wraps.insert(0, partial(_joined, leaf))
    if not wraps:
        return leaf, None, ()

    def wrap(modules: list[Any]) -> Any:
        for each in wraps:
            modules = [each(modules)]
        return modules[0]

    return parts[0], (len(parts), wrap), tuple(parts[1:])


def _joined(kind: Any, modules: list[Any]) -> Any:
    return kind(*modules)


def _trainable(kind: Any, claim: Claim, modules: list[Any]) -> Any:
    """A QAT module that the user's model holds as such, by itself or inside of another module."""
    module = modules[0].train()
    for name, inner in module.named_children():
        if type(inner) is QAT_OF[kind]:
            setattr(module, name, _trainable(kind, claim, [inner]))
            return module
    for each in module.modules():
        each.qconfig = qconfig_for(claim)
    return kind.from_float(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A pattern that adds a second input to a chain: ``op`` with the chain's result first or second."""

    op: Any
    chain: tuple[Any, ...]
    is_first: bool
    rest: tuple[Any, ...] = ()


def _added(pattern: Any) -> Added | None:
    """Read (op, chain, any) and (op, any, chain), and a chain of those with what follows."""
    if not isinstance(pattern, tuple):
        return None
    if len(pattern) == 2 and (inner := _added(pattern[1])) is not None and not isinstance(pattern[0], tuple):
        return replace(inner, rest=(*inner.rest, pattern[0]))
    if len(pattern) != 3 or MatchAllNode not in pattern[1:]:
        return None
    op, first, second = pattern
    is_first = second is MatchAllNode
    chain = tuple(leaves(first if is_first else second))
    return Added(op=op, chain=chain, is_first=is_first)


class AddedModel(nn.Module):
    """A chain whose result is added to a second input; then what follows."""

    def __init__(self, chain: PatternModel, added: Added) -> None:
        super().__init__()
        self.chain, self.added = chain, added
        self.rest = nn.Sequential(*(each() for each in added.rest))

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
        """Hand both on."""
        return self.op(x, y)


def _cases(
    recipe: Recipe, root: Any, wrap: tuple[int, Wrap] | None, rest: tuple[Any, ...], added: Added | None,
    takes: Callable[[Arguments], bool],
) -> Iterator[Case]:  # fmt: skip
    needs_second = added is not None or torch.add in rest
    is_alone = wrap is None and not rest and added is None
    for varied, arguments in _variants(root, whole=is_alone or root not in WEIGHTED, known=is_alone):
        inputs = recipe.inputs(arguments)
        if not takes(arguments) or not _norm_fits(rest, root, inputs):
            continue
        build = partial(_build, recipe, root, wrap, rest, added, arguments, len(inputs))
        name = ",".join(f"{key}={_shown(arguments[key])}" for key in varied) or "default"
        shape = _output_shape(recipe, root, arguments) if needs_second else ()
        second = (Input(shape=shape),) if needs_second else ()
        yield Case(name=name, build=build, inputs=(*inputs, *second), regime=REGIMES[0], varied=varied)
        if needs_second and not varied:
            second = (Input(shape=(1, shape[1], *[1] * (len(shape) - 2))),)
            yield Case(name="broadcast", build=build, inputs=(*inputs, *second), regime=REGIMES[0], varied=("second",))


@cache
def _variants(root: Any, *, whole: bool, known: bool) -> tuple[tuple[tuple[str, ...], dict[str, Any]], ...]:
    """The variants of an op, made once for all patterns that have it."""
    return tuple(RECIPES[root].variants(whole=whole, known=known))


def _build(
    recipe: Recipe, root: Any, wrap: tuple[int, Wrap] | None, rest: tuple[Any, ...], added: Added | None,
    arguments: dict[str, Any], inputs: int,
) -> nn.Module:  # fmt: skip
    channels = out_channels(arguments) if rest and root in WEIGHTED else 0
    steps = [recipe.step(root, arguments), *(FOLLOWERS[leaf](channels) for leaf in rest if leaf is not torch.add)]
    if wrap is not None:
        parts, make = wrap
        if torch.add in rest[: parts - 1]:
            modules: list[Any] = [steps[0].op, torch.add, *(step.op for step in steps[1:])]
            return SecondInputModel(make(modules))
        inner: list[Any] = [step.op for step in steps[:parts]]
        steps = [Step(op=make(inner)), *steps[parts:]]
    model = MODEL_OF[inputs](steps)
    return model if added is None else AddedModel(model, added)


def _output_shape(recipe: Recipe, root: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    inputs = recipe.inputs(arguments)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = MODEL_OF[len(inputs)]([recipe.step(root, arguments)])
        found: Any = model(*(torch.zeros(each.shape) for each in inputs))
    return tuple(found.shape)


def _has_norm(claim: Claim) -> bool:
    """Tell whether a norm is in the claim's pattern, by itself or inside of a fused module."""
    found = [leaf for leaf in leaves(claim.entry.normal_pattern) if isinstance(leaf, type)]
    return any(_is_norm(part) for leaf in found for part in PARTS.get(QAT_OF.get(leaf, leaf), (leaf,)))


def _is_norm(leaf: Any) -> bool:
    return isinstance(leaf, type) and issubclass(leaf, nn.modules.batchnorm._BatchNorm)


def _norm_fits(rest: tuple[Any, ...], root: Any, inputs: Sequence[Input]) -> bool:
    """A batch norm after the root takes inputs with a batch; after a linear op those of rank 2."""
    norms = [leaf for leaf in rest if _is_norm(leaf)]
    if not norms:
        return True
    rank = len(inputs[0].shape)
    return rank == 2 if root is nn.Linear else rank == 2 + int(norms[0].__name__[-2])


def _shown(value: Any) -> str:
    is_several = isinstance(value, (tuple, list)) and len(value) > 1
    return "x".join(map(str, value)) if is_several else str(value)
