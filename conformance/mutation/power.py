"""Detection power: what the trials of all mutants say together, as data and as tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from conformance.mutation.ablation import TRIED, Removal
from conformance.mutation.gate import MutantRun, Red
from conformance.mutation.mutant import Mutant
from reports.verdicts import Verdict

PROFILES = ("quick", "full")
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many of so many."""

    count: int
    of: int

    @property
    def share(self) -> float:
        """As a part of 1; of none, all."""
        return self.count / self.of if self.of else 1.0

    def __str__(self) -> str:
        return f"{self.count} of {self.of} ({100 * self.share:.1f} %)"


@dataclass(frozen=True, kw_only=True)
class Power:
    """All trials of a gate: of faulty mutants one in each profile, of honest ones in each profile with each seed.

    ``is_whole``: the mutants are all that the suite has, so that each check should be needed by one.
    """

    mutants: tuple[Mutant, ...]
    trials: tuple[MutantRun, ...]
    removals: tuple[Removal, ...] = ()
    is_whole: bool = False

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profiles that were run."""
        return tuple(profile for profile in PROFILES if any(each.profile == profile for each in self.trials))

    @property
    def faulty(self) -> tuple[Mutant, ...]:
        """The mutants that are to be killed."""
        return tuple(mutant for mutant in self.mutants if not mutant.is_honest)

    def of(self, mutant: Mutant, profile: str) -> MutantRun | None:
        """The first trial of a mutant in a profile; None: it was not made."""
        found = (each for each in self.trials if (each.mutant, each.profile) == (mutant.name, profile))
        return next(found, None)

    def killed(self, profile: str) -> Rate:
        """How many faulty mutants were found."""
        made = [trial for mutant in self.faulty if (trial := self.of(mutant, profile))]
        return Rate(count=sum(trial.is_killed for trial in made), of=len(made))

    def blamed(self, profile: str) -> Rate:
        """How many of the mutants that were found are blamed on a rule that they name."""
        made = [(mutant, trial) for mutant in self.faulty if (trial := self.of(mutant, profile)) and trial.is_killed]
        return Rate(count=sum(is_right(mutant, trial) for mutant, trial in made), of=len(made))

    @property
    def refuted(self) -> tuple[MutantRun, ...]:
        """Trials of honest variants in which something is not VERIFIED."""
        honest = {mutant.name for mutant in self.mutants if mutant.is_honest}
        return tuple(trial for trial in self.trials if trial.mutant in honest and (trial.reds or trial.open))

    @property
    def honest(self) -> Rate:
        """In how many trials of honest variants everything is VERIFIED."""
        names = {mutant.name for mutant in self.mutants if mutant.is_honest}
        made = sum(trial.mutant in names for trial in self.trials)
        return Rate(count=made - len(self.refuted), of=made)

    @property
    def passes(self) -> bool:
        """Whether the gate is open: all killed by full, nine in ten by quick and blamed rightly, no honest one red."""
        needed = {"full": 1.0, "quick": 0.9}
        rates = [(self.killed(profile), needed[profile]) for profile in self.profiles]
        rates += [(self.blamed(profile), 0.9) for profile in self.profiles]
        return all(rate.share >= least for rate, least in rates) and not self.refuted and not self.idle

    @property
    def idle(self) -> tuple[str, ...]:
        """Checks that no mutant needs, and that nothing explains."""
        return tuple(each.guard for each in self.removals if self.is_whole and not each.alone and not each.why)

    def smallest(self) -> dict[str, tuple[float | None, float | None]]:
        """By op the smallest relative error of a scale that was found, and the smallest error of an output, in LSB."""
        sizes, errors = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        known = {mutant.name: mutant for mutant in self.faulty}
        for trial in self.trials:
            for red in trial.reds if trial.profile == self.profiles[-1] and trial.mutant in known else ():
                size = known[trial.mutant].size
                if not red.pattern:
                    continue
                if size is not None:
                    sizes[red.pattern].append(size)
                if red.max_lsb is not None and red.guards == ("numerics.distance",):
                    errors[red.pattern].append(red.max_lsb)
        return {
            name: (min(sizes[name], default=None), min(errors[name], default=None))
            for name in sorted({*sizes, *errors})
        }


def is_right(mutant: Mutant, trial: MutantRun) -> bool:
    """Whether most of what is red is so under a rule that the mutant names."""
    right = sum(red.rule in mutant.rules for red in trial.reds)
    return 2 * right > len(trial.reds)


# -- tables -----------------------------------------------------------------------------------------------------------


def mutants_table(power: Power) -> list[list[str]]:
    """A row for each mutant: class, name, what each profile found, by which check, under which rule, in how many."""
    rows = []
    for mutant in power.mutants:
        row = [mutant.group, mutant.name]
        for profile in power.profiles:
            trial = power.of(mutant, profile)
            row += [_verdict(trial), *_told(mutant, trial)] if profile == power.profiles[-1] else [_verdict(trial)]
        rows.append(row)
    return rows


def mutants_header(power: Power) -> list[str]:
    """The names of its columns."""
    last = power.profiles[-1]
    return ["class", "mutant", *power.profiles[:-1], last, "rule", "blame", "checks", "claims", "comparisons"]


def _verdict(trial: MutantRun | None) -> str:
    if trial is None:
        return "not run"
    return trial.lead.verdict.value if trial.reds else "UNEXERCISED" if trial.open else "VERIFIED"


def _told(mutant: Mutant, trial: MutantRun | None) -> list[str]:
    if trial is None or not trial.reds:
        return ["", "" if mutant.is_honest else "survived", "", "", ""]
    rules = ", ".join(dict.fromkeys(red.rule for red in trial.reds))
    blame = "false alarm" if mutant.is_honest else "right" if is_right(mutant, trial) else "wrong"
    guards = ", ".join(sorted({guard for red in trial.reds for guard in red.guards}))
    return [rules, blame, guards, f"{len(trial.reds)} of {trial.units}", _examples(trial.reds)]


def _examples(reds: Iterable[Red]) -> str:
    """In how many comparisons, of those that were made of what is red."""
    reds = tuple(reds)
    failing, cases = sum(red.failing for red in reds), sum(red.cases for red in reds)
    return f"{failing} of {cases}" if cases else ""


def classes_table(power: Power) -> list[tuple[str, int, *tuple[int, ...]]]:
    """A row for each class of faults: how many mutants, how many each profile kills."""
    groups = dict.fromkeys(mutant.group for mutant in power.faulty)
    rows: list[tuple[str, int, *tuple[int, ...]]] = []
    for group in groups:
        among = [mutant for mutant in power.faulty if mutant.group == group]
        kills = [sum(bool((t := power.of(m, profile)) and t.is_killed) for m in among) for profile in power.profiles]
        rows.append((group, len(among), *kills))
    return rows


def ops_table(power: Power) -> list[list[str]]:
    """A row for each op: the smallest error of a scale and the smallest wrong output that were found."""
    return [
        [name, _power_of_two(size), "" if error is None else f"{error:.4g}"]
        for name, (size, error) in power.smallest().items()
    ]


def _power_of_two(size: float | None) -> str:
    return "" if size is None else f"2^{size.hex().partition('p')[2]}"


def guards_table(power: Power) -> list[list[object]]:
    """A row for each check: how many mutants it sees, and what survives where it is taken away."""
    return [
        [each.guard, each.sees, len(each.alone), "; ".join(each.alone[:3]) or each.why]
        for each in power.removals
    ]  # fmt: skip


def summary(power: Power) -> str:
    """What the gate says, in a few lines."""
    lines = [f"killed by {profile}: {power.killed(profile)}; blamed rightly: {power.blamed(profile)}"
             for profile in power.profiles]  # fmt: skip
    seeds = len({trial.seed for trial in power.trials})
    lines.append(f"honest variants, runs without a false alarm: {power.honest}, seeds: {seeds}")
    if power.removals and power.is_whole:
        lines.append(f"checks whose removal lets nothing survive, unexplained: {', '.join(power.idle) or 'none'}")
    lines.append("the gate passes" if power.passes else "THE GATE FAILS")
    return "\n".join(lines)


def terminal(power: Power) -> str:
    """All tables, for reading in a terminal."""
    parts = [
        tabulate(_short(mutants_table(power)), mutants_header(power)),
        tabulate(ops_table(power), ["op", "scale off by", "smallest wrong output, LSB"]),
    ]
    if power.removals:
        parts.append(tabulate(guards_table(power), ["check", "sees", "alone", "what only it finds"]))
    return "\n\n".join([*parts, summary(power)])


def _short(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[cell if len(cell) < 48 else f"{cell[:45]}..." for cell in row] for row in rows]


# -- as data ----------------------------------------------------------------------------------------------------------


def as_data(power: Power, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything as plain builtins: for the report, and for whoever wants other tables."""
    return {
        "schema": SCHEMA,
        **facts,
        "mutants": [
            {"name": each.name, "class": each.group, "rules": list(each.rules), "size": each.size}
            for each in power.mutants
        ],
        "trials": [_trial(power, trial) for trial in power.trials],
        "checks": [asdict(each) for each in power.removals],
        "passes": power.passes,
    }  # fmt: skip


def _trial(power: Power, trial: MutantRun) -> dict[str, Any]:
    mutant = next(each for each in power.mutants if each.name == trial.mutant)
    right = is_right(mutant, trial) if trial.reds else None
    return json.loads(json.dumps(asdict(trial))) | {"killed": trial.is_killed, "blamed_rightly": right}  # type: ignore[no-any-return]


def in_short(power: Power) -> dict[str, dict[str, int]]:
    """What every run's header says of the suite: class of faults → how many, and how many each profile finds."""
    columns = ("faults", *power.profiles)
    table = {name: dict(zip(columns, counts, strict=True)) for name, *counts in classes_table(power)}
    every = {column: sum(row[column] for row in table.values()) for column in columns}
    honest = {"runs": power.honest.of, "without a false alarm": power.honest.count}
    return {"every class": every, **table, "honest variants": honest}


def trials_of(data: Mapping[str, Any]) -> tuple[MutantRun, ...]:
    """Read the trials of ``as_data`` again. Raises KeyError or TypeError for what it did not write."""
    return tuple(_read(row) for row in data["trials"])


def _read(row: Mapping[str, Any]) -> MutantRun:
    made = {key: value for key, value in row.items() if key not in ("killed", "blamed_rightly")}
    reds = (red | {"verdict": Verdict(red["verdict"]), "guards": tuple(red["guards"])} for red in row["reds"])
    return MutantRun(**made | {"reds": tuple(Red(**red) for red in reds), "open": tuple(row["open"])})


def document(power: Power, facts: Mapping[str, Any]) -> str:
    """docs/detection-power.md: all of it but the times, which differ from run to run."""
    by_verdict = defaultdict[Verdict, int](int)
    for mutant in power.faulty:
        if (trial := power.of(mutant, power.profiles[-1])) and trial.reds:
            by_verdict[trial.lead.verdict] += 1
    verdicts = ", ".join(f"{verdict.value} {count}" for verdict, count in by_verdict.items())
    return f"""{HEAD.format(**facts)}
## In short

{_bullets(summary(power))}
- worst verdict of each mutant that is found ({power.profiles[-1]}): {verdicts}

{tabulate(classes_table(power), ["class", "mutants", *power.profiles], tablefmt="github")}

## The smallest fault that is found, op by op

{OPS}
{tabulate(ops_table(power), ["op", "scale off by", "smallest wrong output, LSB"], tablefmt="github")}

## Which check finds what

{CHECKS.format(tried=TRIED)}
{tabulate(guards_table(power), GUARDS_HEADER, tablefmt="github")}

## Mutants

{MUTANTS}
{tabulate(mutants_table(power), mutants_header(power), tablefmt="github")}
"""


def _bullets(text: str) -> str:
    return "\n".join(f"- {line}" for line in text.splitlines())


HEAD = """# Detection power

Generated by `python -m conformance.mutation --write-doc` (torch {torch}, {cpu}): do not edit. Backends with one seeded
fault each are taken through the suite as a vendor's is; a fault is *found* when some claim is not VERIFIED (QUALITY
counts: `--strict` refuses it). Each mutant names the rules of which one should go red; it is *blamed rightly* when most
of what is red is so under these. Honest variants differ within the rules, and nothing of theirs may be red.
"""
OPS = """Of an error of the scale by one part in 2^n, the smallest that some claim of the op shows; and the smallest
largest error of a claim that is red, in steps of the output (a correct rounding is within 0.5).
"""
GUARDS_HEADER = ("check", "mutants that it sees", "only it", "such as, or why it is kept")
CHECKS = """*Only it*: how many mutants survive where this check alone is taken away, of those of which whatever is red
is red by this check; {tried} of them are tried, and {tried} more if none of these does.
"""
MUTANTS = """*claims*: how many claims and models are red; *comparisons*: in how many of those made of them.
"""
