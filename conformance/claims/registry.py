"""What vendors register: models of patterns with their own modules and functions, and op rules for these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from conformance.ops.op_model import Input
from conformance.oracle.error_bounds import FUNCTION, OpRule, bound_evaluation
from conformance.oracle.table import OP_RULES, add_vendor_rule
from refimpl import ConfigError
from refimpl.patterns import leaves, normal_form


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What a vendor registered for a pattern."""

    build: Callable[[], nn.Module]
    inputs: tuple[Input, ...]


_registered: dict[Any, Registered] = {}


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
    how many float32 roundings an evaluation of the vendor's own op makes at most, each relative to its result. The
    oracle then takes the op itself in float64 as exact, and allows γ of that many; None: an op without an op rule
    leaves its claims UNEXERCISED.

    Raises ConfigError if `pattern` is no pattern, `build` cannot be called, or `inputs` is empty.
    """
    shapes = tuple(each if isinstance(each, Input) else Input(shape=tuple(each)) for each in inputs)
    if not callable(build) or not shapes:
        expected = "give a callable that builds a model, and a shape for each input"
        raise ConfigError(f"register({pattern!r}): found build={build!r}, inputs={inputs!r}; {expected}")
    normal = normal_form(pattern)
    _registered[normal] = Registered(build=build, inputs=shapes)
    if roundings is None:
        return
    rule = OpRule(arithmetic=FUNCTION, bound=partial(bound_evaluation, roundings), source="conformance.vendor.register")
    for leaf in leaves(normal):
        if leaf not in OP_RULES:
            add_vendor_rule(leaf, rule)


def registered_for(pattern: Any) -> Registered | None:
    """Return what is registered for a pattern in its normal form; None if nothing is."""
    return _registered.get(pattern)
