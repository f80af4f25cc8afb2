"""A results file against what the installed suite and the backend say of it: what can be recomputed without a run.

Where suite, torch or backend are other versions than those of the run, a difference may be theirs: it is then not held
against the file, and the file is not fully checked.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reports.codec import encode
from reports.description import DescribedClaim, DescribedJob, Opened, RunDescription
from reports.results import Results
from reports.schema import Measurement
from reports.text import cut_end, pluralize
from reports.verdicts import Verdict

_SAME = (
    "config_name", "config_sha256", "claims_sha256", "claims_in_config", "pairs", "representation", "engine", "limits",
    "capabilities",
)  # fmt: skip
"""Fields of the header that follow from suite and backend."""
_SOFTWARE = ("torch", "versions")
_BY_JOBS = frozenset({"fingerprint"})
"""Topics of measurements that have jobs of their own; others belong to claims and models."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a certificate was held to: what does not hold, and what could not be checked, a line each."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def __add__(self, other: Findings) -> Findings:
        unchecked = dict.fromkeys([*self.unchecked, *other.unchecked])
        return Findings(problems=self.problems + other.problems, unchecked=list(unchecked))


def compare_with_suite(results: Results, said: RunDescription) -> Findings:
    """Hold a results file to what the suite and the backend here say of it."""
    suite = list(_compare_suite(results, said))
    found = _sort_by(_find_other_suite(results, said), suite)
    if said.opened is None:
        missing = (
            f"the backend could not be asked: {said.error}; not compared: its config and claims, the models and "
            "measurements of the profile, limits, and which waivers cover what"
        )
        return found + Findings(unchecked=[missing])
    spec, name = results.header.options.get("backend"), said.opened.header.backend
    if name != results.header.backend:
        return found + Findings(problems=[f"--backend={spec} is the backend {name}, not {results.header.backend}"])
    other = [*_find_other_suite(results, said), *_find_other_software(results, said.opened)]
    return (
        found + _sort_by(other, list(_compare_run(results, said.opened))) + _compare_waiver_file(results, said.opened)
    )


def _sort_by(other: list[str], differences: list[str]) -> Findings:
    """Sort differences: problems, unless other versions may explain them."""
    if not other:
        return Findings(problems=differences)
    return Findings(unchecked=[*other, *differences])


# -- versions ---------------------------------------------------------------------------------------------------------


def _find_other_suite(results: Results, said: RunDescription) -> list[str]:
    stated = results.header.suite_commit
    if stated == said.suite_commit:
        return []
    here = f"the suite here is of commit {said.suite_commit}, the certificate of {stated}"
    return [f"{here}: check that one out, and verify again"]


def _find_other_software(results: Results, opened: Opened) -> list[str]:
    pairs = ((name, getattr(results.header, name), getattr(opened.header, name)) for name in _SOFTWARE)
    return [f"not the same software: {name} was {was}, is {now}" for name, was, now in pairs if was != now]


# -- suite ------------------------------------------------------------------------------------------------------------


def _compare_suite(results: Results, said: RunDescription) -> Iterator[str]:
    header = results.header
    if header.suite_version != said.suite_version:
        yield f"suite_version is {header.suite_version}; this commit has {said.suite_version}"
    if header.detection != said.detection:
        yield f"the detection power is not this suite's: {_spell_difference(header.detection, said.detection)}"
    checks = results.checks_by_claim()
    unlike = [name for name, each in checks.items() if [check.stage for check in each] != said.stages]
    if unlike:
        yield f"{_name(unlike)}: the checks are not one for each stage ({', '.join(said.stages)})"
    most = header.options.get("max_examples")
    if most is not None and not (isinstance(most, int) and most >= said.random):
        yield f"--max-examples={most} tries less than the {said.random} random inputs of profile {header.profile}"


def _spell_difference(stated: Mapping[str, object], actual: Mapping[str, object]) -> str:
    key = next(key for key in (*stated, *actual) if stated.get(key) != actual.get(key))
    return f"{key} is {_shorten(stated.get(key))}; it is {_shorten(actual.get(key))}"


# -- backend ----------------------------------------------------------------------------------------------------------


def _compare_run(results: Results, opened: Opened) -> Iterator[str]:
    stated, actual = encode(results.header), encode(opened.header)
    for name in _SAME:
        if stated.get(name) != actual.get(name):
            yield f"{name} is {_shorten(stated.get(name))}; here it is {_shorten(actual.get(name))}"
    yield from _compare_claims(results, opened)
    yield from _compare_jobs(results, opened)
    yield from _compare_waivers(results, opened)
    yield from opened.problems


def _compare_claims(results: Results, opened: Opened) -> Iterator[str]:
    rows = {claim.claim: claim for claim in results.claims}
    claimed = {claim.claim: claim for claim in opened.claims}
    yield from _compare_names("claim", set(rows), set(claimed))
    for key in (each.name for each in dataclasses.fields(DescribedClaim)):
        spell: Callable[[str], object] = _split_command if key == "repro" else str
        pairs = {name: (getattr(rows[name], key), getattr(claimed[name], key)) for name in rows if name in claimed}
        unlike = [name for name, (was, now) in pairs.items() if spell(was) != spell(now)]
        if unlike:
            was, now = map(_shorten, pairs[unlike[0]])
            yield f"{key} of {pluralize(len(unlike), 'claim')}: of {unlike[0]} it is {was}; here it is {now}"


def _split_command(text: str) -> object:
    """Return the words of a command without those about waivers, whose paths differ."""
    try:
        return [word for word in shlex.split(text) if not word.startswith(("--waivers", "--no-waivers"))]
    except ValueError:
        return text


def _compare_jobs(results: Results, opened: Opened) -> Iterator[str]:
    """Compare models and measurements with the jobs of the profile."""
    models = {model.model for model in results.models}
    yield from _compare_names("model", models, {job.id for job in opened.jobs if not job.topic})
    measured = defaultdict[str, list[Measurement]](list)
    for row in results.measurements:
        measured[unit_of_measurement(row, opened.jobs)].append(row)
    known = {job.id for job in opened.jobs if job.topic}
    owners = {*known, *models, *(claim.claim for claim in results.claims)}
    strange = [f"{rows[0].topic} of {rows[0].subject}" for unit, rows in measured.items() if unit not in owners]
    yield from _compare_names("measurement", {unit for unit in measured if unit in known}, known)
    if strange:
        yield f"{pluralize(len(strange), 'measurement')} of nothing in this profile: {_name(strange)}"


def unit_of_measurement(row: Measurement, jobs: list[DescribedJob]) -> str:
    """Return the ID of the job, claim or model that a measurement belongs to; its subject if there is none."""
    if row.topic not in _BY_JOBS:
        return row.subject
    owners = (job.id for job in jobs if job.topic == row.topic and _is_about(row.subject, job.subject))
    return next(owners, row.subject)


def _is_about(subject: str, of: str) -> bool:
    """Tell whether a measurement's subject is the job's: alone, or with dtype and scheme behind it."""
    return subject == of or subject.startswith(f"{of}, ")


def _compare_names(kind: str, stated: set[str], actual: set[str]) -> Iterator[str]:
    if missing := sorted(actual - stated):
        yield f"{pluralize(len(missing), kind)} of the backend missing: {_name(missing)}"
    if strange := sorted(stated - actual):
        yield f"{pluralize(len(strange), kind)} that the backend does not have: {_name(strange)}"


def _compare_waivers(results: Results, opened: Opened) -> Iterator[str]:
    """Compare what is waived with what the waivers of the file cover, and hold all else to pass."""
    for row in results.judged:
        covering = opened.waivers.get(row.id)
        if row.waiver != covering:
            yield f"{row.id}: waived by {_spell_waiver(row.waiver)}; the waivers give {_spell_waiver(covering)}"
        if covering is None and row.verdict is not Verdict.VERIFIED and row.id not in opened.allowed:
            yield f"{row.id}: is {row.verdict}, which passes only with a waiver"


def _compare_waiver_file(results: Results, opened: Opened) -> Findings:
    stated, own = results.header.waivers, opened.header.waivers
    if stated.get("sha256") == own.get("sha256") or not stated:
        return Findings(unchecked=list(_compare_findings(results.header.findings, opened.header.findings)))
    text = f"the waivers are not the backend's own ({own.get('file', 'it has none')}): who accepts them is not known"
    return Findings(unchecked=[text])


def _compare_findings(stated: Mapping[str, str], own: Mapping[str, str]) -> Iterator[str]:
    """Yield what the texts of findings differ in: they explain waivers, and decide nothing."""
    other = [name for name, text in stated.items() if own.get(name, text) != text]
    lacking = [name for name in stated if name not in own]
    if other:
        yield f"the texts of {pluralize(len(other), 'finding')} are others here: {_name(other)}"
    if lacking:
        yield f"the texts of {pluralize(len(lacking), 'finding')} are not here: {_name(lacking)}"


def _spell_waiver(waiver: Any) -> str:
    return "none" if waiver is None else f"{waiver.reason!r} (max_lsb {waiver.max_lsb}, expires {waiver.expires})"


def _name(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown


def _shorten(value: object) -> str:
    return cut_end(str(value), 100)
