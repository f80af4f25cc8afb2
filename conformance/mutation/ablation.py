"""Ablation: each check of the suite taken away, and the mutants that then survive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conformance.machine.guard import GUARDS
from conformance.mutation.gate import MutantRun, Task, run_all
from conformance.mutation.mutant import Mutant

TRIED = 3
"""How many candidates are tried of each check, and so many more if none of them survives."""

WHY: Mapping[str, str] = {
    "config.modules": "prepare and convert refuse the same, at the first model; it names the part of the entry, "
    "without one",
    "prepare.check_prepared_dynamic": "what it finds shows in the reference model as well; it names the rule of "
    "prepare, where the fault is",
    "prepare.check_unobserved": "for a size to be observed OBS-03 and OBS-10 would both have to fail in the flow; "
    "and it leaves open what can never match, which no other check does",
}
"""Checks that find nothing alone, and why they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A check taken away: how many mutants it sees, which survive without it, and why it is kept if none does."""

    guard: str
    sees: int
    alone: tuple[str, ...]
    why: str = ""


def ablate(mutants: Sequence[Mutant], trials: Iterable[MutantRun], processes: int) -> Iterator[Removal]:
    """Take each check away in turn, and try again what it may be the only one to find.

    One run does not tell: a case in which a stage finds a fault goes no further.
    """
    killed = [trial for trial in trials if trial.is_killed]
    candidates = {name: _candidates(name, killed) for name in GUARDS}
    alone = dict.fromkeys(candidates, tuple[str, ...]())
    for start in (0, TRIED):
        tasks = [Task(mutant=trial.mutant, profile=trial.profile, seed=trial.seed, blind=name,
                      units=tuple(red.unit for red in trial.reds))
                 for name, found in candidates.items() if not alone[name]
                 for trial in found[start : start + TRIED]]  # fmt: skip
        for trial in run_all(mutants, tasks, processes):
            if not trial.is_killed:
                alone[trial.blind] += (trial.mutant,)
    for name, mutants_alone in alone.items():
        sees = sum(any(name in red.guards for red in trial.reds) for trial in killed)
        yield Removal(guard=name, sees=sees, alone=mutants_alone, why=WHY.get(name, ""))


def _candidates(guard: str, killed: Iterable[MutantRun]) -> list[MutantRun]:
    """Those of which the check saw whatever is red; first those that fewest other checks saw."""

    def seen(trial: MutantRun) -> tuple[int, int, str]:
        return len({name for red in trial.reds for name in red.guards}), len(trial.reds), trial.mutant

    found = [trial for trial in killed if all(guard in red.guards for red in trial.reds)]
    return sorted(found, key=seen)
