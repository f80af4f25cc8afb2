"""Judging: from the messages of a piece of work, and how it ended, to its rows in the results file.

A claim has one check for every stage, in order, whatever happened to its process, and then its own row; the worst check
decides. A model has one row; measurements are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fx_quant_conformance.backends.names import SHIPPED
from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.messages import Begin, Tally, Trace, make_portable
from fx_quant_conformance.conformance.machine.release import ROOT
from fx_quant_conformance.conformance.machine.workplace import WorkResult, fault_of_lost_work
from fx_quant_conformance.conformance.run.device import format_lost_calls
from fx_quant_conformance.conformance.run.findings import format_missing
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.session import Run
from fx_quant_conformance.conformance.run.workplaces import Workplaces
from fx_quant_conformance.reports.baseline import Drift, compare_baseline, name_file
from fx_quant_conformance.reports.diff import Side
from fx_quant_conformance.reports.handed_in import COMMAND
from fx_quant_conformance.reports.measured import Deployment
from fx_quant_conformance.reports.numbers import Number
from fx_quant_conformance.reports.results import lead_of, leading_check
from fx_quant_conformance.reports.schema import (
    Check,
    ClaimResult,
    Header,
    Measurement,
    ModelResult,
    Row,
    Where,
    evidence,
)
from fx_quant_conformance.reports.selection import OWN
from fx_quant_conformance.reports.verdicts import Verdict

AnyJudged = TypeVar("AnyJudged", ClaimResult, ModelResult)
_NOT_WAIVED = "(not waived: "


def find_baselines(backend: str) -> Path:
    """Return the folder of a shipped backend's baselines, which lies beside its module."""
    _, *rooms, _ = SHIPPED[backend].partition(":")[0].split(".")
    return ROOT.joinpath(*rooms, "baselines")


def rows_of(run: Run, unit: Unit, work: WorkResult) -> list[Row]:
    """Return all rows of a claim or job, in the file's order."""
    return rows_of_claim(run, unit, work) if unit.kind == "claim" else rows_of_job(run, unit, work)


def rows_of_claim(run: Run, claim: Unit, work: WorkResult) -> list[Row]:
    """Return a check for every stage, the measurements, and the claim's row."""
    checks = [message for message in work.messages if isinstance(message, Check)]
    if work.ending is not Ending.DONE:
        checks += _check_lost_stages(run.outline.stages, claim, work, checks)
    trace = next((message for message in work.messages if isinstance(message, Trace)), Trace())
    lead = leading_check(checks)
    varies = any(check.is_nondeterministic for check in checks)
    result = ClaimResult(
        claim=claim.id,
        pattern=claim.pattern,
        dtype_config=claim.dtype_config,
        dtypes=claim.dtypes,
        flow=claim.flow,
        scheme=claim.scheme,
        verdict=Verdict.worst(check.verdict for check in checks),
        reason=lead.message if lead else "",
        max_lsb=_find_largest(check.max_lsb for check in checks),
        repro=run.options.repro(claim.id),
        decisions=trace.decisions,
        seconds=round(sum(check.seconds for check in checks), 6),
        failing=None if varies else sum(check.failing for check in checks),
        graphs=trace.graphs,
        beside_own_code=claim.place == "beside",
        execution=trace.execution,
        sureness=trace.sureness,
    )
    measurements = [message for message in work.messages if isinstance(message, Measurement)]
    return [*checks, *measurements, rule_on(run, _count(result, work), checks)]


def rows_of_job(run: Run, job: Unit, work: WorkResult) -> list[Row]:
    """Return the job's rows; if it did not end well, one that says so replaces its models.

    A model that is handed in is judged first, and then measured: its last row counts, also if measuring did not end.
    """
    measurements = [message for message in work.messages if isinstance(message, Measurement)]
    judged: Sequence[ModelResult | Measurement] = [each for each in work.messages if isinstance(each, ModelResult)][-1:]
    if work.ending is not Ending.DONE:
        judged = [
            _note_lost_measuring(each, work)
            for each in judged
            if isinstance(each, ModelResult) and job.id.startswith(OWN)
        ]
        judged = judged or [_row_of_lost_job(job, work)]
    return [
        *measurements,
        *(rule_on(run, _count(each, work)) if isinstance(each, ModelResult) else each for each in judged),
    ]


def _note_lost_measuring(model: ModelResult, work: WorkResult) -> ModelResult:
    """Return the row of a model that was judged before its process was lost."""
    deployment = Deployment(notes=[f"nothing else was measured: {fault_of_lost_work(work).message}"])
    return make_portable(replace(model, deployment=deployment))


def _count(result: AnyJudged, work: WorkResult) -> AnyJudged:
    """Return a row with what was done for it, beside what; nothing is known where its process could not say."""
    tally = next((message for message in work.messages if isinstance(message, Tally)), Tally())
    return replace(result, lowerings=tally.lowerings, runs=tally.runs, foreign_code=tally.foreign_code)


def find_problems(run: Run, header: Header, seen: Mapping[str, Side]) -> tuple[list[str], list[str]]:
    """Return what fails the run in addition to what is in ``seen`` (by ID), and notes that do not.

    Waivers that do not fit fail it, and differences from the baseline of a shipped backend.
    """
    problems = run.waivers.problems(run.outline.known, {name: each.verdict for name, each in seen.items()})
    drift = Drift()
    if run.options.backend in SHIPPED:
        claims = {claim: seen[claim] for claim in run.outline.claims if claim in seen}
        drift = compare_baseline(find_baselines(run.options.backend) / name_file(header), claims, header)
    lost = format_lost_calls(run.options.report_dir) if run.options.backend.startswith(COMMAND) else ""
    notes = (drift.note, lost, format_missing(run.waivers.entries, header.findings), *run.outline.left_out)
    return [*problems, *drift.differences], [note for note in notes if note]


def _check_lost_stages(stages: Sequence[str], claim: Unit, work: WorkResult, done: Sequence[Check]) -> Iterator[Check]:
    """Yield a check for each stage that was not concluded; the one in which the work ended says how.

    If the work ended after all stages, that is the last one.
    """
    stages = stages[min(len(done), len(stages) - 1) :]
    last = next((message for message in reversed(work.messages) if isinstance(message, Begin)), Begin(stage=stages[0]))
    ended, case = last.stage if last.stage in stages else stages[0], last.case
    fault = fault_of_lost_work(work)
    seconds = max(0.0, work.seconds - sum(check.seconds for check in done))
    text = f"not completed: {ended} ended the claim"
    skipped = Check(claim=claim.id, stage=ended, rule="", outcome="skip", verdict=fault.verdict, message=text)
    place = {"where": Where(case=case)} if case else {}
    error = replace(
        skipped,
        outcome="error",
        message=f"{case}: {fault.message}" if case else fault.message,
        evidence=evidence({**place, **fault.evidence}),
        seconds=round(seconds, 6),
    )
    for stage in stages:
        yield make_portable(error if stage == ended else replace(skipped, stage=stage))


def _row_of_lost_job(job: Unit, work: WorkResult) -> ModelResult | Measurement:
    fault = fault_of_lost_work(work)
    if job.kind == "measurement":
        return make_portable(Measurement(topic=job.topic, subject=job.subject, values={"error": fault.message}))
    shown, seconds = evidence(fault.evidence), round(work.seconds, 6)
    row = ModelResult(model=job.id, verdict=fault.verdict, reason=fault.message, seconds=seconds, evidence=shown)
    return make_portable(row)


def rule_on(run: Run, result: AnyJudged, checks: Sequence[Check] = ()) -> AnyJudged:
    """Return the row with what lets it pass: a waiver, or an option of the run. ``checks``: those of a claim."""
    max_lsb = None if result.max_lsb is None else float(result.max_lsb)
    failing = {name: facts for check in checks for name, facts in check.failing_cases.items()}
    ruling = run.waivers.judge(result.id, result.verdict, _list_broken(result, checks), max_lsb, failing)
    if ruling.problem:
        result = replace(result, reason=f"{result.reason} {_NOT_WAIVED}{ruling.problem})".strip())
    if ruling.waived and ruling.entry is not None:
        return replace(result, waived=True, waiver=ruling.entry.to_row())
    is_accepted = result.verdict is Verdict.UNSHOWN and run.options.without_execution_evidence
    return replace(result, accepted=is_accepted)


def rule_again(run: Run, result: AnyJudged, checks: Sequence[Check] = ()) -> AnyJudged:
    """Return an earlier run's row with what lets it pass now; a claim that passes has no script."""
    reason = result.reason.partition(_NOT_WAIVED)[0].rstrip()
    bare = replace(result, reason=reason, waived=False, waiver=None, accepted=False)
    ruled = rule_on(run, bare, checks)
    if not isinstance(ruled, ClaimResult):
        return ruled
    ruled = replace(ruled, repro=run.options.repro(ruled.claim))
    return replace(ruled, op="", script="") if ruled.passes else ruled


def _list_broken(result: ClaimResult | ModelResult, checks: Sequence[Check]) -> set[str]:
    """Return the rules that a claim or model breaks: those of all checks that fail, else what decided its verdict."""
    failed = {check.rule for check in checks if check.failed and check.verdict is not Verdict.UNSHOWN}
    return (failed or {lead_of(result, checks).rule}) - {""}


def _find_largest(distances: Iterable[Number | None]) -> Number | None:
    """Return the largest distance in LSB; infinities and NaN, which are texts, are larger than all numbers."""
    known = [distance for distance in distances if distance is not None]
    return max(known, key=lambda value: math.inf if isinstance(value, str) else value, default=None)


def open_workplaces(run: Run) -> Workplaces:
    """Return where a run's units are judged."""
    if run.elsewhere is not None and run.options.backend.startswith(COMMAND):
        from fx_quant_conformance.conformance.run.command import (
            CommandWorkplaces,  # with torch, which other runs do without here
        )

        run.openers.close()  # what is judged is not asked of the command, but of the files that it has left
        return CommandWorkplaces(run)
    return Workplaces(run.setup, run.outline.units, run.openers)
