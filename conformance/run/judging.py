"""Judging: from what a piece of work gave, and how it ended, to its rows in the results file.

A claim has one check for every stage, in order, whatever happened to its process, and then its own row; the worst check
decides. A model has one row; facts are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from backends.discovery import SHIPPED
from conformance.claims.claim import Claim
from conformance.machine.isolation import Ending, Outcome, lost
from conformance.pipeline.claim_run import STAGES
from conformance.pipeline.job import Job
from conformance.run.expected import Comparison, Judged, compare_expected, expected_path
from conformance.run.session import Run, Unit
from conformance.stages.check import Check, plain
from reports.codec import PlainRow
from reports.results import Verdict, by_chance, decode, leading_check
from reports.schema import Check as CheckRow
from reports.schema import Header, Number

_JUDGED = ("claim", "model")


def unit_rows(run: Run, unit: Unit, outcome: Outcome) -> list[PlainRow]:
    """Return all rows of a claim or job, in the file's order."""
    return claim_rows(run, unit, outcome) if isinstance(unit, Claim) else job_rows(run, unit, outcome)


def judged_rows(rows: Iterable[PlainRow]) -> list[PlainRow]:
    """Return the rows among these that have the verdict of a claim or model."""
    return [row for row in rows if row["kind"] in _JUDGED]


def is_green(run: Run, row: PlainRow) -> bool:
    """Tell whether a claim's or model's row lets the run pass."""
    return bool(row["waived"]) or row["verdict"] in run.green


def reason_of(row: PlainRow) -> str:
    """Return why a claim or model has its verdict."""
    return str(row["reason" if row["kind"] == "claim" else "message"])


def claim_rows(run: Run, claim: Claim, outcome: Outcome) -> list[PlainRow]:
    """Return a check for every stage, and the claim's row."""
    rows = [row for row in outcome.rows if "kind" in row]
    decisions = [decision for row in outcome.rows for decision in row.get("decisions", ())]
    graphs = {name: text for row in outcome.rows for name, text in row.get("graphs", {}).items()}
    if outcome.ending is not Ending.DONE:
        rows += _lost_stages(claim, outcome, rows)
    checks = [check for check in map(decode, rows) if isinstance(check, CheckRow)]
    lead = leading_check(checks)
    row = {
        "kind": "claim",
        "claim": claim.id,
        "pattern": claim.pattern,
        "dtype_config": claim.dtype_config,
        "flow": claim.flow,
        "scheme": claim.scheme,
        "verdict": Verdict.worst(check.verdict for check in checks).value,
        "reason": lead.message if lead else "",
        "max_lsb": _largest(check.max_lsb for check in checks),
        "repro": run.options.repro(claim.id),
        "decisions": decisions,
        "seconds": round(sum(check.seconds for check in checks), 6),
        "failing": None if any(map(by_chance, checks)) else sum(check.failing for check in checks),
    } | ({"graphs": graphs} if graphs else {})
    return [*rows, _ruled(run, claim.id, row, "reason")]


def job_rows(run: Run, job: Job, outcome: Outcome) -> list[PlainRow]:
    """Return the job's rows; where it did not end well, one says so in place of a model's verdict."""
    rows = list(outcome.rows)
    if outcome.ending is not Ending.DONE:
        rows = [row for row in rows if row["kind"] != "model"] + [_lost_job(job, outcome)]
    return [_ruled(run, row["model"], row, "message") if row["kind"] == "model" else row for row in rows]


def run_problems(run: Run, header: Header, judged: Mapping[str, Judged]) -> tuple[list[str], list[str]]:
    """Return what fails the run beside the verdicts in ``judged`` (by ID), and notes that do not.

    That is waivers that do not fit, and verdicts that differ from those expected of a backend of the suite's own.
    """
    options = run.options
    problems = run.waivers.problems(run.known, {name: each.verdict for name, each in judged.items()})
    comparison = Comparison()
    if options.backend in SHIPPED:
        claims = {claim.id: judged[claim.id] for claim in run.claims if claim.id in judged}
        comparison = compare_expected(expected_path(header), claims, header)
    return [*problems, *comparison.differences], [comparison.note] if comparison.note else []


def _lost_stages(claim: Claim, outcome: Outcome, done: Sequence[PlainRow]) -> Iterator[PlainRow]:
    """A check for each stage that was not concluded; that in which the work ended (the last, if after all) says how."""
    left = STAGES[min(len(done), len(STAGES) - 1) :]
    at, case = next((row["at"] for row in reversed(outcome.rows) if "at" in row), (left[0], ""))
    at = at if at in left else left[0]
    verdict, message, evidence = lost(outcome)
    seconds = max(0.0, outcome.seconds - sum(row["seconds"] for row in done))
    for stage in left:
        found = Check(
            stage=stage, rule="", outcome="skip", verdict=verdict, message=f"not completed: {at} ended the claim"
        )
        if stage == at:
            evidence = {"case": case, **evidence} if case else evidence
            text = f"{case}: {message}" if case else message
            found = replace(found, outcome="error", message=text, evidence=evidence, seconds=seconds)
        yield plain(found.row(claim.id))


def _lost_job(job: Job, outcome: Outcome) -> PlainRow:
    verdict, message, evidence = lost(outcome)
    kind, _, subject = job.id.partition("/")
    if kind == "fact":
        topic, _, subject = subject.partition("/")
        return plain({"kind": "fact", "topic": topic, "subject": subject, "values": {"error": message}})
    row: PlainRow = {"kind": "model", "model": job.id, "verdict": verdict.value, "message": message, "max_lsb": None}
    row |= {"waived": False, "cases": None, "seconds": round(outcome.seconds, 6), "evidence": evidence}
    return plain(row)


def _ruled(run: Run, name: str, row: PlainRow, told: str) -> PlainRow:
    """The row with what the waivers say of it; ``told`` is the key of its message."""
    max_lsb = row["max_lsb"]
    ruling = run.waivers.judge(name, Verdict(row["verdict"]), None if max_lsb is None else float(max_lsb))
    row = row | {"waived": ruling.waived}
    if ruling.problem:
        row[told] = f"{row[told]} (not waived: {ruling.problem})".strip()
    if ruling.waived and ruling.waiver is not None:
        waiver = ruling.waiver.row()
        row["waiver"] = waiver | {"max_lsb": _spelled(ruling.waiver.max_lsb)}
    return row


def _spelled(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _largest(distances: Iterable[Number | None]) -> Number | None:
    """The largest distance in LSB; infinities and NaN, which are spelled out, are larger than all numbers."""
    known = [distance for distance in distances if distance is not None]
    return max(known, key=lambda value: math.inf if isinstance(value, str) else value, default=None)
