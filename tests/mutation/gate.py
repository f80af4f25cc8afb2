"""The gate: runs mutants through the suite like a vendor's backend, and records what the suite finds."""

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

from fx_quant_conformance.conformance.machine.child import Answer, Parent, Recipe
from fx_quant_conformance.conformance.machine.frames import Frame
from fx_quant_conformance.conformance.machine.workplace import Serve, Workplace, make_answer
from fx_quant_conformance.conformance.run.judge import make_server
from fx_quant_conformance.conformance.run.judging import rows_of
from fx_quant_conformance.conformance.run.opening import Opened, open_run
from fx_quant_conformance.conformance.run.options import Options
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.session import Run
from fx_quant_conformance.conformance.run.setup import Setup, make_request
from fx_quant_conformance.reports.codec import Message
from fx_quant_conformance.reports.results import leading_check
from fx_quant_conformance.reports.schema import Check, Judged, Measurement, ModelResult, Row
from fx_quant_conformance.reports.verdicts import FAULTY, Verdict
from tests.mutation.guards import OPEN, remove_guard, watch_guards
from tests.mutation.mutant import Mutant, owner_of

LIMIT = 20.0
"""Seconds for one claim."""
TOPIC = "guards"
"""Of the measurement in which a child process names the guards that found something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedUnit:
    """A claim or model whose verdict shows a fault, or that a fault of the flow leaves open."""

    unit: str
    pattern: str
    """The pattern of the claim; "" for a model."""
    verdict: Verdict
    stage: str
    rule: str
    """The rule of the leading check."""
    guards: tuple[str, ...]
    """The checks that found something."""
    failing: int
    """How many comparisons fail."""
    cases: int
    """How many comparisons there are."""
    max_lsb: float | None
    """The largest distance, if any."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantRun:
    """One mutant in one profile with one seed: the failures, and the number of claims and models."""

    mutant: str
    profile: str
    seed: int
    failures: tuple[FailedUnit, ...]
    units: int
    seconds: float
    blind: str = ""
    """The guard that was removed, or ""."""
    open: tuple[str, ...] = ()
    """The claims that are neither VERIFIED nor faulty: verdict and reason."""

    @property
    def is_killed(self) -> bool:
        """Whether the fault was found."""
        return bool(self.failures)

    @property
    def lead(self) -> FailedUnit:
        """The first of the worst failures."""
        return min(self.failures, key=lambda failure: failure.verdict.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A mutant run to make."""

    mutant: str
    profile: str
    seed: int = 0
    blind: str = ""
    units: tuple[str, ...] = ()
    """The only claims and models to run; none: all that the mutant names."""


def run_all(mutants: Sequence[Mutant], tasks: Sequence[Task], processes: int) -> Iterator[MutantRun]:
    """Run the tasks, in order, with this number of processes."""
    known = {mutant.name: mutant for mutant in mutants}
    if processes < 2 or len(tasks) < 2:
        yield from (run_mutant(known[task.mutant], task) for task in tasks)
        return
    with ProcessPoolExecutor(processes, get_context("fork"), _enter, (known,)) as pool:
        yield from pool.map(_work, tasks)


_KNOWN: dict[str, Mutant] = {}


def _enter(known: Mapping[str, Mutant]) -> None:
    _KNOWN.update(known)
    torch.set_num_threads(1)


def _work(task: Task) -> MutantRun:
    return run_mutant(_KNOWN[task.mutant], task)


def run_mutant(mutant: Mutant, task: Task) -> MutantRun:
    """Run a mutant through the suite, with isolated claims and small models, as in any run."""
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for target, value in mutant.patches:
            stack.enter_context(patch.object(*owner_of(target), value))
        if task.blind:
            stack.enter_context(remove_guard(task.blind))
        failures, undecided, units = list[FailedUnit](), list[str](), dict[str, Unit]()
        try:
            opened = open_run(_make_options(mutant, task), mutant.make())
            run = Run.of(Setup(options=opened.options, text=""), opened.make_outline())
            units = {name: unit for name, unit in run.units.items() if unit.kind != "measurement"}
            failures, undecided = _run_units(opened, run, units)
        except Exception as error:  # the mutant's fault: the other mutants go on
            undecided = [f"cannot be run: {type(error).__name__}: {error}"]
    return MutantRun(
        mutant=mutant.name,
        profile=task.profile,
        seed=task.seed,
        failures=tuple(failures),
        units=len(units),
        seconds=round(time.perf_counter() - started, 3),
        blind=task.blind,
        open=tuple(undecided),
    )


def _make_options(mutant: Mutant, task: Task) -> Options:
    return Options(
        backend=mutant.name,
        report_dir=Path(os.devnull),
        seed=task.seed,
        profile=task.profile,
        claims=task.units or (mutant.in_full if task.profile == "full" and mutant.in_full else mutant.claims),
        models=mutant.models,
        claim_timeout=LIMIT,
        no_waivers=True,
    )


def _run_units(opened: Opened, run: Run, units: Mapping[str, Unit]) -> tuple[list[FailedUnit], list[str]]:
    """Run every unit; return the failures, and the units whose verdict shows neither a fault nor that there is none."""
    failures, undecided, seen = list[FailedUnit](), list[str](), set[str]()
    serve = _add_guards(make_server(opened.make_bench(), opened.units), seen)

    def open_judge(parent: Parent) -> Answer:
        return make_answer(parent, serve)

    recipe = Recipe(open=open_judge, shares_memory=True)
    with watch_guards(seen), contextlib.closing(Workplace(recipe, limit=LIMIT, holds="the mutant")) as place:
        for name, unit in units.items():
            seen.clear()
            work = place.run(make_request(name))
            in_child = (each.values for each in work.messages if isinstance(each, Measurement) and each.topic == TOPIC)
            rows = rows_of(run, unit, work)
            guards = seen.union(*in_child)  # the controlling process also finds faults: deaths
            judged = [row for row in rows if isinstance(row, Judged)][-1]
            if judged.verdict in FAULTY or guards & OPEN:
                failures.append(_describe_failure(unit, judged, rows, guards))
            elif judged.verdict not in (Verdict.VERIFIED, Verdict.UNSHOWN):
                undecided.append(f"{name}: {judged.verdict}: {judged.reason}")
    return failures, undecided


def _add_guards(serve: Serve, seen: set[str]) -> Serve:
    """Return a function that also sends the guards that found something in a unit."""

    def serve_and_send(request: Frame) -> Iterator[Message]:
        seen.clear()
        yield from serve(request)
        yield Measurement(topic=TOPIC, subject=request.head["unit"], values=dict.fromkeys(sorted(seen), True))

    return serve_and_send


def _describe_failure(unit: Unit, judged: Judged, rows: Iterable[Row], guards: Iterable[str]) -> FailedUnit:
    checks = [row for row in rows if isinstance(row, Check)]
    lead = leading_check(checks)
    rule = (lead.rule if lead else judged.rule if isinstance(judged, ModelResult) else "") or judged.verdict.value
    cases = sum(check.cases or 0 for check in checks if check.failing)
    return FailedUnit(
        unit=unit.id,
        pattern=unit.pattern,
        verdict=judged.verdict,
        stage=lead.stage if lead else "model",
        rule=rule,  # a death breaks no rule
        guards=tuple(sorted(guards)),
        failing=sum(check.failing for check in checks) if unit.kind == "claim" else 1,
        cases=(judged.cases or 1) if isinstance(judged, ModelResult) else cases,
        max_lsb=judged.max_lsb if isinstance(judged.max_lsb, float | int) else None,
        message=judged.reason[:300],
    )
