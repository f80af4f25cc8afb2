"""Running parts of a certificate again: drawn at random, by the suite here, compared bit for bit.

Drawn are claims, models and measurements alike. What a kernel gives by chance cannot be compared bit for bit: such a
claim must vary again, under the same verdict and waiver. One in four of those drawn need not: it may be steady this
time, or crash in one run and give wrong numbers in the other.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from reports.against_suite import Findings, unit_of_measurement
from reports.audit import is_timeout
from reports.description import DescribedJob, Opened
from reports.results import Results, ResultsError, comparable, read_results
from reports.schema import Header, Judged, Measurement
from reports.suite import ROOT, run_python
from reports.text import join_lines
from reports.verdicts import Verdict

_LEEWAY = 4
"""One in how many of the claims that may differ by chance may do so."""
_USUAL_CLAIM = 60.0
"""Time of one claim, in seconds, if the run's is none."""
_STARTING = 300.0
"""Seconds that a run may take besides its claims."""
_NOT_COMPARED = frozenset({"repro"})
"""The command line differs with the path of the waivers; `against_suite` compares it."""
_HEADING_ENDS = '\n"""\n'
"""End of the heading of a script, which quotes the command line."""
_BASIS = ("suite_commit", "torch", "python", "isa", "cpu", "isolation", "versions")

Groups = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunOutcome:
    """What came of a rerun.

    ``differing``: what is not as before, by unit. ``tolerated``: the same, where chance lets it be. ``basis``: how
    machine and software differ. ``header``: that of the rerun; None: nothing was run.
    """

    differing: Mapping[str, list[str]]
    tolerated: Mapping[str, list[str]] = field(default_factory=dict)
    basis: tuple[str, ...] = ()
    header: Header | None = None

    @property
    def findings(self) -> Findings:
        """What does not hold, and what could not be held to the certificate, a line each."""
        problems, tolerated = (
            [f"{unit}: {line}" for unit, lines in groups.items() for line in lines]
            for groups in (self.differing, self.tolerated)
        )
        return Findings(problems=problems, unchecked=[*self.basis, *tolerated])


def list_units(results: Results, opened: Opened) -> tuple[str, ...]:
    """List what can be run again: all claims and jobs, of the backend and of the results, by ID."""
    theirs = (*(claim.claim for claim in opened.claims), *(job.id for job in opened.jobs))
    return tuple(sorted({*theirs, *(row.id for row in results.judged)}))


def draw(units: Sequence[str], count: int, seed: int) -> tuple[str, ...]:
    """Draw `count` of the units (at most all); the same seed gives the same draw."""
    return tuple(random.Random(seed).sample(units, min(count, len(units))))


def rerun(
    results: Results, units: Sequence[str], opened: Opened, waivers: Path | None, seconds: float | None = None
) -> RerunOutcome:
    """Run units again as the header says, by the suite beside this package, and compare.

    `waivers`: the file that the run used, or None. `seconds`: the time for all; None: that of the units' limits. Raises
    ResultsError if the suite is not there, or does not run, or not within that time.
    """
    if not (ROOT / "conformance").is_dir():
        raise ResultsError(f"{ROOT}: has no conformance/: --rerun needs the suite, not reports alone")
    known = {claim.claim for claim in opened.claims} | {job.id for job in opened.jobs}
    if strange := [unit for unit in units if unit not in known]:
        return RerunOutcome(differing={unit: ["the backend has nothing of this name to run"] for unit in strange})
    limit = seconds or _STARTING + 2 * len(units) * _clamp_timeout(results)
    with tempfile.TemporaryDirectory() as folder:
        selection = [f"--claim={unit}" for unit in units]
        command = [*build_command(results, waivers), f"--report-dir={folder}", *selection]
        status, output = run_python(command, limit)
        path = Path(folder) / "results.jsonl"
        if status not in (0, 1) or not path.is_file():
            raise ResultsError(f"the suite ended with status {status}: {join_lines(output[-400:])}")
        repeated = read_results(path)
    return compare_rerun(results, repeated, units, opened.jobs)


def build_command(results: Results, waivers: Path | None) -> Iterator[str]:
    """Yield the words after ``python`` that repeat the run; what its options cannot be is left out."""
    header, options = results.header, results.header.options
    yield from ("-m", "pytest", str(ROOT / "conformance"), "-q", "-p", "no:cacheprovider")
    yield from (f"--backend={options.get('backend', header.backend)}", f"--seed={header.seed}")
    yield from (f"--profile={header.profile}", f"--claim-timeout={_clamp_timeout(results):g}")
    yield "--no-waivers" if waivers is None else f"--waivers={waivers.resolve()}"
    if options.get("allow_quality"):
        yield "--allow-quality"
    if options.get("without_execution_evidence"):
        yield "--without-execution-evidence"
    if isinstance(most := options.get("max_examples"), int):
        yield f"--max-examples={most}"
    if options.get("isa") is not None:
        yield f"--isa={options['isa']}"
    if isinstance(outputs := options.get("outputs"), str):
        yield f"--outputs={outputs}"
    if isinstance(models := options.get("model"), list):
        yield from (f"--model={spec}" for spec in models)


def _clamp_timeout(results: Results) -> float:
    """Return the seconds for one claim: the run's, if that is a time that a certificate may have."""
    stated = results.header.options.get("claim_timeout")
    return float(cast("float", stated)) if is_timeout(stated) else _USUAL_CLAIM


# -- comparing --------------------------------------------------------------------------------------------------------


def compare_rerun(old: Results, new: Results, units: Sequence[str], jobs: list[DescribedJob]) -> RerunOutcome:
    """Compare units of two runs: their rows without times; of those that vary by chance, verdict and waiver."""
    groups = [_group_rows(run, other, jobs) for run, other in ((old, new), (new, old))]
    judged = [{row.id: row for row in run.judged} for run in (old, new)]
    lines = {
        unit: [
            *_compare_rows(*(rows.get(unit, []) for rows in groups)),
            *_compare_judged(*(rows.get(unit) for rows in judged)),
        ]
        for unit in units
    }
    steady = _find_varying(old).intersection(units) - _find_varying(new)
    for unit in steady:
        lines[unit].append("is said to vary by chance, and did not when it was run again")
    chance = steady | {unit for unit in units if _may_crash(*(rows.get(unit) for rows in judged))}
    is_bounded = len(chance) <= len(_find_unsteady(old).intersection(units)) // _LEEWAY
    let = chance if is_bounded else set[str]()
    return RerunOutcome(
        differing={unit: found for unit, found in lines.items() if found and unit not in let},
        tolerated={unit: found for unit, found in lines.items() if found and unit in let},
        basis=tuple(_compare_machines(old, new)),
        header=new.header,
    )


def _compare_machines(old: Results, new: Results) -> Iterator[str]:
    """Yield the differences of machine and software: they may explain other differences."""
    for name in _BASIS:
        was, now = getattr(old.header, name), getattr(new.header, name)
        if was != now:
            yield f"not the same machine or software: {name} was {was}, is {now}"


def _compare_rows(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[str]:
    if before == after:
        return
    pairs = zip(before, after, strict=False)
    keys = sorted({key for a, b in pairs for key in {*a, *b} if a.get(key) != b.get(key)})
    yield f"{', '.join(keys)} differ" if keys else f"{len(after)} rows, not {len(before)}"


def _compare_judged(old: Judged | None, new: Judged | None) -> Iterator[str]:
    """Compare the need for a waiver, of what varies by chance as well."""
    if old is None or new is None:
        return
    if old.waived and new.verdict is Verdict.VERIFIED:
        yield f"is waived as {old.verdict}, but needs no waiver: it is VERIFIED when it is run again"
    elif old.waiver != new.waiver:
        now = f"waived for {new.waiver.reason!r}" if new.waiver else "not waived"
        yield f"is {'waived' if old.waived else 'not waived'}; run again it is {new.verdict}, {now}"


def _may_crash(old: Judged | None, new: Judged | None) -> bool:
    """Tell whether a kernel crashed in one run and gave wrong numbers in the other, as one may out of bounds."""
    if old is None or new is None or old.verdict is new.verdict:
        return False
    return old.verdict.may_be(new.verdict) or new.verdict.may_be(old.verdict)


def _group_rows(run: Results, other: Results, jobs: list[DescribedJob]) -> Groups:
    """Group the comparable rows by claim or job."""
    groups = defaultdict[str, list[dict[str, Any]]](list)
    for row in comparable(run, other):
        plain: dict[str, Any] = {key: value for key, value in row.items() if key not in _NOT_COMPARED}
        if "script" in plain:
            plain["script"] = plain["script"].partition(_HEADING_ENDS)[2] or plain["script"]
        groups[_unit_of(plain, jobs)].append(plain)
    return groups


def _unit_of(row: dict[str, Any], jobs: list[DescribedJob]) -> str:
    if row["kind"] == Measurement.kind:
        return unit_of_measurement(Measurement(topic=row["topic"], subject=row["subject"], values={}), jobs)
    return str(row.get("claim", row.get("model", "")))


def _find_varying(results: Results) -> set[str]:
    return {check.claim for check in results.checks if check.is_nondeterministic}


def _find_unsteady(results: Results) -> set[str]:
    """Return what a repetition may find otherwise: what varies by chance, and crashes."""
    return _find_varying(results) | {row.id for row in results.judged if row.verdict is Verdict.CRASHED}


def count_varying(results: Results, units: Iterable[str]) -> int:
    """Return how many of the units vary by chance."""
    return len(_find_varying(results).intersection(units))


def describe_chance(results: Results, units: Iterable[str]) -> str:
    """Say how many of the units vary by chance, so that only their verdicts are compared; "" if none does."""
    count = count_varying(results, units)
    return f"{count} of them vary by chance: only their verdicts and waivers are compared" if count else ""
