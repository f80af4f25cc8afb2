"""What a child process does: the rows of a claim or job, as the file takes them; and how a process is warmed."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from backends.reference import ReferenceBackend
from conformance.claims.claim import Claim, enumerate_claims
from conformance.pipeline.claim_run import STAGES, At
from conformance.pipeline.job import Job
from conformance.pipeline.workbench import Workbench
from conformance.run import exercise
from conformance.stages.check import Check, plain
from reports.codec import decode
from reports.schema import Verdict
from tests.conformance.support.fake_backends import fakes

Row = dict[str, Any]
CLAIM = Claim(
    id="a", pattern="a", dtype_config="static", flow="ptq", scheme="x", entry=cast(Any, 0), dtypes=cast(Any, 0)
)
FACT = {"kind": "fact", "topic": "t", "subject": "s", "values": {"x": 1}}


def check(**changes: Any) -> Check:
    return Check(**{"stage": "fuse", "rule": "R-1", "outcome": "pass", "verdict": Verdict.VERIFIED} | changes)


class Bench:
    """A pipeline that gives the steps and decisions that a test gives it."""

    def __init__(self, *found: Check | At, decisions: object = ()) -> None:
        self.given = found
        self.found = decisions

    def steps(self, claim: Claim) -> Iterator[Check | At]:
        yield from self.given

    def decisions(self, claim: Claim) -> object:
        return self.found

    def facts(self, claim: Claim) -> list[Row]:
        return []


def rows_of(*found: Check | At, decisions: object = ()) -> Iterator[Row]:
    return exercise.claim_rows(cast(Workbench, Bench(*found, decisions=decisions)), CLAIM)


def test_checks_come_one_by_one_and_then_the_decisions() -> None:
    given = (check(seconds=0.25), At(stage="lower", case="default"), check(stage="lower"))
    rows = list(rows_of(*given, decisions=[{"a": 1, "b": (1, 2), "c": None}]))
    assert [row.get("stage") for row in rows] == ["fuse", None, "lower", None]
    assert (rows[0]["claim"], rows[0]["seconds"]) == ("a", 0.25)
    assert rows[1] == {"at": ["lower", "default"]}
    assert rows[3] == {"decisions": [{"a": 1, "b": "[1, 2]", "c": None}], "graphs": {}}


@pytest.mark.parametrize("evidence", [{"x": object()}, {"x": float("nan")}, {"graph": 3}])
def test_a_row_that_the_file_cannot_hold_is_refused_where_it_is_made(evidence: Row) -> None:
    rows = rows_of(check(), check(evidence=evidence))
    assert next(rows)["outcome"] == "pass"
    with pytest.raises((TypeError, ValueError)):
        next(rows)


def test_rows_of_a_job_are_checked_too() -> None:
    def run(bench: Workbench) -> Iterator[Row]:
        yield FACT
        yield {"kind": "fact", "topic": "t"}

    rows = exercise.job_rows(cast(Workbench, None), Job(id="fact/t/s", run=run))
    assert next(rows) == FACT
    with pytest.raises(ValueError, match="fact row has no 'subject', 'values'"):
        next(rows)


def test_no_path_of_the_machine_is_in_a_row() -> None:
    """Where a package, Python and the suite stand differs from machine to machine; what is in them does not."""
    files = {torch.__file__: "torch/__init__.py", json.__file__: "json/__init__.py",
             fakes.__file__: "tests/conformance/support/fake_backends/fakes.py"}  # fmt: skip
    for path, kept in files.items():
        assert plain({"traceback": f'File "{path}", line 3'}) == {"traceback": f'File "{kept}", line 3'}


def test_text_that_cannot_be_encoded_is_replaced() -> None:
    assert plain({"message": "a\udc80b"}) == {"message": "a?b"}


def test_what_differs_between_processes_is_left_out() -> None:
    told = 'File "<eval_with_key>.138", line 8: <Net object at 0x7f12ab>; Thread 0x00007f00; 0x1F is kept'
    kept = 'File "<eval_with_key>", line 8: <Net object at 0x>; Thread 0x; 0x1F is kept'
    assert plain({"traceback": told}) == {"traceback": kept}


def test_a_unit_is_served_by_its_id() -> None:
    backend = fakes.Good()
    workbench = Workbench(backend, seed=0, profile="quick")
    claims = enumerate_claims(workbench.config, workbench.capabilities)
    job = Job(id="fact/t/s", run=lambda bench: iter([FACT | {"subject": bench.backend.name}]))
    serve = exercise.server(workbench, {job.id: job, claims[0].id: claims[0]})
    assert [row["subject"] for row in serve(job.id)] == ["good"]
    *checks, decisions = (row for row in serve(claims[0].id) if "at" not in row)
    assert [row["stage"] for row in checks] == list(STAGES) and decisions["decisions"]
    assert all(decode(row) for row in checks)


def test_a_process_is_warmed_by_claims_that_the_reference_backend_passes() -> None:
    reference = ReferenceBackend()
    claims = enumerate_claims(reference.backend_config(), reference.capabilities())
    assert set(exercise.WARMING) <= {claim.pattern for claim in claims}


def test_warming_does_not_lower_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "WARMING", exercise.WARMING[:1])
    exercise.warm(fakes.LowerRaises())
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_a_backend_warms_what_it_wants_and_a_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exercise, "WARMING", ())
    warmed = list[str]()
    backend = fakes.LowerRaises()
    monkeypatch.setattr(backend, "warm_up", lambda: warmed.append("once"))
    exercise.warm(backend)
    assert warmed == ["once"]

    def no_driver() -> None:
        raise ImportError("no driver")

    monkeypatch.setattr(backend, "warm_up", no_driver)
    with pytest.warns(UserWarning, match=r"warm_up\(\) raised ImportError: no driver; the claims start cold"):
        exercise.warm(backend)
    gc.unfreeze()
