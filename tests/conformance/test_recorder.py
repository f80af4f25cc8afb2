"""The recorder: from reports of stages to rows, verdicts, footer and exit status; and the stage's own row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
from fake_backends import fakes

from backends.base import Backend, Representation
from conformance import test_claims as stages
from conformance.checks import Check
from conformance.claims import Claim
from conformance.options import Options
from conformance.pipeline import STAGES, Workbench
from conformance.session import Recorder, Run, open_run, param_id, run_of
from reports.results import Outcome, Results, Verdict, read_results

Row = dict[str, Any]
PASS = Verdict.VERIFIED


def claim(name: str) -> Claim:
    parts = {"pattern": name, "dtype_config": "static:int8", "flow": "ptq", "scheme": "no_weight"}
    return Claim(id=f"{name}/static:int8", entry=cast(Any, None), dtypes=cast(Any, None), **parts)


def options(folder: Path, **changes: Any) -> Options:
    plain = Options(
        backend="fakes:Good", report_dir=folder, seed=3, profile="full", max_examples=None, claims=(),
        list_claims=False, strict=False,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


class Session:
    """A run with claims of given names, whose stages report what a test says."""

    def __init__(self, folder: Path, names: Iterable[str], *, strict: bool = False, selected: int = 99) -> None:
        self.claims = tuple(claim(name) for name in names)
        self.run = Run(
            options=options(folder, strict=strict), backend=fakes.Good(), config_name="c", claims=self.claims,
            selected=self.claims[:selected],
        )  # fmt: skip
        self.path = folder / "results.jsonl"
        self.recorder = Recorder(self.run)
        self.recorder.start(self.node(c, stage) for c in self.run.selected for stage in STAGES)

    @staticmethod
    def node(of: Claim, stage: str) -> str:
        return f"conformance/test_claims.py::test_claim[{param_id(of.id, stage)}]"

    def report(self, of: Claim, stage: str, when: str, outcome: str = "passed", text: str = "", **extra: Any) -> None:
        report = pytest.TestReport(
            self.node(of, stage), ("f", 0, "f"), {}, cast(Any, outcome), text, cast(Any, when), **extra
        )
        self.recorder.take(report)

    def stage(self, of: Claim, stage: str, verdict: Verdict = PASS, outcome: str = "pass", **parts: Any) -> None:
        row = Check(stage=stage, rule="R-1", outcome=outcome, verdict=verdict, **parts).row(of.id, 0.5)
        finding: Row = {"check": row} | ({"decisions": [{"node": "x"}]} if stage == STAGES[-1] else {})
        self.report(of, stage, "setup")
        self.report(of, stage, "call", "failed" if outcome in ("fail", "error") else "passed", conformance=finding)
        self.report(of, stage, "teardown")

    def whole(self, of: Claim, last: Verdict = PASS, outcome: str = "pass", **parts: Any) -> None:
        for stage in STAGES[:-1]:
            self.stage(of, stage)
        self.stage(of, STAGES[-1], last, outcome, **parts)

    def finish(self, pytest_status: int = 0) -> tuple[int, Results]:
        status = self.recorder.finish(pytest_status)
        return status, read_results(self.path)


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    return lambda *names, **settings: Session(tmp_path, names, **settings)


def test_verified_claims_pass(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    for c in run.claims:
        run.whole(c, max_lsb=0.4, slack_lsb=0.5)
    status, results = run.finish()
    assert status == 0 and results.outcome is Outcome.PASS and not results.problems
    first = results.claims[0]
    assert (first.verdict, first.reason, first.max_lsb, first.waived) == (PASS, "", 0.4, False)
    assert first.decisions == [{"node": "x"}] and first.seconds == 0.5 * len(STAGES)
    assert first.repro == "pytest conformance --backend=fakes:Good --seed=3 --claim a/static:int8"


def test_rows_are_written_as_they_come(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    run.whole(run.claims[0])
    results = read_results(run.path)
    assert [c.claim for c in results.claims] == ["a/static:int8"] and len(results.checks) == len(STAGES)
    assert results.outcome is Outcome.INCOMPLETE


@pytest.mark.parametrize(
    ("verdict", "outcome", "strict", "status"),
    [
        (Verdict.QUALITY, "pass", False, 0),
        (Verdict.QUALITY, "pass", True, 1),
        (Verdict.UNEXERCISED, "skip", False, 1),
        (Verdict.FALLBACK, "pass", False, 1),
        (Verdict.REFUTED, "fail", False, 1),
    ],
)
def test_the_worst_check_decides(
    session: Callable[..., Session], verdict: Verdict, outcome: str, strict: bool, status: int
) -> None:
    run = session("a", strict=strict)
    run.whole(run.claims[0], verdict, outcome, message="because of this")
    found, results = run.finish()
    assert (found, results.claims[0].verdict, results.claims[0].reason) == (
        status,
        verdict,
        "because of this",
    )
    assert results.outcome is (Outcome.FAIL if status else Outcome.PASS)


def test_a_skip_does_not_hide_the_failure_before_it(session: Callable[..., Session]) -> None:
    run = session("a")
    run.stage(run.claims[0], STAGES[0], Verdict.REFUTED, "fail", message="the cause")
    for stage in STAGES[1:]:
        run.stage(run.claims[0], stage, Verdict.REFUTED, "skip", message=f"not reached: {STAGES[0]}")
    assert run.finish()[1].claims[0].reason == "the cause"


def test_an_infinite_distance_is_the_largest(session: Callable[..., Session]) -> None:
    run = session("a")
    c = run.claims[0]
    for stage, distance in zip(STAGES, [7.0, "inf", *[0.1] * len(STAGES)], strict=False):
        run.stage(c, stage, max_lsb=cast(Any, distance))
    assert run.finish()[1].claims[0].max_lsb == "inf"


def test_a_dead_worker_crashes_the_claim_and_keeps_what_was_known(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    run.stage(run.claims[0], STAGES[0])
    run.report(run.claims[0], STAGES[1], "???", "failed", "worker 'gw1' crashed while running …")
    run.whole(run.claims[1])
    status, results = run.finish(1)
    assert status == 1 and results.outcome is Outcome.FAIL and not results.problems
    assert [c.verdict for c in results.claims] == [Verdict.CRASHED, PASS]
    assert [(c.stage, c.verdict) for c in results.checks][:2] == [
        (STAGES[0], PASS),
        (STAGES[1], Verdict.CRASHED),
    ]
    assert "gw1" not in run.path.read_text()


@pytest.mark.parametrize(
    ("when", "text", "verdict"),
    [
        ("call", "SystemExit: 3", Verdict.CRASHED),
        ("call", "Failed: Timeout (>1.0s) from pytest-timeout.", Verdict.TIMEOUT),
        ("setup", "TypeError: Workbench", Verdict.UNEXERCISED),
    ],
)
def test_a_stage_that_leaves_no_check_gets_one(
    session: Callable[..., Session], when: str, text: str, verdict: Verdict
) -> None:
    run = session("a")
    for stage in STAGES[:-1]:
        run.stage(run.claims[0], stage)
    run.report(run.claims[0], STAGES[-1], when, "failed", text)
    run.report(run.claims[0], STAGES[-1], "teardown")
    status, results = run.finish()
    assert status == 1 and results.claims[0].verdict is verdict
    assert results.checks[-1].evidence["traceback"] == text


def test_claims_that_are_missing_make_the_run_incomplete(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    run.whole(run.claims[0])
    run.stage(run.claims[1], STAGES[0])
    status, results = run.finish()
    assert status == 1 and results.footer and results.outcome is Outcome.INCOMPLETE
    assert [c.claim for c in results.claims] == ["a/static:int8"]
    assert "INCOMPLETE" in run.recorder.summary


def test_a_selection_may_pass_and_says_what_it_left_out(session: Callable[..., Session]) -> None:
    run = session("a", "b", "c", selected=1)
    run.whole(run.claims[0])
    status, results = run.finish()
    assert status == 0 and results.outcome is Outcome.PASS
    assert (results.header.claims, results.header.claims_in_config, results.header.pairs) == (1, 3, 3)


def test_pytests_own_failure_is_never_a_pass(session: Callable[..., Session]) -> None:
    run = session("a")
    run.whole(run.claims[0])
    status, results = run.finish(2)
    assert status == 2 and results.outcome is Outcome.FAIL


def test_reports_of_other_tests_are_left_alone(session: Callable[..., Session]) -> None:
    run = session("a")
    run.recorder.take(pytest.TestReport("x.py::test_x", ("x.py", 0, "x"), {}, "failed", "no", "call"))
    run.recorder.start([run.node(run.claims[0], STAGES[0])])
    assert len(run.path.read_text().splitlines()) == 1


def test_parameter_ids_are_unique_and_left_as_they_are_by_pytest() -> None:
    texts = ["a[0..1]/x", "größe", "gr\\xf6\\xdfe", "two\nlines", "a::b"]
    ids = [param_id(text, "config") for text in texts]
    assert len(set(ids)) == len(ids)
    assert all(i.isascii() and i.isprintable() and "\\" not in i for i in ids)
    assert ids[0] == "a[0..1]/x-config"


class Bench:
    """A pipeline that returns, or raises, what a test gives it."""

    def __init__(self, found: object) -> None:
        self.found = found

    def check(self, of: Claim, stage: str) -> Check:
        if isinstance(self.found, Exception):
            raise self.found
        return cast(Check, self.found)

    def decisions(self, of: Claim) -> list[Row]:
        return cast(list[Row], self.found)


def row_of(found: object) -> Row:
    return stages.check_row(cast(Workbench, Bench(found)), claim("a"), STAGES[0])


def test_an_exception_in_a_stage_is_the_suites_own_error() -> None:
    row = row_of(ZeroDivisionError("one\ntwo"))
    assert (row["outcome"], row["verdict"]) == ("error", "UNEXERCISED")
    assert row["message"] == "internal error of the suite: ZeroDivisionError: one two"
    assert "Traceback" in row["evidence"]["traceback"]


@pytest.mark.parametrize("evidence", [{"x": object()}, {"x": float("nan")}, {"graph": 3}])
def test_a_row_that_the_file_cannot_hold_is_the_suites_own_error(evidence: Row) -> None:
    row = row_of(Check(stage="s", rule="r", outcome="pass", verdict=PASS, evidence=evidence))
    assert row["outcome"] == "error" and "internal error of the suite" in row["message"]


def test_text_that_cannot_be_encoded_is_replaced() -> None:
    assert row_of(Check(stage="s", rule="r", outcome="fail", verdict=PASS, message="a\udc80b"))["message"] == "a?b"


def test_what_differs_between_processes_is_left_out() -> None:
    evidence = {"traceback": 'File "<eval_with_key>.138", line 8: <Net object at 0x7f12ab>'}
    row = row_of(Check(stage="s", rule="r", outcome="fail", verdict=PASS, evidence=evidence))
    assert row["evidence"]["traceback"] == 'File "<eval_with_key>", line 8: <Net object at 0x>'


@pytest.mark.parametrize(
    ("found", "told"),
    [([{"a": 1, "b": (1, 2)}], [{"a": 1, "b": "[1, 2]"}]), ([{"a": object()}], None), (None, None)],
)
def test_decisions_are_scalars(found: object, told: list[Row] | None) -> None:
    rows = stages.decisions(cast(Workbench, Bench(found)), claim("a"))
    assert rows == told if told else "internal error of the suite" in rows[0]["error"]


@pytest.mark.parametrize(
    ("backend", "parts"),
    [
        (fakes.NoConfig(), "what backend_config\\(\\) returned cannot be read: ConfigError: expected"),
        (fakes.ClaimsNothing(), "backend good: backend_config\\(\\) claims nothing"),
        (fakes.BadCapabilities(), "backend good: capabilities\\(\\) raised ValueError: .*per_group"),
    ],
)
def test_a_config_that_cannot_be_had_is_a_usage_error(tmp_path: Path, backend: Backend, parts: str) -> None:
    with pytest.raises(pytest.UsageError, match=parts):
        open_run(options(tmp_path), backend)


def test_a_config_may_come_as_torchs_own_or_as_a_dict(tmp_path: Path) -> None:
    class AsDict(fakes.Good):
        representation = Representation.DECOMPOSED

        def backend_config(self) -> Any:
            return super().backend_config().to_dict()

    ours, theirs = (open_run(options(tmp_path), backend) for backend in (fakes.Good(), AsDict()))
    assert [c.id for c in ours.claims] == [c.id for c in theirs.claims]
    assert ours.header(2)["config_sha256"] == theirs.header(2)["config_sha256"]


def test_outside_of_a_run_there_is_no_run(pytestconfig: pytest.Config) -> None:
    with pytest.raises(pytest.UsageError, match="pytest conformance --backend=NAME"):
        run_of(pytestconfig)
