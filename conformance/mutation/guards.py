"""Guards: the checks of the suite by name, each one that can be watched and that can be taken away.

A guard names the function that makes a check. ``watched`` notes which of them find something; ``without`` runs with one
of them blind, so that what only this one finds survives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

from conformance.stages.backend_calls import StageError
from conformance.stages.check import Check
from conformance.stages.numerics import Comparison, Finding
from conformance.stages.reruns import SAID
from reports.results import GREEN, Verdict

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One check: the dotted name of the function that makes it, and what it is blind.

    ``is_red``: tells from what the function was given and gave whether it has found something; ``blind``: makes a
    function of it that never does. What it raises, a StageError, counts as given.
    """

    name: str
    target: str
    is_red: Callable[[tuple[Any, ...], Any], bool]
    blind: Callable[[Function], Function]


@contextlib.contextmanager
def watched(found: set[str]) -> Iterator[None]:
    """Note the names of the guards that find something meanwhile."""

    def watching(guard: Guard) -> Callable[[Function], Function]:
        def make(function: Function) -> Function:
            @wraps(function)
            def call(*arguments: Any, **keywords: Any) -> Any:
                try:
                    given = function(*arguments, **keywords)
                except StageError as error:
                    if guard.is_red(arguments, error):
                        found.add(guard.name)
                    raise
                if guard.is_red(arguments, given):
                    found.add(guard.name)
                return given

            return call

        return make

    with contextlib.ExitStack() as stack:
        for guard in GUARDS:
            stack.enter_context(_replaced(guard.target, watching(guard)))
        yield


def without(name: str) -> contextlib.AbstractContextManager[None]:
    """Run with the guard of this name blind. Raises KeyError for a name that no guard has."""
    guard = {each.name: each for each in GUARDS}[name]
    return _replaced(guard.target, guard.blind)


@contextlib.contextmanager
def _replaced(target: str, change: Callable[[Function], Function]) -> Iterator[None]:
    """Put what ``change`` makes of a function in its place, meanwhile."""
    owner, name = owner_of(target)
    with patch.object(owner, name, change(getattr(owner, name))):
        yield


def owner_of(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a dotted name, and the last part of the name."""
    path, _, name = target.rpartition(".")
    try:
        return import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(import_module(module), owner), name


# -- kinds of checks --------------------------------------------------------------------------------------------------


def _is_problem(_: tuple[Any, ...], given: Any) -> bool:
    return given is not None


def _finds_nothing(function: Function) -> Function:
    return lambda *arguments, **keywords: None


def _structure(name: str) -> Guard:
    """A function of structure.py or its sisters that gives a Problem or None."""
    return Guard(name=name, target=f"conformance.stages.{name}", is_red=_is_problem, blind=_finds_nothing)


def _lint(name: str, *rules: str) -> Guard:
    """The faults of a config that lint finds under some rules."""

    def is_red(_: tuple[Any, ...], given: Any) -> bool:
        return given is not None and given.rule in rules

    def blind(function: Function) -> Function:
        def call(*arguments: Any) -> Any:
            given = function(*arguments)
            return None if is_red(arguments, given) else given

        return call

    return Guard(name=f"lint.{name}", target="conformance.pipeline.workbench.lint", is_red=is_red, blind=blind)


def _invariance(change: str) -> Guard:
    """One change that may make no difference."""

    def is_of_change(finding: Finding) -> bool:
        return bool(finding.problem) and finding.evidence.get("change") == change

    def is_red(arguments: tuple[Any, ...], _: Any) -> bool:
        return any(map(is_of_change, arguments[0]))

    def blind(judge: Function) -> Function:
        return lambda findings: judge([each for each in findings if not is_of_change(each)] or [_GOOD])

    return Guard(
        name=f"invariance.{change}",
        target="conformance.pipeline.workbench.judge_invariance",
        is_red=is_red,
        blind=blind,
    )


_GOOD = Finding(case="", max_lsb=0.0, slack_lsb=0.0, excess=-0.5, is_within_one=True)


def _raises(_: tuple[Any, ...], given: Any) -> bool:
    return isinstance(given, StageError) and given.verdict is not Verdict.UNEXERCISED


def _undecided(function: Function) -> Function:
    """What the function raises leaves the claim open."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except StageError as error:
            raise StageError(error.rule, Verdict.UNEXERCISED, str(error)) from error

    return call


def _swallowed(function: Function) -> Function:
    """What the function raises is not told."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        with contextlib.suppress(StageError):
            return function(*arguments, **keywords)

    return call


def _right(function: Function) -> Function:
    """Whatever the finding is, it finds nothing."""
    return lambda *arguments, **keywords: replace(
        function(*arguments, **keywords), problem="", excess=-0.5, is_within_one=True, is_float=False
    )


def _nearest(function: Function) -> Function:
    """What lies between two integers counts as the nearest one."""
    from conformance.stages.numerics import compare

    def call(comparison: Comparison, grid: Any, position: Any) -> Finding:
        nearest = ((position.round() - grid.zero_point) * grid.scale).float()
        return compare(replace(comparison, output=nearest))

    del function
    return call


def _rounded(finding: Finding) -> bool:
    """Whether the finding is a distance, and nothing else."""
    return not finding.problem and finding.excess > 0


def _is_distance(arguments: tuple[Any, ...], _: Any) -> bool:
    return any(map(_rounded, arguments[0]))


def _any_distance(judge: Function) -> Function:
    def call(findings: Sequence[Finding], **keywords: Any) -> Any:
        return judge([_GOOD if _rounded(each) else each for each in findings], **keywords)

    return call


def _is_red_check(_: tuple[Any, ...], given: Any) -> bool:
    return isinstance(given, Check) and given.verdict not in (Verdict.VERIFIED, Verdict.UNEXERCISED)


def _green(function: Function) -> Function:
    def call(*arguments: Any, **keywords: Any) -> Any:
        given = function(*arguments, **keywords)
        return replace(given, verdict=Verdict.VERIFIED, outcome="pass") if given.verdict not in GREEN else given

    return call


def _lost_work(function: Function) -> Function:
    return lambda outcome: (Verdict.UNEXERCISED, *function(outcome)[1:])


GUARDS: tuple[Guard, ...] = (
    _lint("constraints", "CFG-02"),
    _lint("modules", "CVT-02", "QAT-01", "CFG-11"),
    _lint("fuser", "FUS-08", "FUS-02"),
    _lint("matching", "PAT-05", "PAT-07"),
    Guard(name="flow", target="conformance.pipeline.workbench.Workbench._flow", is_red=_raises, blind=_undecided),
    _structure("structure.check_fused"),
    _structure("structure.check_fused_meaning"),
    _structure("structure.check_prepared"),
    _structure("structure._check_unobserved"),
    _structure("structure._check_observation_type"),
    _structure("structure._check_observers"),
    _structure("structure.check_prepared_dynamic"),
    _structure("structure.check_trained_meaning"),
    _structure("structure.check_reference"),
    _structure("structure._check_root"),
    _structure("structure.check_reference_dynamic"),
    _structure("structure.check_meaning"),
    _structure("ranges.check_ranges"),
    _structure("refusal._check_taken"),
    _structure("refusal._check_refused"),
    Guard(name="lower", target="conformance.pipeline.workbench.Workbench.lower", is_red=_raises, blind=_undecided),
    Guard(
        name="execution", target="conformance.pipeline.workbench.Workbench._execution", is_red=_raises, blind=_swallowed
    ),
    Guard(name="numerics.runs", target="conformance.pipeline.workbench.failure", is_red=lambda *_: True, blind=_right),
    Guard(
        name="numerics.form", target="conformance.stages.numerics._malformed", is_red=lambda _, given: bool(given),
        blind=lambda _: lambda *arguments: "",
    ),
    Guard(name="numerics.grid", target="conformance.stages.numerics._off_grid", is_red=lambda *_: True, blind=_nearest),
    Guard(
        name="numerics.distance", target="conformance.pipeline.claim_run.judge", is_red=_is_distance,
        blind=_any_distance,
    ),
    *map(_invariance, SAID),
    Guard(name="models", target="conformance.whole_models.jobs.verified", is_red=_is_red_check, blind=_green),
    Guard(name="isolation", target="conformance.run.judging.lost", is_red=lambda *_: True, blind=_lost_work),
)  # fmt: skip
"""Every check by name. What prepare and convert refuse of a config, they refuse by themselves: no guard is needed."""
