"""The gate: mutants taken through the suite as a vendor's backend is, and what is found of each."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch

from conformance.claims.claim import Claim
from conformance.machine.isolation import Forked, Serve
from conformance.mutation.guards import owner_of, watched, without
from conformance.mutation.mutant import Mutant
from conformance.run.exercise import SHARES, server
from conformance.run.judging import unit_rows
from conformance.run.options import Options
from conformance.run.session import Run, Unit, open_run
from reports.codec import PlainRow
from reports.results import Verdict, decode, leading_check
from reports.schema import Check

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
class Trial:
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


def run_all(mutants: Sequence[Mutant], tasks: Sequence[Task], processes: int) -> Iterator[Trial]:
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


def _work(task: Task) -> Trial:
    return trial(_KNOWN[task.mutant], task)


def trial(mutant: Mutant, task: Task) -> Trial:
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
            units = {name: unit for name, unit in run.units.items() if not name.startswith("fact/")}
            found, left = _found(run, units, task.profile)
        except Exception as error:  # of the mutant's own making: the other mutants go on
            left = [f"cannot be run: {type(error).__name__}: {error}"]
    return Trial(
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


def _found(run: Run, units: Mapping[str, Unit], profile: str) -> tuple[list[Red], list[str]]:
    """Run every unit; return what is red, and what could not be exercised."""
    reds, left = list[Red](), list[str]()
    noted = set[str]()
    with watched(noted):
        isolation = Forked(_noting(server(run.workbench(), units), noted), limit=LIMIT, share=SHARES[profile])
        try:
            for name, unit in units.items():
                noted.clear()
                outcome = isolation.run(name)
                guards = noted.union(*(row["guards"] for row in outcome.rows if "guards" in row))
                outcome = replace(outcome, rows=tuple(row for row in outcome.rows if "guards" not in row))
                rows = unit_rows(run, unit, outcome)
                guards |= noted  # what the controlling process finds: a death
                verdict = Verdict(rows[-1]["verdict"])
                if verdict in RED:
                    reds.append(_red(unit, rows, guards))
                elif verdict is not Verdict.VERIFIED:
                    left.append(f"{name}: {rows[-1].get('reason') or rows[-1].get('message')}")
        finally:
            isolation.close()
    return reds, left


def _noting(serve: Serve, noted: set[str]) -> Serve:
    """The work of a name, and the guards that found something in it."""

    def work(name: str) -> Iterator[PlainRow]:
        noted.clear()
        yield from serve(name)
        yield {"guards": sorted(noted)}

    return work


def _red(unit: Unit, rows: Iterable[PlainRow], guards: Iterable[str]) -> Red:
    *_, last = rows
    checks = [check for check in map(decode, rows) if isinstance(check, Check)]
    lead = leading_check(checks)
    is_claim = isinstance(unit, Claim)
    rule = (lead.rule if lead else str(last["evidence"].get("rule", ""))) or last["verdict"]  # the dead break no rule
    return Red(
        unit=unit.id,
        pattern=unit.pattern if isinstance(unit, Claim) else "",
        verdict=Verdict(last["verdict"]),
        stage=lead.stage if lead else "model",
        rule=rule,
        guards=tuple(sorted(guards)),
        failing=sum(check.failing for check in checks) if is_claim else 1,
        cases=sum(check.cases or 0 for check in checks if check.failing) if is_claim else last["cases"] or 1,
        max_lsb=last["max_lsb"] if isinstance(last["max_lsb"], float | int) else None,
        message=str(last["reason" if is_claim else "message"])[:300],
    )
