"""What the suite says of the run that a results file is of: ``python -m conformance describe RESULTS.jsonl``.

The run is opened as its header says, and its rows are judged again: nothing is run. `reports.against_suite` holds a
certificate to the answer.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime
from pathlib import Path

import pytest

from conformance.claims.effort import PROFILES
from conformance.machine.environment import read_detection_power
from conformance.machine.release import read_suite_commit, read_suite_version
from conformance.run.judging import AnyJudged, find_problems, rule_on
from conformance.run.options import CLAIM_TIMEOUTS, ROOT, Options
from conformance.run.session import Run, find_described, open_run
from conformance.run.waivers import WaiverError, Waivers, load_waivers
from conformance.stages.stage import OF_A_QUANTIZER, STAGES, stages_of
from reports.description import DescribedClaim, DescribedJob, Opened, RunDescription
from reports.diff import make_side
from reports.results import Results
from reports.schema import Header


def describe(results: Results, waivers: Path | None) -> RunDescription:
    """Describe the run of a results file. ``waivers``: the file that it used, or None.

    If the profile is none, the backend cannot be opened or the waivers cannot be read, ``opened`` is None, and
    ``error`` says why.
    """
    header = results.header
    effort = PROFILES.get(header.profile)
    found = {check.stage for checks in results.checks_by_claim().values() for check in checks}
    said = RunDescription(
        suite_version=read_suite_version(ROOT),
        suite_commit=read_suite_commit(ROOT),
        detection=read_detection_power(),
        stages=[stage for stage in STAGES if stage in found or stage not in OF_A_QUANTIZER],
        random=effort.random if effort else 0,
    )
    if effort is None:
        return replace(said, error=f"no profile of the suite is {header.profile!r}; it has {', '.join(PROFILES)}")
    options = _options_of(header)
    try:
        run = open_run(options, find_described(options))
        entries = () if waivers is None else load_waivers(waivers, header.isa, header.torch)
        opened = _describe_run(run, Waivers(entries, _day_of(header), options.is_complete), results)
        return replace(said, stages=list(stages_of(run.backend)), opened=opened)
    except (pytest.UsageError, WaiverError) as error:
        return replace(said, error=str(error))


def _options_of(header: Header) -> Options:
    """Return the options of the run, with the backend's own waivers."""
    given, timeout = header.options, header.options.get("claim_timeout")
    most, models = given.get("max_examples"), given.get("model")
    return Options(
        backend=str(given.get("backend", header.backend)),
        report_dir=Path(),
        seed=header.seed,
        profile=header.profile,
        claim_timeout=float(timeout) if isinstance(timeout, int | float) else CLAIM_TIMEOUTS[header.profile],
        max_examples=most if isinstance(most, int) else None,
        models=tuple(map(str, models)) if isinstance(models, list) else (),
        allow_quality=bool(given.get("allow_quality")),
        without_execution_evidence=bool(given.get("without_execution_evidence")),
        isa=None if given.get("isa") is None else str(given["isa"]),
        outputs=None if given.get("outputs") is None else Path(str(given["outputs"])),
    )


def _day_of(header: Header) -> date:
    """Return the day of the run, by which waivers expire; today if the header has none."""
    try:
        return datetime.fromisoformat(header.started).date()
    except ValueError:
        return date.today()


def _describe_run(own: Run, waivers: Waivers, results: Results) -> Opened:
    """Describe a run that is opened with the backend's own waivers, and judge the results' rows by ``waivers``."""
    header = own.make_header(claims=len(own.claims))
    run = replace(own, waivers=waivers)
    checks = results.checks_by_claim()
    judged = [
        *(rule_on(run, _take_back(row), checks[row.claim]) for row in results.claims),
        *(rule_on(run, _take_back(row)) for row in results.models),
    ]
    leads = results.leads()
    seen = {row.id: make_side(row, leads[row.id]) for row in judged}
    problems, _ = find_problems(run, results.header, seen)
    return Opened(
        header=header,
        claims=[
            DescribedClaim(
                claim=claim.id, pattern=claim.pattern, dtype_config=claim.dtype_config, dtypes=claim.plain_dtypes,
                flow=claim.flow, scheme=claim.scheme, repro=run.options.repro(claim.id),
            )
            for claim in run.claims
        ],
        jobs=[DescribedJob(id=job.id, topic=job.topic, subject=job.subject) for job in run.jobs],
        waivers={row.id: row.waiver for row in judged if row.waiver is not None},
        allowed=[row.id for row in judged if row.allowed or row.accepted],
        problems=problems,
    )  # fmt: skip


def _take_back(row: AnyJudged) -> AnyJudged:
    """Return a row without what lets it pass."""
    return replace(row, waived=False, waiver=None, allowed=False, accepted=False)
