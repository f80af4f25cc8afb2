"""The suite's one test: a stage of a claim (docs/architecture.md, "Stages").

What a stage finds becomes a results-file row here, in whichever process ran it; the row reaches the
controlling process with the test's report.
"""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from conformance.checks import Check
from conformance.claims import Claim
from conformance.pipeline import STAGES, Workbench
from conformance.session import FINDING, run_of
from reports.results import Verdict, decode

Row = dict[str, Any]
_VOLATILE = re.compile(r"(<eval_with_key>)\.\d+|( at 0x)[0-9a-f]+")


@pytest.fixture(scope="session")
def workbench(pytestconfig: pytest.Config) -> Workbench:
    """The pipeline with what it has made so far, one per process."""
    run = run_of(pytestconfig)
    options = run.options
    return Workbench(run.backend, seed=options.seed, profile=options.profile, max_examples=options.max_examples)


def test_claim(claim: Claim, stage: str, workbench: Workbench, request: pytest.FixtureRequest) -> None:
    """One stage of one claim holds."""
    row = check_row(workbench, claim, stage)
    finding: Row = {"check": row}
    if stage == STAGES[-1]:
        finding["decisions"] = decisions(workbench, claim)
    item = request.node
    item.stash[FINDING] = finding
    item.user_properties += [(key, row[key]) for key in ("claim", "rule", "verdict")]
    if row["outcome"] in ("fail", "error"):
        pytest.fail(row["message"], pytrace=False)
    if row["outcome"] == "skip":
        pytest.skip(row["message"])


def check_row(workbench: Workbench, claim: Claim, stage: str) -> Row:
    """Run one stage and return its row; an exception, or a row outside the schema, is the suite's error."""
    started = time.perf_counter()
    try:
        row = plain(workbench.check(claim, stage).row(claim.id, time.perf_counter() - started))
        row["seconds"] = round(time.perf_counter() - started, 6)
        decode(row)
    except Exception as error:
        return plain(internal_error(stage, error).row(claim.id, time.perf_counter() - started))
    return row


def decisions(workbench: Workbench, claim: Claim) -> list[Row]:
    """Return what the flow decided for the claim; scalars alone, as the schema asks."""
    try:
        found = [plain(decision) for decision in workbench.decisions(claim)]
    except Exception as error:
        found = [plain({"error": f"internal error of the suite: {_told(error)}"})]
    return [{key: _scalar(value) for key, value in decision.items()} for decision in found]


def internal_error(stage: str, error: Exception) -> Check:
    """Return the check that stands for a stage in which the suite itself failed."""
    return Check(
        stage=stage,
        rule="",
        outcome="error",
        verdict=Verdict.UNEXERCISED,
        message=f"internal error of the suite: {_told(error)}",
        evidence={"traceback": "".join(traceback.format_exception(error))},
    )


def plain(row: Mapping[str, object]) -> Row:
    """Return the row as it will be in the file: plain builtins, text without lone surrogates.

    Counters and addresses, which differ from process to process, are left out of its texts.
    Raises TypeError or ValueError for what JSON cannot hold.
    """
    text = _VOLATILE.sub(r"\1\2", json.dumps(row, allow_nan=False, ensure_ascii=False))
    found: Row = json.loads(text.encode("utf-8", "replace"))
    return found


def _scalar(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
