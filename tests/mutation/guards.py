"""Watch the checks of the suite, or remove one of them.

The checks are marked in place (`conformance.machine.guard`). ``watch_guards`` notes which of them find a fault;
``remove_guard`` makes one of them blind, so that the faults that only this one finds survive. A guard yields faults, or
raises one that ends the case: blind, it yields none, and what it raises leaves the claim open. Two are `JUDGES`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any

import fx_quant_conformance.conformance.pt2e.unclaimed_ops  # noqa: F401  # with it come all guards of its room
from fx_quant_conformance.conformance.machine.fault import Fault, FaultFound
from fx_quant_conformance.conformance.machine.guard import GUARDS
from fx_quant_conformance.reports.schema import Check
from fx_quant_conformance.reports.verdicts import FAULTY, PASSING, Verdict

Function = Callable[..., Any]
OPEN = {"models.check_prepared", "models.check_reference", "models.check_roundings"}
"""Guards of the flow, not of the backend: what they find leaves a model open."""


@contextlib.contextmanager
def watch_guards(seen: set[str]) -> Iterator[None]:
    """Add the names of the guards that find a fault in the context to ``seen``."""
    with _replace({name: _watch(name, function, seen) for name, function in GUARDS.items()}):
        yield


@contextlib.contextmanager
def remove_guard(name: str) -> Iterator[None]:
    """Make the guard of this name blind. Raises KeyError for any other name."""
    with _replace({name: _blind(name, GUARDS[name])}):
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
    def note(fault: Fault) -> None:
        if isgeneratorfunction(function) or fault.verdict is not Verdict.UNEXERCISED:
            seen.add(name)

    def stream(*arguments: Any, **keywords: Any) -> Iterator[Fault]:
        with _noting(note):
            for fault in function(*arguments, **keywords):
                note(fault)
                yield fault

    def call(*arguments: Any, **keywords: Any) -> Any:
        with _noting(note):
            result = function(*arguments, **keywords)
        if name in JUDGES and JUDGES[name].verdict_of(result) in FAULTY:
            seen.add(name)
        return result

    return wraps(function)(stream if isgeneratorfunction(function) else call)


@contextlib.contextmanager
def _noting(note: Callable[[Fault], None]) -> Iterator[None]:
    try:
        yield
    except FaultFound as found:
        note(found.fault)
        raise


def _blind(name: str, function: Function) -> Function:
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            result = function(*arguments, **keywords)
        except FaultFound as found:
            raise FaultFound(replace(found.fault, verdict=Verdict.UNEXERCISED)) from found
        return JUDGES[name].let_pass(result) if name in JUDGES else result

    return (lambda *_, **__: iter(())) if isgeneratorfunction(function) else call


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A guard that returns a judgement, as it also makes those that pass."""

    verdict_of: Callable[[Any], Verdict]
    let_pass: Callable[[Any], Any]


def _let_model_pass(check: Check) -> Check:
    if check.verdict in (*PASSING, Verdict.UNSHOWN):
        return check
    return replace(check, verdict=Verdict.VERIFIED, outcome="pass")


JUDGES: Mapping[str, Judge] = {
    "isolation": Judge(
        verdict_of=lambda fault: fault.verdict, let_pass=lambda fault: replace(fault, verdict=Verdict.UNEXERCISED)
    ),
    "models": Judge(verdict_of=lambda check: check.verdict, let_pass=_let_model_pass),
}
