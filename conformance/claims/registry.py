"""What vendors register: models of patterns with their own modules and functions, and op rules for these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from fx_quant_conformance.conformance.bounds.error_bounds import FUNCTION, OpRule, U, bound_evaluation
from fx_quant_conformance.conformance.claims.case import ValueRange
from fx_quant_conformance.conformance.ops.op_model import Input
from fx_quant_conformance.conformance.oracle.table import OP_RULES, add_vendor_rule
from fx_quant_conformance.refimpl import ConfigError
from fx_quant_conformance.refimpl.config.patterns import (
    Pattern,
    complex_normal_form,
    is_match_all,
    leaves,
    normal_form,
    pattern_name,
)
from fx_quant_conformance.reports.text import pluralize

Inputs: TypeAlias = Sequence[Sequence[int] | Input]
"""A shape for each input of a model, or an Input."""
MakeInputs: TypeAlias = Callable[..., Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One registered model: how it is built, its inputs, and the keywords that differ from the first model's."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    varied: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a vendor registered for a pattern."""

    builds: tuple[Build, ...] = ()
    """The models."""
    around_root: Callable[[nn.Module], nn.Module] | None = None
    """Makes a model of the pattern's root op; None where ``builds`` are given."""
    more_inputs: MakeInputs | None = None
    """Makes that model's inputs after the root's, for the shape of the root's result; None with ``builds``."""
    value_ranges: tuple[ValueRange, ...] = ()
    """The vendor's own input ranges."""
    roundings: int | None = None
    """The roundings of the vendor's own op; None: none are given."""

    def __str__(self) -> str:
        models = pluralize(len(self.builds), "model") if self.builds else "a model around each of the root's"
        ranges = [each.name for each in self.value_ranges]
        return ", ".join([models, *ranges, *([] if self.roundings is None else [f"roundings={self.roundings}"])])


MOST_ROUNDINGS = round(1 / U)
"""So many roundings have no γ."""
_registered: dict[Any, Registered] = {}


def register(
    pattern: Any,
    build: Callable[..., nn.Module] | Sequence[Callable[[], nn.Module]],
    inputs: Inputs | Sequence[Inputs] | MakeInputs | None = None,
    *,
    variants: Sequence[Mapping[str, Any]] = (),
    ranges: Sequence[tuple[float, float]] = (),
    roundings: int | None = None,
) -> None:
    """Make a pattern with a vendor's own module or function buildable. Call it where the backend is defined.

    `pattern`: as in ``BackendPatternConfig``: in forward order, or in the complex format. `build`: returns a float
    model in eval mode whose forward holds the pattern once. `inputs`: a shape for each of its inputs (or an Input, for
    indices). There are three ways to give more than one model:

    - `variants`: the keywords of each call of `build`; `inputs` may then be a callable of the same keywords.
    - `build` is a list of callables; `inputs` holds for all, or is a list with the inputs of each.
    - `build` has a parameter ``root``: it gets the first op of the pattern (or the entry's ``root_module``) as the
      suite builds it, once for each variant of that op, and must return a model that holds it. The inputs are the
      root's; `inputs` may be a callable that gets the shape of the root's result and returns the further inputs.

    `ranges`: (lowest, highest) value of all inputs, tried in addition to the suite's own. `roundings`: how many float32
    roundings an evaluation of the vendor's own op makes at most, each relative to its result. The oracle then takes the
    op itself in float64 as exact, and allows γ of that many; None: an op without an op rule leaves its claims
    UNEXERCISED. What the suite can build itself is tried as well: a registration adds models.

    The header of a run's results has what is registered.

    Raises ConfigError if `pattern` is no pattern, `build` cannot be called, `inputs` does not go with it, two variants
    are alike, a range is not finite or empty, or `roundings` are no whole number that has a γ.
    """
    keys = _read_pattern(pattern)
    try:
        registered = _read_builds(build, inputs, variants)
    except MisfitError as error:
        found = f"found build={build!r}, inputs={inputs!r}, variants={variants!r}"
        raise ConfigError(f"register({pattern!r}): {found}; {error}") from None
    if roundings is not None and (type(roundings) is not int or not 0 <= roundings < MOST_ROUNDINGS):
        expected = f"give a whole number from 0 to {MOST_ROUNDINGS - 1}"
        raise ConfigError(f"register({pattern!r}): found roundings={roundings!r}; {expected}")
    registered = replace(registered, value_ranges=tuple(_read_ranges(pattern, ranges)), roundings=roundings)
    _registered.update(dict.fromkeys(keys, registered))
    if roundings is None:
        return
    rule = OpRule(
        arithmetic=FUNCTION,
        bound=partial(bound_evaluation, roundings),
        source="fx_quant_conformance.register",
    )
    for leaf in leaves(keys[0]):
        if leaf not in OP_RULES and not is_match_all(leaf):
            add_vendor_rule(leaf, rule)


def registered_for(pattern: Any) -> Registered | None:
    """Return what is registered for a pattern in its normal form; None if nothing is."""
    return _registered.get(pattern)


def roundings_in(pattern: Any) -> int:
    """Return the most roundings that are registered with an op of a pattern in its normal form; 0 if none are."""
    own = {*leaves(pattern)}
    return max((each.roundings or 0 for key, each in _registered.items() if own & {*leaves(key)}), default=0)


def describe_registered() -> dict[str, str]:
    """Return all that is registered, in words, by the pattern's name."""
    return {pattern_name(pattern): str(registered) for pattern, registered in _registered.items()}


# -- reading what a vendor gives --------------------------------------------------------------------------------------


class MisfitError(Exception):
    """Arguments of ``register`` that do not go together; the message says what to give."""


def _read_pattern(pattern: Any) -> tuple[Pattern, ...]:
    """Return the normal forms that a pattern may stand for; ConfigError for none.

    A tuple in a tuple, and a wildcard, are only in complex patterns. Three ops are a chain, or an op of two others.
    """
    if not isinstance(pattern, tuple):
        return (normal_form(pattern),)
    if any(isinstance(item, tuple) or is_match_all(item) for item in pattern):
        return (complex_normal_form(pattern),)
    chain = normal_form(pattern)
    return (chain, complex_normal_form(pattern)) if len(pattern) == 3 else (chain,)


def _read_builds(build: Any, inputs: Any, variants: Sequence[Mapping[str, Any]]) -> Registered:
    if isinstance(build, (list, tuple)):
        return Registered(builds=tuple(_read_list(build, inputs, variants)))
    if not callable(build):
        raise MisfitError("give a callable that builds a model, and a shape for each input")
    if _takes_root(build):
        if variants or not (inputs is None or callable(inputs)):
            expected = "none, or a callable of the root's output shape, for a build with a parameter root"
            raise MisfitError(f"give no variants, and as inputs {expected}")
        return Registered(around_root=build, more_inputs=inputs)
    return Registered(builds=tuple(_read_variants(build, inputs, variants or ({},))))


def _takes_root(build: Callable[..., Any]) -> bool:
    """Tell whether a builder has a parameter ``root`` that it must be given."""
    try:
        root = inspect.signature(build).parameters.get("root")
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return root is not None and root.default is inspect.Parameter.empty


def _read_list(builds: Sequence[Any], inputs: Any, variants: Sequence[Mapping[str, Any]]) -> Iterator[Build]:
    is_shared = isinstance(inputs, (list, tuple)) and all(map(_is_input, inputs))
    each = [inputs] * len(builds) if is_shared else inputs
    if not builds or variants or not all(map(callable, builds)) or not isinstance(each, (list, tuple)):
        raise MisfitError("give a list of callables without variants, and the inputs of all or of each")
    if len(each) != len(builds):
        raise MisfitError(f"give the inputs of each of the {len(builds)} builds, found {len(each)}")
    for number, (build, own) in enumerate(zip(builds, each, strict=True), start=1):
        yield Build(name=f"registered {number}", build=build, inputs=read_inputs(own))


def _read_variants(
    build: Callable[..., nn.Module], inputs: Any, variants: Sequence[Mapping[str, Any]]
) -> Iterator[Build]:
    first, names = variants[0], set[str]()
    for variant in variants:
        spelled = ",".join(f"{key}={value}" for key, value in variant.items())
        name = f"registered {spelled}".strip()
        if name in names:
            raise MisfitError(f"give every variant once; {spelled} is there twice")
        names.add(name)
        varied = tuple(key for key, value in variant.items() if key not in first or first[key] != value)
        shapes = read_inputs(inputs, **variant)
        yield Build(name=name, build=partial(build, **variant), inputs=shapes, varied=varied)


def _is_input(item: Any) -> bool:
    is_shape = isinstance(item, Sequence) and all(isinstance(extent, int) for extent in item)
    return is_shape or isinstance(item, Input)


def read_inputs(inputs: Any, *arguments: Any, **keywords: Any) -> tuple[Input, ...]:
    """Return what a vendor gives as inputs: a shape or an Input for each, or a callable that returns these.

    Raises MisfitError for anything else, or if the callable raises.
    """
    if callable(inputs):
        try:
            inputs = inputs(*arguments, **keywords)
        except Exception as error:  # the vendor's code may raise anything
            called = ", ".join([*map(repr, arguments), *(f"{key}={value!r}" for key, value in keywords.items())])
            raise MisfitError(f"inputs({called}) raised {type(error).__name__}: {error}") from error
    if not isinstance(inputs, Sequence) or not inputs or not all(map(_is_input, inputs)):
        raise MisfitError("give a callable that builds a model, and a shape for each input")
    return tuple(each if isinstance(each, Input) else Input(shape=tuple(each)) for each in inputs)


def _read_ranges(pattern: Any, ranges: Sequence[tuple[float, float]]) -> Iterator[ValueRange]:
    """A value range for each of the vendor's ranges."""
    for low, high in ranges:
        if not -1e6 <= low < high <= 1e6:
            expected = "give (lowest, highest), both within ±1e6"
            raise ConfigError(f"register({pattern!r}): found the range ({low!r}, {high!r}); {expected}")
        yield ValueRange(name=f"range {low:g}..{high:g}", ranges=((float(low), float(high)),))
