"""Ablation: remove each check of the suite in turn, and find the mutants that then survive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fx_quant_conformance.conformance.machine.guard import GUARDS
from tests.mutation.gate import MutantRun, Task, run_all
from tests.mutation.mutant import Mutant

CANDIDATES = 3
"""Number of mutants that are run without each check; as many again if none of them survives."""

WHY: Mapping[str, str] = {
    "config.modules": "prepare and convert refuse the same, at the first model; it names the part of the entry, "
    "without one",
    "invariance.repetition": "a run that differs from the one before does so in another layout or batch as well; it "
    "says that nothing was changed",
    "invariance.models": "in full a claim's other cases are models of its structure as well; in quick it is what sees "
    "the fault in most claims",
    "models.check_repeats": "it finds no fault: it leaves a model open whose results depend on earlier runs, which "
    "others would refute",
    "prepare.check_prepared_dynamic": "what it finds shows in the reference model as well; it names the rule of "
    "prepare, where the fault is",
    "prepare.check_unobserved": "for a size to be observed OBS-03 and OBS-10 would both have to fail in the flow; "
    "and it leaves open what can never match, which no other check does",
}
"""Checks without which every mutant is still found, and why they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A removed check: how many mutants it sees, which of them survive without it, and why it is kept if none does."""

    guard: str
    sees: int
    alone: tuple[str, ...]
    why: str = ""


def ablate(mutants: Sequence[Mutant], runs: Iterable[MutantRun], processes: int) -> Iterator[Removal]:
    """Remove each check in turn, and run again the mutants that it may be the only one to find.

    The first run does not show which: a case in which a stage finds a fault goes no further.
    """
    killed = [run for run in runs if run.is_killed]
    candidates = {name: _candidates(name, killed) for name in GUARDS}
    survivors = dict.fromkeys(candidates, tuple[str, ...]())
    for start in (0, CANDIDATES):
        tasks = [
            Task(
                mutant=run.mutant,
                profile=run.profile,
                seed=run.seed,
                blind=name,
                units=tuple(failure.unit for failure in run.failures),
            )
            for name, ranked in candidates.items()
            if not survivors[name]
            for run in ranked[start : start + CANDIDATES]
        ]
        for run in run_all(mutants, tasks, processes):
            if not run.is_killed:
                survivors[run.blind] += (run.mutant,)
    for name, names in survivors.items():
        sees = sum(any(name in failure.guards for failure in run.failures) for run in killed)
        yield Removal(guard=name, sees=sees, alone=names, why=WHY.get(name, ""))


def _candidates(guard: str, killed: Iterable[MutantRun]) -> list[MutantRun]:
    """Return the runs in which the check saw every failure; first those that the fewest checks saw."""

    def rank(run: MutantRun) -> tuple[int, int, str]:
        return len({name for failure in run.failures for name in failure.guards}), len(run.failures), run.mutant

    return sorted((run for run in killed if all(guard in failure.guards for failure in run.failures)), key=rank)
