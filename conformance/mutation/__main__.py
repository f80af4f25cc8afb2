"""``python -m conformance.mutation``: run the gate and say what it found.

Exit status: 0 the gate passes, 1 it does not, 4 usage error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from conformance.machine.environment import DETECTION, environment_facts
from conformance.mutation.ablation import ablate
from conformance.mutation.gate import MutantRun, Task, run_all
from conformance.mutation.mutant import SHIPPED, Mutant, MutantError, load_mutants
from conformance.mutation.power import PROFILES, Power, as_data, document, in_short, terminal, trials_of
from conformance.run.options import ROOT

DOCUMENT = ROOT / "docs" / "detection-power.md"
USAGE = 4


def main(arguments: Sequence[str]) -> int:
    """Run the gate. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        every = load_mutants(options.mutants)
        mutants = _selected(every, options.mutant)
        trials = _earlier(options.earlier, [each for each in every if each not in mutants])
    except MutantError as error:
        print(error, file=sys.stderr)
        return USAGE
    torch.set_num_threads(1)
    tasks = list(_tasks(mutants, options.profile or PROFILES, options.seeds))
    for number, trial in enumerate(run_all(mutants, tasks, options.processes), 1):
        trials.append(trial)
        print(f"{number}/{len(tasks)} {_line(trial)}", file=sys.stderr, flush=True)
    known = {trial.mutant for trial in trials}
    measured = tuple(mutant for mutant in every if mutant.name in known)
    last = [trial for trial in trials if trial.profile == trials[-1].profile and trial.seed == 0]
    removals = () if options.no_ablation else tuple(ablate(measured, last, options.processes))
    is_whole = options.mutants == SHIPPED and len(measured) == len(every)
    power = Power(mutants=measured, trials=tuple(trials), removals=removals, is_whole=is_whole)
    _write(power, options)
    print(terminal(power))
    return int(not power.passes)


def _selected(mutants: Sequence[Mutant], globs: Sequence[str]) -> tuple[Mutant, ...]:
    """The mutants whose name or class matches. Raises MutantError where none does."""
    found = tuple(
        mutant for mutant in mutants
        if not globs or any(fnmatchcase(each, glob) for glob in globs for each in (mutant.name, mutant.group))
    )  # fmt: skip
    if not found:
        raise MutantError(f"--mutant: {', '.join(globs)} matches no mutant")
    return found


def _earlier(path: str | None, mutants: Sequence[Mutant]) -> list[MutantRun]:
    """The trials that an earlier run made of these mutants. Raises MutantError for a file that none has written."""
    if path is None:
        return []
    try:
        found = trials_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MutantError(f"--earlier: {path} cannot be read: {type(error).__name__}: {error}") from error
    names = {mutant.name for mutant in mutants}
    return [trial for trial in found if trial.mutant in names]


def _tasks(mutants: Sequence[Mutant], profiles: Sequence[str], seeds: int) -> Iterator[Task]:
    """Each mutant in each profile; honest variants with every seed."""
    for profile in profiles:
        for mutant in mutants:
            for seed in range(seeds if mutant.is_honest else 1):
                yield Task(mutant=mutant.name, profile=profile, seed=seed)


def _line(trial: MutantRun) -> str:
    found = f"{trial.lead.verdict.value} by {trial.lead.rule}" if trial.is_killed else "nothing found"
    counts = f"{len(trial.reds)} of {trial.units}, {trial.seconds:.1f} s"
    return f"{trial.profile} seed {trial.seed} {trial.mutant}: {found}, {counts}"


def _write(power: Power, options: argparse.Namespace) -> None:
    facts = environment_facts(ROOT)
    folder = Path(options.report_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_data(power, facts), indent=1, ensure_ascii=False)
    (folder / "detection-power.json").write_text(text + "\n", encoding="utf-8")
    if options.write_doc:
        DOCUMENT.write_text(document(power, facts), encoding="utf-8")
        DETECTION.write_text(json.dumps(in_short(power), indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.mutation", description="Measure which seeded faults the suite finds."
    )
    add = parser.add_argument
    add("--mutants", default=SHIPPED, metavar="MODULE:NAME", help="a tuple of Mutant (default: those of tests/mutants)")
    add("--mutant", action="append", default=[], metavar="GLOB", help="only these names or classes (repeatable)")
    add("--profile", action="append", choices=PROFILES, help="only this profile (repeatable; default: quick and full)")
    add("--seeds", type=int, default=1, metavar="N", help="seeds of each honest variant (default: 1)")
    add("-n", "--processes", type=int, default=2, metavar="N", help="how many mutants at a time (default: 2)")
    add("--no-ablation", action="store_true", help="do not take each check away in turn")
    add("--earlier", metavar="JSON", help="an earlier detection-power.json, for the mutants that --mutant leaves out")
    add("--report-dir", default=str(ROOT / "build" / "mutation"), metavar="DIR", help="where detection-power.json goes")
    add("--write-doc", action="store_true", help="write docs/detection-power.md, and in short what headers say")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
