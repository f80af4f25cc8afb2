"""The suite's tests: one for each claim, and one for each job beside them (docs/architecture.md, "Stages").

Each test's rows become lines of the results file here, in whichever process ran it; the lines reach the controlling
process with the test's report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from conformance.claims.claim import Claim
from conformance.machine.isolation import Isolation, own_peak_mib
from conformance.pipeline.job import Job
from conformance.reproducers.of_claim import with_reproducer
from conformance.run.exercise import isolation_for
from conformance.run.judging import judged_among, passes, rows_of
from conformance.run.recorder import PAYLOAD
from conformance.run.session import Unit, run_of
from reports.codec import line_of
from reports.results import leading_check
from reports.schema import Check, ClaimResult, Judged, Row
from reports.verdicts import Verdict


@pytest.fixture(scope="session")
def isolation(pytestconfig: pytest.Config) -> Iterator[Isolation]:
    """What runs a backend's code for this process."""
    isolation = isolation_for(run_of(pytestconfig))
    yield isolation
    isolation.close()


def test_job(job: Job, isolation: Isolation, request: pytest.FixtureRequest) -> None:
    """A model is as good as its patterns; a measurement is made."""
    exercise(job, isolation, request.node)


def test_claim(claim: Claim, isolation: Isolation, request: pytest.FixtureRequest) -> None:
    """One claim holds in every stage."""
    exercise(claim, isolation, request.node)


def exercise(unit: Unit, isolation: Isolation, item: pytest.Item) -> None:
    """Run a claim or job and hand its rows on; fail or skip for the first verdict that does not pass."""
    run = run_of(item.config)
    work = isolation.run(unit.id)
    rows = rows_of(run, unit, work)
    last = rows[-1] if rows else None
    if isinstance(unit, Claim) and isinstance(last, ClaimResult) and not passes(run, last):
        rows[-1] = with_reproducer(run.bench(), unit, last, _checks(rows))
    peak_mib = max(work.peak_mib, own_peak_mib())
    item.stash[PAYLOAD] = json.dumps({"lines": [line_of(row) for row in rows], "peak_mib": peak_mib})
    for judged in judged_among(rows):
        item.user_properties += [
            (judged.kind, unit.id),
            ("verdict", judged.verdict.value),
            ("rule", _rule(judged, rows)),
        ]
        if passes(run, judged):
            continue
        if judged.verdict is Verdict.UNEXERCISED:
            pytest.skip(judged.reason)
        pytest.fail(judged.reason, pytrace=False)


def _rule(judged: Judged, rows: list[Row]) -> str:
    """Return the rule that a claim's or model's verdict is under; "" if nothing is to be said against it."""
    if not isinstance(judged, ClaimResult):
        return judged.rule
    lead = leading_check(_checks(rows))
    return lead.rule if lead is not None else ""


def _checks(rows: list[Row]) -> list[Check]:
    return [row for row in rows if isinstance(row, Check)]
