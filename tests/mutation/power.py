"""Detection power: what all mutant runs show together, as data, as tables, and in short docs/detection-power.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from fx_quant_conformance.reports.verdicts import Verdict
from tests.mutation.ablation import Removal
from tests.mutation.gate import FailedUnit, MutantRun
from tests.mutation.mutant import Mutant

PROFILES = ("quick", "full")
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A count out of a total."""

    count: int
    of: int

    @property
    def share(self) -> float:
        """The count as a part of 1; 1 for a total of 0."""
        return self.count / self.of if self.of else 1.0

    def __str__(self) -> str:
        return f"{self.count} of {self.of} ({100 * self.share:.1f} %)"


@dataclass(frozen=True, kw_only=True)
class Power:
    """All runs of a gate: of faulty mutants one in each profile, of honest ones in each profile with each seed."""

    mutants: tuple[Mutant, ...]
    runs: tuple[MutantRun, ...]
    removals: tuple[Removal, ...] = ()
    is_whole: bool = False
    """Whether the mutants are all that the suite has, so that each check should be needed by one."""

    @property
    def profiles(self) -> tuple[str, ...]:
        """The profiles that were run."""
        return tuple(profile for profile in PROFILES if any(run.profile == profile for run in self.runs))

    @property
    def faulty(self) -> tuple[Mutant, ...]:
        """The mutants that must be killed."""
        return tuple(mutant for mutant in self.mutants if not mutant.is_honest)

    def run_of(self, mutant: Mutant, profile: str) -> MutantRun | None:
        """Return the first run of a mutant in a profile; None: it was not run."""
        return next((run for run in self.runs if (run.mutant, run.profile) == (mutant.name, profile)), None)

    def faulty_runs(self, profile: str) -> list[tuple[Mutant, MutantRun]]:
        """Return each faulty mutant that was run in a profile, with its run."""
        return [(mutant, run) for mutant in self.faulty if (run := self.run_of(mutant, profile))]

    def count_killed(self, profile: str) -> Rate:
        """Return how many faulty mutants were found."""
        runs = self.faulty_runs(profile)
        return Rate(count=sum(run.is_killed for _, run in runs), of=len(runs))

    def count_blamed(self, profile: str) -> Rate:
        """Return how many of the mutants that were found are blamed on a rule that they name."""
        killed = [(mutant, run) for mutant, run in self.faulty_runs(profile) if run.is_killed]
        return Rate(count=sum(is_right(mutant, run) for mutant, run in killed), of=len(killed))

    @property
    def honest(self) -> Rate:
        """In how many runs of honest variants everything is VERIFIED."""
        names = {mutant.name for mutant in self.mutants if mutant.is_honest}
        runs = [run for run in self.runs if run.mutant in names]
        return Rate(count=sum(not run.failures and not run.open for run in runs), of=len(runs))

    @property
    def passes(self) -> bool:
        """Whether full kills all and quick nine in ten, nine in ten are blamed rightly, and no honest variant fails."""
        needed = {"full": 1.0, "quick": 0.9}
        rates = [(self.count_killed(profile), needed[profile]) for profile in self.profiles]
        rates += [(self.count_blamed(profile), 0.9) for profile in self.profiles]
        return all(rate.share >= least for rate, least in (*rates, (self.honest, 1.0))) and not self.idle

    @property
    def idle(self) -> tuple[str, ...]:
        """Checks that no mutant needs, and that nothing explains."""
        return tuple(each.guard for each in self.removals if self.is_whole and not each.alone and not each.why)

    def find_smallest(self) -> dict[str, tuple[float | None, float | None]]:
        """Return by op the smallest relative error of a scale that was found, and the smallest output error, in LSB."""
        sizes, errors = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        size_of = {mutant.name: mutant.size for mutant in self.faulty}
        last = [run for run in self.runs if run.profile == self.profiles[-1] and run.mutant in size_of]
        for size, failure in ((size_of[run.mutant], failure) for run in last for failure in run.failures):
            if failure.pattern and size is not None:
                sizes[failure.pattern].append(size)
            if failure.pattern and failure.max_lsb is not None and failure.guards == ("numerics.distance",):
                errors[failure.pattern].append(failure.max_lsb)
        return {
            name: (min(sizes[name], default=None), min(errors[name], default=None))
            for name in sorted({*sizes, *errors})
        }


def is_right(mutant: Mutant, run: MutantRun) -> bool:
    """Tell whether most failures are under a rule that the mutant names."""
    return 2 * sum(failure.rule in mutant.rules for failure in run.failures) > len(run.failures)


# -- tables -----------------------------------------------------------------------------------------------------------


def tabulate_mutants(power: Power) -> list[list[str]]:
    """Return a row for each mutant: class, name, each profile's verdict, and what the last profile found."""
    rows = []
    for mutant in power.mutants:
        runs = [power.run_of(mutant, profile) for profile in power.profiles]
        rows.append([mutant.group, mutant.name, *map(_verdict_of, runs), *_format_run(mutant, runs[-1])])
    return rows


def name_columns(power: Power) -> list[str]:
    """Return the names of its columns."""
    return ["class", "mutant", *power.profiles, "rule", "blame", "checks", "claims", "comparisons"]


def _verdict_of(run: MutantRun | None) -> str:
    if run is None:
        return "not run"
    return run.lead.verdict.value if run.failures else "undecided" if run.open else "VERIFIED"


def _format_run(mutant: Mutant, run: MutantRun | None) -> list[str]:
    """Return the rules, the blame, the checks, and the numbers of failing units and comparisons."""
    if run is None or not run.failures:
        return ["", "" if mutant.is_honest else "survived", "", "", ""]
    rules = ", ".join(dict.fromkeys(failure.rule for failure in run.failures))
    blame = "false alarm" if mutant.is_honest else "right" if is_right(mutant, run) else "wrong"
    guards = ", ".join(sorted({guard for failure in run.failures for guard in failure.guards}))
    failing, cases = (sum(getattr(failure, name) for failure in run.failures) for name in ("failing", "cases"))
    comparisons = f"{failing} of {cases}" if cases else ""
    return [rules, blame, guards, f"{len(run.failures)} of {run.units}", comparisons]


def tabulate_classes(power: Power) -> list[tuple[Any, ...]]:
    """Return a row for each class of faults: the number of mutants, and how many each profile kills."""
    sizes = Counter(mutant.group for mutant in power.faulty)
    runs = [power.faulty_runs(profile) for profile in power.profiles]
    kills = [Counter(mutant.group for mutant, run in of_profile if run.is_killed) for of_profile in runs]
    return [(group, size, *(killed[group] for killed in kills)) for group, size in sizes.items()]


def tabulate_ops(power: Power) -> list[list[str]]:
    """Return a row for each op: the smallest error of a scale and the smallest wrong output that were found."""
    rows = []
    for name, (size, error) in power.find_smallest().items():
        power_of_two = "" if size is None else f"2^{size.hex().partition('p')[2]}"
        rows.append([name, power_of_two, "" if error is None else f"{error:.4g}"])
    return rows


def tabulate_guards(power: Power) -> list[list[object]]:
    """Return a row for each check: how many mutants it sees, and which survive without it."""
    return [[each.guard, each.sees, len(each.alone), "; ".join(each.alone[:3]) or each.why] for each in power.removals]


def summarize(power: Power) -> list[str]:
    """Return the gate's result, in a few lines."""
    lines = [
        f"killed by {profile}: {power.count_killed(profile)}; blamed rightly: {power.count_blamed(profile)}"
        for profile in power.profiles
    ]
    seeds = len({run.seed for run in power.runs})
    lines.append(f"honest variants, runs without a false alarm: {power.honest}, seeds: {seeds}")
    if power.removals and power.is_whole:
        lines.append(f"checks whose removal lets nothing survive, unexplained: {', '.join(power.idle) or 'none'}")
    return [*lines, "the gate passes" if power.passes else "THE GATE FAILS"]


def render_terminal(power: Power) -> str:
    """Return all tables, for reading in a terminal."""
    mutants = [[cell if len(cell) < 48 else f"{cell[:45]}..." for cell in row] for row in tabulate_mutants(power)]
    tables = [
        tabulate(mutants, name_columns(power)),
        tabulate(tabulate_ops(power), ["op", "scale off by", "smallest wrong output, LSB"]),
    ]
    if power.removals:
        tables.append(tabulate(tabulate_guards(power), ["check", "sees", "alone", "what only it finds"]))
    return "\n\n".join([*tables, "\n".join(summarize(power))])


DOCUMENT = """\
# Detection power

Written by `python -m tests.mutation --write-doc` (torch {torch}, {cpu}): do not edit. The mutation gate takes
backends with one seeded fault each (`tests/mutants`) through the suite as a vendor's is. A fault is *found* when some
claim or model is REFUTED, FALLBACK, CRASHED or TIMEOUT, or when a check of the flow leaves a model UNEXERCISED. Nothing
else counts: TOLERATED does not. Each mutant names the rules of which one should be broken. It is *blamed rightly* when
most of what is found is under these rules. Honest variants differ within the rules, and nothing of theirs may be found
faulty.

{summary}

{classes}

Faults that `quick` does not find:

{missed}

The gate runs in a checkout of the suite: `python -m tests.mutation -n 2`, some 70 minutes. It prints the long tables,
and writes their data into `build/mutation/detection-power.json`: each mutant with the rules, checks, claims and
comparisons that found it; for each op, the smallest fault that is found; for each check, the mutants that survive where
it alone is taken away. `--mutant=GLOB` runs some. To see whether the suite would find a fault of your own, enter a
`Mutant` in `tests/mutants`.
"""


def render_document(power: Power, facts: Mapping[str, Any]) -> str:
    """Return docs/detection-power.md: the summary, each class, and what profile ``quick`` misses."""
    runs = [(mutant, power.run_of(mutant, "quick")) for mutant in power.faulty]
    missed = [f"- {mutant.name} ({mutant.group})" for mutant, run in runs if not (run and run.is_killed)]
    return DOCUMENT.format(
        **facts,
        summary="\n".join(f"- {line}" for line in summarize(power)),
        classes=tabulate(tabulate_classes(power), ("class", "faults", *power.profiles), tablefmt="github"),
        missed="\n".join(missed or ["- none"]),
    )


# -- data -------------------------------------------------------------------------------------------------------------


def as_data(power: Power, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything for JSON: for the report, and for other tables."""
    return {
        "schema": SCHEMA,
        **facts,
        "mutants": [
            {"name": each.name, "class": each.group, "rules": list(each.rules), "size": each.size}
            for each in power.mutants
        ],
        "trials": [_run_as_data(power, run) for run in power.runs],
        "checks": [asdict(each) for each in power.removals],
        "passes": power.passes,
    }


def _run_as_data(power: Power, run: MutantRun) -> dict[str, Any]:
    mutant = next(each for each in power.mutants if each.name == run.mutant)
    values = {"reds" if key == "failures" else key: value for key, value in asdict(run).items()}
    return values | {"killed": run.is_killed, "blamed_rightly": is_right(mutant, run) if run.failures else None}


def as_header(power: Power) -> dict[str, dict[str, int]]:
    """Return the part for the header of every run: class of faults → their number, and how many each profile finds."""
    columns = ("faults", *power.profiles)
    table = {name: dict(zip(columns, counts, strict=True)) for name, *counts in tabulate_classes(power)}
    total = {column: sum(row[column] for row in table.values()) for column in columns}
    honest = {"runs": power.honest.of, "without a false alarm": power.honest.count}
    return {"every class": total, **table, "honest variants": honest}


def runs_of(data: Mapping[str, Any]) -> tuple[MutantRun, ...]:
    """Read the runs of ``as_data`` from JSON. Raises KeyError or TypeError for other data."""
    return tuple(_read_run(row) for row in data["trials"])


def _read_run(row: Mapping[str, Any]) -> MutantRun:
    values = {key: value for key, value in row.items() if key not in ("reds", "killed", "blamed_rightly")}
    reds = (red | {"verdict": Verdict(red["verdict"]), "guards": tuple(red["guards"])} for red in row["reds"])
    return MutantRun(**values | {"failures": tuple(FailedUnit(**red) for red in reds), "open": tuple(row["open"])})
