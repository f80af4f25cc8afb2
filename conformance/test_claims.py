"""The suite's tests: one for each claim, and one for each job (docs/architecture.md, "Stages").

Each test's rows become lines of the results file in the process that ran it; the lines reach the controlling process
with the test's report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fx_quant_conformance.conformance.machine.process import own_peak_mib
from fx_quant_conformance.conformance.run.judging import open_workplaces, rows_of
from fx_quant_conformance.conformance.run.outline import Unit
from fx_quant_conformance.conformance.run.recorder import PAYLOAD
from fx_quant_conformance.conformance.run.session import run_of
from fx_quant_conformance.conformance.run.workplaces import Workplaces
from fx_quant_conformance.reports.codec import line_of
from fx_quant_conformance.reports.results import leading_check
from fx_quant_conformance.reports.schema import Check, ClaimResult, Judged, ModelResult
from fx_quant_conformance.reports.text import show
from fx_quant_conformance.reports.verdicts import Verdict


@pytest.fixture(scope="session")
def places(pytestconfig: pytest.Config) -> Iterator[Workplaces]:
    """Return where the units of a run are judged."""
    places = open_workplaces(run_of(pytestconfig))
    yield places
    places.close()


def test_job(job: Unit, places: Workplaces, request: pytest.FixtureRequest) -> None:
    """A model is as good as its patterns; a measurement succeeds."""
    exercise(job, places, request.node)


def test_claim(claim: Unit, places: Workplaces, request: pytest.FixtureRequest) -> None:
    """One claim holds in every stage."""
    exercise(claim, places, request.node)


def exercise(unit: Unit, places: Workplaces, item: pytest.Item) -> None:
    """Run a claim or job and attach its rows to the test; fail or skip for the first verdict that does not pass."""
    run = run_of(item.config)
    work = places.run(unit.id)
    rows = rows_of(run, unit, work)
    checks = [row for row in rows if isinstance(row, Check)]
    last = rows[-1] if rows else None
    is_failing = isinstance(last, ClaimResult) and last.verdict is not Verdict.UNSHOWN and not last.passes
    if isinstance(last, ClaimResult) and is_failing:
        rows[-1] = places.reproduce(last, checks)
    peak_mib = max(work.peak_mib, own_peak_mib())
    item.stash[PAYLOAD] = json.dumps({"lines": [line_of(row) for row in rows], "peak_mib": peak_mib})
    for judged in (row for row in rows if isinstance(row, Judged)):
        rule = _rule(judged, checks)
        item.user_properties += [(judged.kind, unit.id), ("verdict", judged.verdict.value), ("rule", rule)]
        if judged.passes:
            continue
        if judged.verdict is Verdict.UNEXERCISED:
            pytest.skip(show(judged.reason))
        pytest.fail(show(judged.reason), pytrace=False)


def _rule(judged: Judged, checks: list[Check]) -> str:
    """Return the rule that explains a claim's or model's verdict; "" if nothing is wrong."""
    if isinstance(judged, ModelResult):
        return judged.rule
    lead = leading_check(checks)
    return lead.rule if lead is not None else ""
