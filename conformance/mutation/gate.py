"""The gate: mutants taken through the suite as a vendor's backend is, and what is found of each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from conformance.claims.claim import Claim
from conformance.machine.isolation import Forked, Serve
from conformance.machine.messages import GuardsSeen
from conformance.mutation.guards import watched, without
from conformance.mutation.mutant import Mutant, owner_of
from conformance.run.exercise import SHARES, server
from conformance.run.judging import judged_among, rows_of
from conformance.run.options import Options
from conformance.run.session import Run, Unit, open_run
from reports.codec import Message
from reports.results import leading_check
from reports.schema import Check, ClaimResult, Judged, Row
from reports.verdicts import Verdict

RED = frozenset({Verdict.QUALITY, Verdict.FALLBACK, Verdict.REFUTED, Verdict.TIMEOUT, Verdict.CRASHED})
"""Verdicts that find a fault: not VERIFIED, and not UNEXERCISED, which finds nothing. ``--strict`` refuses them all."""
LIMIT = 20.0
"""Seconds for one claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Red:
    """A claim or model that is not VERIFIED.

    ``pattern``: that of the claim; "" for a model. ``rule``: that of the check that leads. ``guards``: the checks that
    found something. ``failing``, ``cases``: of how many comparisons. ``max_lsb``: the largest distance, if any.
    """

    unit: str
    pattern: str
    verdict: Verdict
    stage: str
    rule: str
    guards: tuple[str, ...]
    failing: int
    cases: int
    max_lsb: float | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRun:
    """One mutant in one profile with one seed: what was found, and of how many claims and models.

    ``blind``: the guard that was taken away, or "". ``open``: claims that could not be exercised, and why.
    """

    mutant: str
    profile: str
    seed: int
    reds: tuple[Red, ...]
    units: int
    seconds: float
    blind: str = ""
    open: tuple[str, ...] = ()

    @property
    def is_killed(self) -> bool:
        """Whether the fault was found."""
        return bool(self.reds)

    @property
    def lead(self) -> Red:
        """The first of the worst."""
        return min(self.reds, key=lambda red: red.verdict.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One trial to be made. ``units``: the only claims and models to run; none: all that the mutant names."""

    mutant: str
    profile: str
    seed: int = 0
    blind: str = ""
    units: tuple[str, ...] = ()


def run_all(mutants: Sequence[Mutant], tasks: Sequence[Task], processes: int) -> Iterator[MutantRun]:
    """Make the trials, in order; so many at a time."""
    known = {mutant.name: mutant for mutant in mutants}
    if processes < 2 or len(tasks) < 2:
        yield from (trial(known[task.mutant], task) for task in tasks)
        return
    with ProcessPoolExecutor(processes, get_context("fork"), _enter, (known,)) as pool:
        yield from pool.map(_work, tasks)


_KNOWN: dict[str, Mutant] = {}


def _enter(known: Mapping[str, Mutant]) -> None:
    _KNOWN.update(known)
    torch.set_num_threads(1)


def _work(task: Task) -> MutantRun:
    return trial(_KNOWN[task.mutant], task)


def trial(mutant: Mutant, task: Task) -> MutantRun:
    """Take a mutant through the suite: each claim in a process of its own, and small models, as in any run."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for target, value in mutant.patches:
            stack.enter_context(patch.object(*owner_of(target), value))
        if task.blind:
            stack.enter_context(without(task.blind))
        found, left, units = list[Red](), list[str](), dict[str, Unit]()
        try:
            run = open_run(_options(mutant, task), mutant.make())
            units = {name: unit for name, unit in run.units.items() if isinstance(unit, Claim) or unit.is_model}
            found, left = _run_units(run, units, task.profile)
        except Exception as error:  # of the mutant's own making: the other mutants go on
            left = [f"cannot be run: {type(error).__name__}: {error}"]
    return MutantRun(
        mutant=mutant.name,
        profile=task.profile,
        seed=task.seed,
        reds=tuple(found),
        units=len(units),
        seconds=round(time.perf_counter() - started, 3),
        blind=task.blind,
        open=tuple(left),
    )


def _options(mutant: Mutant, task: Task) -> Options:
    return Options(
        backend=mutant.name,
        report_dir=Path(os.devnull),
        seed=task.seed,
        profile=task.profile,
        max_examples=None,
        claims=task.units or (mutant.in_full if task.profile == "full" and mutant.in_full else mutant.claims),
        list_claims=False,
        strict=True,
        claim_timeout=LIMIT,
        waivers=None,
        no_waivers=True,
        isa=None,
        shard=None,
        baseline=None,
    )


def _run_units(run: Run, units: Mapping[str, Unit], profile: str) -> tuple[list[Red], list[str]]:
    """Run every unit; return what is red, and what could not be exercised."""
    reds, left = list[Red](), list[str]()
    seen = set[str]()
    with watched(seen):
        isolation = Forked(_noting(server(run.bench(), units), seen), limit=LIMIT, share=SHARES[profile])
        try:
            for name, unit in units.items():
                seen.clear()
                work = isolation.run(name)
                in_child = (each.names for each in work.messages if isinstance(each, GuardsSeen))
                rows = rows_of(run, unit, work)
                guards = seen.union(*in_child)  # the controlling process finds something too: a death
                judged = judged_among(rows)[-1]
                if judged.verdict in RED:
                    reds.append(_red(unit, judged, rows, guards))
                elif judged.verdict is not Verdict.VERIFIED:
                    left.append(f"{name}: {judged.reason}")
        finally:
            isolation.close()
    return reds, left


def _noting(serve: Serve, seen: set[str]) -> Serve:
    """The work of a name, and then the guards that found something in it."""

    def work(name: str) -> Iterator[Message]:
        seen.clear()
        yield from serve(name)
        yield GuardsSeen(names=sorted(seen))

    return work


def _red(unit: Unit, judged: Judged, rows: Iterable[Row], guards: Iterable[str]) -> Red:
    checks = [row for row in rows if isinstance(row, Check)]
    lead = leading_check(checks)
    is_claim = isinstance(judged, ClaimResult)
    rule = (lead.rule if lead else "" if isinstance(judged, ClaimResult) else judged.rule) or judged.verdict.value
    cases = sum(check.cases or 0 for check in checks if check.failing)
    return Red(
        unit=unit.id,
        pattern=unit.pattern if isinstance(unit, Claim) else "",
        verdict=judged.verdict,
        stage=lead.stage if lead else "model",
        rule=rule,  # the dead break no rule
        guards=tuple(sorted(guards)),
        failing=sum(check.failing for check in checks) if is_claim else 1,
        cases=cases if isinstance(judged, ClaimResult) else judged.cases or 1,
        max_lsb=judged.max_lsb if isinstance(judged.max_lsb, float | int) else None,
        message=judged.reason[:300],
    )
