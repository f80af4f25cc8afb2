"""``python -m tests.mutation``, in a checkout: run the gate and report its result.

Exit status: 0 the gate passes, 1 it does not, 4 usage error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from fx_quant_conformance.conformance.machine.environment import DETECTION, describe_environment
from fx_quant_conformance.conformance.machine.release import ROOT
from tests.mutants.mutants import MUTANTS
from tests.mutation.ablation import ablate
from tests.mutation.gate import MutantRun, Task, run_all
from tests.mutation.mutant import Mutant
from tests.mutation.power import PROFILES, Power, as_data, as_header, render_document, render_terminal, runs_of

DOCUMENT = ROOT / "docs" / "detection-power.md"
USAGE = 4


class GateError(Exception):
    """An option does not lead to mutants or their runs; the message is one line."""


def main(arguments: Sequence[str]) -> int:
    """Run the gate. Returns the exit status."""
    options = _make_parser().parse_args(arguments)
    try:
        mutants = _select(options.mutant)
        runs = _read_earlier(options.earlier, [each for each in MUTANTS if each not in mutants])
        if options.write_doc:
            _demand_whole(options, {run.mutant for run in runs} | {mutant.name for mutant in mutants})
    except GateError as error:
        print(error, file=sys.stderr)
        return USAGE
    torch.set_num_threads(1)
    tasks = list(_make_tasks(mutants, options.profile or PROFILES, options.seeds))
    for number, run in enumerate(run_all(mutants, tasks, options.processes), 1):
        runs.append(run)
        print(f"{number}/{len(tasks)} {_format_run(run)}", file=sys.stderr, flush=True)
    names = {run.mutant for run in runs}
    measured = tuple(mutant for mutant in MUTANTS if mutant.name in names)
    last = [run for run in runs if run.profile == runs[-1].profile and run.seed == 0]
    removals = () if options.no_ablation else tuple(ablate(measured, last, options.processes))
    power = Power(mutants=measured, runs=tuple(runs), removals=removals, is_whole=len(measured) == len(MUTANTS))
    _write(power, options)
    print(render_terminal(power))
    return int(not power.passes)


def _select(globs: Sequence[str]) -> tuple[Mutant, ...]:
    """Return the mutants whose name or class matches. Raises GateError if none does."""
    matches = tuple(
        mutant
        for mutant in MUTANTS
        if not globs or any(fnmatchcase(each, glob) for glob in globs for each in (mutant.name, mutant.group))
    )
    if not matches:
        raise GateError(f"--mutant: {', '.join(globs)} matches no mutant")
    return matches


def _read_earlier(path: str | None, mutants: Sequence[Mutant]) -> list[MutantRun]:
    """Return the runs of these mutants in the file of an earlier gate. Raises GateError for any other file."""
    if path is None:
        return []
    try:
        runs = runs_of(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(f"--earlier: {path} cannot be read: {type(error).__name__}: {error}") from error
    names = {mutant.name for mutant in mutants}
    return [run for run in runs if run.mutant in names]


def _demand_whole(options: argparse.Namespace, names: Collection[str]) -> None:
    """Raise GateError if a run of these mutants is not what the document says: all of them, in all profiles."""
    missing = len({mutant.name for mutant in MUTANTS} - set(names))
    if missing:
        raise GateError(f"--write-doc: {missing} mutants would be missing; leave out --mutant, or give --earlier")
    if options.profile or options.no_ablation:
        raise GateError("--write-doc: the document has all profiles, with ablation; leave out --profile, --no-ablation")


def _make_tasks(mutants: Sequence[Mutant], profiles: Sequence[str], seeds: int) -> Iterator[Task]:
    """Yield a task for each mutant in each profile; for honest variants, with every seed."""
    for profile in profiles:
        for mutant in mutants:
            for seed in range(seeds if mutant.is_honest else 1):
                yield Task(mutant=mutant.name, profile=profile, seed=seed)


def _format_run(run: MutantRun) -> str:
    result = f"{run.lead.verdict.value} by {run.lead.rule}" if run.is_killed else "nothing found"
    counts = f"{len(run.failures)} of {run.units}, {run.seconds:.1f} s"
    return f"{run.profile} seed {run.seed} {run.mutant}: {result}, {counts}"


def _write(power: Power, options: argparse.Namespace) -> None:
    facts = describe_environment(ROOT)
    folder = Path(options.report_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_data(power, facts), indent=1, ensure_ascii=False)
    (folder / "detection-power.json").write_text(text + "\n", encoding="utf-8")
    if options.write_doc:
        DOCUMENT.write_text(render_document(power, facts), encoding="utf-8")
        DETECTION.write_text(json.dumps(as_header(power), indent=1) + "\n", encoding="utf-8")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Measure which seeded faults the suite finds."
    )
    add = parser.add_argument
    add("--mutant", action="append", default=[], metavar="GLOB", help="only these names or classes (repeatable)")
    add("--profile", action="append", choices=PROFILES, help="only this profile (repeatable; default: quick and full)")
    add("--seeds", type=int, default=1, metavar="N", help="seeds of each honest variant (default: 1)")
    add("-n", "--processes", type=int, default=2, metavar="N", help="how many mutants at a time (default: 2)")
    add("--no-ablation", action="store_true", help="do not take each check away in turn")
    add("--earlier", metavar="JSON", help="an earlier detection-power.json, for the mutants that --mutant leaves out")
    add("--report-dir", default=str(Path("build", "mutation")), metavar="DIR", help="where detection-power.json goes")
    add("--write-doc", action="store_true", help="write docs/detection-power.md, and what headers of results say")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
