"""The suite's tests: one for each claim, and one for each job beside them (docs/architecture.md, "Stages").

What is found becomes rows of the results file here, in whichever process ran it; they reach the controlling process
with the test's report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from conformance.claims.claim import Claim
from conformance.machine.isolation import Isolation, own_peak_mib
from conformance.pipeline.job import Job
from conformance.reproducers.of_claim import shown_of
from conformance.run.exercise import isolation_for
from conformance.run.judging import is_green, judged_rows, reason_of, unit_rows
from conformance.run.recorder import FINDING
from conformance.run.session import Unit, run_of
from reports.codec import PlainRow
from reports.results import Check, Verdict, decode, leading_check


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
    """Run a claim or job and hand its rows on; fail or skip for the first verdict that is not green."""
    run = run_of(item.config)
    outcome = isolation.run(unit.id)
    rows = unit_rows(run, unit, outcome)
    if isinstance(unit, Claim) and not is_green(run, rows[-1]):
        rows[-1] |= shown_of(run.workbench(), unit, rows)
    item.stash[FINDING] = json.dumps({"rows": rows, "peak_mib": max(outcome.peak_mib, own_peak_mib())})
    for row in judged_rows(rows):
        item.user_properties += [(row["kind"], unit.id), ("verdict", row["verdict"]), ("rule", _rule(row, rows))]
        if is_green(run, row):
            continue
        if row["verdict"] == Verdict.UNEXERCISED:
            pytest.skip(reason_of(row))
        pytest.fail(reason_of(row), pytrace=False)


def _rule(row: PlainRow, rows: list[PlainRow]) -> str:
    """The rule that a claim's or model's verdict is under; "" where nothing is to be said against it."""
    if row["kind"] == "model":
        return str(row.get("evidence", {}).get("rule", ""))
    lead = leading_check([check for check in map(decode, rows) if isinstance(check, Check)])
    return lead.rule if lead is not None else ""
