"""Watch the checks of the suite, or remove one of them.

The checks are marked in place (`conformance.machine.guard`). ``watch_guards`` notes which of them find a fault;
``remove_guard`` makes one of them blind, so that the faults that only this one finds survive. A guard returns a Problem
or None, but for those of ``KINDS``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from conformance.machine.guard import GUARDS
from conformance.stages.comparison import Comparison, compare
from conformance.stages.execution import ExecutedCase
from conformance.stages.stage import StageError
from reports.verdicts import FAULTY, PASSING, Verdict

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardKind:
    """A kind of guards.

    ``has_found``: tells from a guard's arguments and result whether it has found a fault; a StageError that it raises
    counts as its result. ``blind``: makes it a function that never finds one. ``is_stream``: it yields its results.
    """

    has_found: Callable[[tuple[Any, ...], Any], bool]
    blind: Callable[[Function], Function]
    is_stream: bool = False


@contextlib.contextmanager
def watch_guards(seen: set[str]) -> Iterator[None]:
    """Add the names of the guards that find a fault in the context to ``seen``."""
    with _replace({name: _watch(name, function, seen) for name, function in GUARDS.items()}):
        yield


@contextlib.contextmanager
def remove_guard(name: str) -> Iterator[None]:
    """Make the guard of this name blind. Raises KeyError for any other name."""
    with _replace({name: kind_of(name).blind(GUARDS[name])}):
        yield


@contextlib.contextmanager
def _replace(functions: Mapping[str, Function]) -> Iterator[None]:
    before = {name: GUARDS[name] for name in functions}
    GUARDS.update(functions)
    try:
        yield
    finally:
        GUARDS.update(before)


def _watch(name: str, function: Function, seen: set[str]) -> Function:
    kind = kind_of(name)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = function(*arguments, **keywords)
        except StageError as error:
            if kind.has_found(arguments, error):
                seen.add(name)
            raise
        if kind.is_stream:
            result = list(result)
        if kind.has_found(arguments, result):
            seen.add(name)
        return iter(result) if kind.is_stream else result

    return call


# -- kinds of guards --------------------------------------------------------------------------------------------------


def _is_fault(_: tuple[Any, ...], result: Any) -> bool:
    """Tell whether a StageError was raised that does not leave the claim open."""
    return isinstance(result, StageError) and result.verdict is not Verdict.UNEXERCISED


def _leave_open(function: Function) -> Function:
    """Make the function's errors leave the claim open."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except StageError as error:
            raise StageError(error.rule, Verdict.UNEXERCISED, str(error)) from error

    return call


def _ignore_fallback(function: Function) -> Function:
    def call(bench: Any, lowered: Any) -> Any:
        with contextlib.suppress(StageError):
            return replace(function(bench, lowered), fault=None)
        return ExecutedCase(lowered=lowered)

    return call


def _ignore_changes(function: Function) -> Function:
    def call(*arguments: Any) -> Any:
        for each in function(*arguments):
            yield Comparison(where=each.where, rule=each.rule) if each.problem else each

    return call


def _take_nearest(function: Function) -> Function:
    """Let an output between two integers count as the nearest one."""
    del function

    def call(where: Any, exact: Any, position: Any, grids: Any) -> Comparison:
        nearest = ((position.round() - exact.grid.zero_point) * exact.grid.scale).float()
        return compare(where, exact, nearest, grids)

    return call


def _is_distance(comparison: Comparison) -> bool:
    """Tell whether a comparison fails by its distance only."""
    return not comparison.problem and comparison.excess > 0


def _take_any_distance(function: Function) -> Function:
    def call(claim: str, comparisons: Sequence[Comparison], **keywords: Any) -> Any:
        passing = [Comparison(where=each.where) if _is_distance(each) else each for each in comparisons]
        return function(claim, passing, **keywords)

    return call


def _pass_all(function: Function) -> Function:
    def call(*arguments: Any) -> Any:
        check = function(*arguments)
        return (
            check
            if check.verdict in (*PASSING, Verdict.UNSHOWN)
            else replace(check, verdict=Verdict.VERIFIED, outcome="pass")
        )

    return call


_PROBLEM = GuardKind(
    has_found=lambda _, result: result is not None, blind=lambda _: lambda *arguments, **keywords: None
)
_PROBLEMS = GuardKind(
    has_found=lambda _, result: bool(result), blind=lambda _: lambda *arguments: iter(()), is_stream=True
)
_CHANGES = GuardKind(
    has_found=lambda _, result: any(each.problem for each in result), blind=_ignore_changes, is_stream=True
)
_ERROR = GuardKind(has_found=_is_fault, blind=_leave_open)
KINDS: Mapping[str, GuardKind] = {
    "isolation": GuardKind(
        has_found=lambda *_: True, blind=lambda function: lambda work: (Verdict.UNEXERCISED, *function(work)[1:])
    ),
    "config.constraints": _PROBLEMS,
    "config.modules": _PROBLEMS,
    "config.fuser": _PROBLEMS,
    "config.matching": _PROBLEMS,
    "flow": _ERROR,
    "annotate.ask": _ERROR,
    "lower": _ERROR,
    "execution": GuardKind(
        has_found=lambda _, result: _is_fault((), result if isinstance(result, StageError) else result.fault),
        blind=_ignore_fallback,
    ),
    "numerics.runs": GuardKind(
        has_found=lambda *_: True, blind=lambda _: lambda where, *arguments: Comparison(where=where)
    ),
    "numerics.form": GuardKind(has_found=lambda _, result: bool(result), blind=lambda _: lambda *arguments: ""),
    "numerics.grid": GuardKind(has_found=lambda *_: True, blind=_take_nearest),
    "numerics.distance": GuardKind(
        has_found=lambda arguments, _: any(map(_is_distance, arguments[1])), blind=_take_any_distance
    ),
    "invariance.repetition": _CHANGES,
    "invariance.threads": _CHANGES,
    "invariance.channels_last": _CHANGES,
    "invariance.strided": _CHANGES,
    "invariance.batch": _CHANGES,
    "invariance.no rows": _CHANGES,
    "invariance.operands": _CHANGES,
    "invariance.models": _CHANGES,
    "models": GuardKind(has_found=lambda _, result: result.verdict in FAULTY, blind=_pass_all),
}
OPEN = {"models.check_prepared", "models.check_reference", "models.check_roundings"}
"""Guards of the flow, not of the backend: what they find leaves a model open."""


def kind_of(name: str) -> GuardKind:
    """Return the kind of the guard of this name."""
    return KINDS.get(name, _PROBLEM)
