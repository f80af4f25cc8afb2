"""The recorder: from reports of tests to rows, verdicts, footer and exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fx_quant_conformance.conformance.machine.child import Ending
from fx_quant_conformance.conformance.machine.messages import Begin, Tally
from fx_quant_conformance.conformance.run.recorder import Recorder
from fx_quant_conformance.conformance.run.resume import Earlier
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.schema import Measurement, Waiver, evidence
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from tests.conformance.support.made_up_runs import PASS, STAGES, Session, check, checks, model, waiver, work


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    return lambda *names, **settings: Session(tmp_path, names, **settings)


@pytest.mark.parametrize(
    ("verdict", "result", "status"),
    [
        (Verdict.TOLERATED, "pass", 0),
        (Verdict.UNEXERCISED, "skip", 1),
        (Verdict.FALLBACK, "pass", 1),
        (Verdict.REFUTED, "fail", 1),
    ],
)
def test_the_worst_check_decides(session: Callable[..., Session], verdict: Verdict, result: str, status: int) -> None:
    run = session("a")
    run.whole(run.claims[0], verdict, result, message="because of this")
    found, results = run.finish()
    assert (found, results.claims[0].verdict) == (status, verdict)
    assert results.claims[0].reason == "because of this"
    assert results.outcome is (Outcome.FAIL if status else Outcome.PASS)
    assert not results.problems


def test_a_skip_does_not_hide_the_failure_before_it(session: Callable[..., Session]) -> None:
    run = session("a")
    (c,) = run.claims
    later = [check(c, stage, Verdict.REFUTED, "skip", message="not reached") for stage in STAGES[1:]]
    run.ended(c, work(check(c, STAGES[0], Verdict.REFUTED, "fail", message="the cause"), *later))
    assert run.finish()[1].claims[0].reason == "the cause"


def test_foreign_code_is_in_the_header_or_was_met_later(tmp_path: Path) -> None:
    run = Session(tmp_path, ["a"])
    run.recorder.note_foreign_code(["late 1"])
    run.ended(run.claims[0], work(*checks(run.claims[0]), Tally(foreign_code=["of the judge 1"])))
    results = run.finish()[1]
    assert results.footer and (results.header.foreign_code, results.footer.foreign_code) == ([], ["late 1"])
    assert results.claims[0].foreign_code == ["of the judge 1"]
    again = Recorder(run.run, Earlier(foreign_code=results.foreign_code))
    again.note_foreign_code(["xyz 1"])
    again.start(run.node(unit) for unit in run.run.units.values())
    again.finish(1)
    assert read_results(run.path).header.foreign_code == ["late 1", "of the judge 1", "xyz 1"]


def test_an_infinite_distance_is_the_largest(session: Callable[..., Session]) -> None:
    run = session("a")
    (c,) = run.claims
    distances = [7.0, "inf", *[0.1] * len(STAGES)]
    run.ended(c, work(*(check(c, s, max_lsb=cast(Any, d)) for s, d in zip(STAGES, distances, strict=False))))
    assert run.finish()[1].claims[0].max_lsb == "inf"


@pytest.mark.parametrize(("values", "failing"), [({}, 8), ({"nondeterministic": True}, None)])
def test_a_claim_counts_what_fails_in_all_its_checks_unless_it_is_chance(
    session: Callable[..., Session], values: dict[str, object], failing: int | None
) -> None:
    run = session("a")
    (c,) = run.claims
    numerics = check(c, "numerics", Verdict.REFUTED, "fail", cases=9, failing=3, evidence=evidence(values))
    others = [check(c, stage) for stage in STAGES if stage not in ("numerics", "invariance")]
    run.ended(c, work(*others, numerics, check(c, "invariance", Verdict.REFUTED, "fail", cases=7, failing=5)))
    results = run.finish()[1]
    assert [(each.cases, each.failing) for each in results.checks if each.failing] == [(9, 3), (7, 5)]
    assert results.claims[0].failing == failing


@pytest.mark.parametrize(
    ("ending", "verdict", "key"),
    [
        (Ending.DIED, Verdict.CRASHED, "printed"),
        (Ending.TIMEOUT, Verdict.TIMEOUT, "printed"),
        (Ending.LOST, Verdict.UNEXERCISED, "printed"),
        (Ending.ERROR, Verdict.UNEXERCISED, "traceback"),
    ],
)
@pytest.mark.parametrize("done", [0, 4, len(STAGES)])
def test_work_that_is_cut_short_leaves_a_check_for_every_stage(
    session: Callable[..., Session], done: int, ending: Ending, verdict: Verdict, key: str
) -> None:
    run = session("a", "b")
    (c, other) = run.claims
    sent = [check(c, stage) for stage in STAGES[:done]]
    run.ended(c, work(*sent, ending=ending, message="SIGX", text="at 0x7f12ab34cd"))
    run.whole(other)
    status, results = run.finish(1)
    found = [row for row in results.checks if row.claim == c.id]
    assert status == 1 and not results.problems
    assert [row.stage for row in found] == [*STAGES] + [STAGES[-1]] * (done == len(STAGES))
    assert [row.outcome for row in found] == ["pass"] * done + ["error"] + ["skip"] * (len(STAGES) - done - 1)
    assert {row.verdict for row in found[done:]} == {verdict}
    assert "SIGX" in found[done].message and found[done].evidence.get(key) == "at 0x"
    assert found[done].seconds == 9.0 - 0.5 * done
    assert [row.verdict for row in results.claims] == [verdict, PASS]
    assert results.claims[0].reason == found[done].message


def test_a_process_that_dies_names_the_stage_and_the_case_that_it_was_at(session: Callable[..., Session]) -> None:
    run = session("a")
    (c,) = run.claims
    places = [Begin(stage="lower", case="default"), Begin(stage="numerics", case="default")]
    run.ended(c, work(check(c, STAGES[0]), *places, ending=Ending.DIED, message="SIGX"))
    _, results = run.finish(1)
    said = {row.stage: (row.outcome, row.verdict, row.message) for row in results.checks}
    assert said[STAGES[0]] == ("pass", PASS, "")
    assert said["numerics"] == ("error", Verdict.CRASHED, "default: SIGX")
    for stage in set(STAGES) - {STAGES[0], "numerics"}:  # other cases had not been there yet
        assert said[stage] == ("skip", Verdict.CRASHED, "not completed: numerics ended the claim")
    assert results.claims[0].reason == "default: SIGX"


def test_a_dead_worker_of_pytest_costs_the_claim_that_it_had(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    run.report(run.claims[0], "???", "failed", "worker 'gw1' crashed while running …")
    run.whole(run.claims[1])
    status, results = run.finish(1)
    assert status == 1 and results.outcome is Outcome.FAIL and not results.problems
    assert [c.verdict for c in results.claims] == [Verdict.UNEXERCISED, PASS]
    assert results.claims[0].reason.startswith("internal error of the suite: the worker process died")
    assert "gw1" not in run.path.read_text()


def test_a_test_that_fails_without_rows_is_the_suites_own_error(session: Callable[..., Session]) -> None:
    run = session("a")
    run.report(run.claims[0], "setup", "failed", "TypeError: Bench")
    run.report(run.claims[0], "teardown")
    status, results = run.finish(1)
    assert status == 1 and results.claims[0].verdict is Verdict.UNEXERCISED
    assert "internal error of the suite: the test's setup failed" in results.claims[0].reason
    assert results.checks[0].evidence["traceback"] == "TypeError: Bench"


def test_claims_that_are_missing_make_the_run_incomplete(session: Callable[..., Session]) -> None:
    run = session("a", "b")
    run.whole(run.claims[0])
    run.report(run.claims[1], "setup")
    status, results = run.finish()
    assert status == 1 and results.footer and results.outcome is Outcome.INCOMPLETE
    assert [c.claim for c in results.claims] == ["a/static:int8"]
    assert "INCOMPLETE because the run stopped after 1 of 2 claims" in run.recorder.verdict


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
    run.recorder.start([run.node(run.claims[0])])
    assert len(run.path.read_text().splitlines()) == 1


# Models and measurements.


def test_models_are_judged_and_measurements_are_kept(session: Callable[..., Session]) -> None:
    run = session("a", jobs=["model/resnet/ptq", "fact/fingerprint/linear"])
    run.whole(run.claims[0])
    run.ended(run.jobs[0], work(model(verdict=Verdict.REFUTED)))
    first = Measurement(topic="fingerprint", subject="linear", values={"ties": "half_even"})
    run.ended(run.jobs[1], work(first, replace(first, subject="add")))
    status, results = run.finish()
    assert status == 1 and results.outcome is Outcome.FAIL and not results.problems
    assert [(row.model, row.verdict) for row in results.models] == [("model/resnet/ptq", Verdict.REFUTED)]
    assert [row.subject for row in results.measurements] == ["add", "linear"]


def test_a_job_that_is_missing_makes_the_run_incomplete(session: Callable[..., Session]) -> None:
    run = session("a", jobs=["fact/fingerprint/linear"])
    run.whole(run.claims[0])
    assert run.finish()[1].outcome is Outcome.INCOMPLETE


@pytest.mark.parametrize(
    ("ending", "verdict"),
    [
        (Ending.DIED, Verdict.CRASHED),
        (Ending.TIMEOUT, Verdict.TIMEOUT),
        (Ending.LOST, Verdict.UNEXERCISED),
        (Ending.ERROR, Verdict.UNEXERCISED),
    ],
)
def test_a_job_that_is_cut_short_says_so(session: Callable[..., Session], ending: Ending, verdict: Verdict) -> None:
    run = session("a", jobs=["model/resnet/ptq", "fact/fingerprint/nn.Linear/x"])
    run.whole(run.claims[0])
    run.ended(run.jobs[0], work(model(), ending=ending, message="SIGX", text="told"))
    run.ended(run.jobs[1], work(ending=ending, message="SIGX"))
    status, results = run.finish(1)
    assert status == 1 and not results.problems
    assert [(row.verdict, "SIGX" in row.reason) for row in results.models] == [(verdict, True)]
    (row,) = results.measurements
    assert (row.topic, row.subject) == ("fingerprint", "nn.Linear/x") and "SIGX" in str(row.values["error"])


# Waivers.


def test_a_waived_claim_or_model_passes_and_says_by_what(session: Callable[..., Session]) -> None:
    waivers = [waiver("a/static:int8", max_lsb=float("inf")), waiver("model/resnet/ptq", Verdict.CRASHED)]
    run = session("a", jobs=["model/resnet/ptq"], waivers=waivers)
    run.whole(run.claims[0], Verdict.REFUTED, "fail", max_lsb=18.0)
    run.ended(run.jobs[0], work(ending=Ending.DIED, message="SIGX"))
    status, results = run.finish()
    assert (status, results.outcome, results.problems) == (0, Outcome.PASS, ())
    assert results.claims[0].waived and results.claims[0].verdict is Verdict.REFUTED
    kept = Waiver(reason="issue 12", url="https://a.b", expires=None, max_lsb="inf")
    assert results.claims[0].waiver == kept
    assert results.models[0].waiver == replace(kept, max_lsb=None)


def test_a_waiver_that_does_not_cover_says_why_in_the_reason(session: Callable[..., Session]) -> None:
    run = session("a", waivers=[waiver("a/static:int8", max_lsb=2.0)])
    run.whole(run.claims[0], Verdict.REFUTED, "fail", max_lsb=18.0, message="far off")
    status, results = run.finish(1)
    (found,) = results.claims
    assert status == 1 and not found.waived and found.waiver is None
    assert found.reason.startswith("far off (not waived: npu.toml: waiver 1") and "18 LSB" in found.reason


@pytest.mark.parametrize(("profile", "status"), [("full", 1), ("quick", 0)])
def test_a_waiver_of_what_passes_fails_a_full_run(session: Callable[..., Session], profile: str, status: int) -> None:
    run = session("a", waivers=[waiver("a/static:int8")], profile=profile)
    run.whole(run.claims[0])
    found, results = run.finish()
    assert found == status and len(results.problems) == status
    assert all("now passes" in problem and "now passes" in run.recorder.summary for problem in results.problems)
