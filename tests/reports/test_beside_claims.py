"""Rows beside the claims (models, measurements, waivers), problems of a run, and what two runs have in common."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fx_quant_conformance.reports.codec import decode, encode
from fx_quant_conformance.reports.results import ResultsError, read_results
from fx_quant_conformance.reports.verdicts import Outcome
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.support.comparable import comparable


def test_a_row_of_any_kind_survives_the_round_trip(made: Any) -> None:
    found = made.everything()
    assert {row["kind"] for row in found} == {"header", "claim", "check", "model", "measurement"}
    for row in found:
        assert encode(decode(json.loads(json.dumps(row)))) == row


def test_models_and_measurements_are_read_and_counted(runs: Any, made: Any) -> None:
    found = [
        runs.header(pairs=1),
        runs.claim(),
        made.model(),
        made.model("model/b/qat"),
        made.measurement(),
        made.measurement("conv2d"),
        made.measurement("add"),
    ]
    results = made.results(found)
    assert (results.outcome, results.problems) == (Outcome.PASS, ())
    assert [row.model for row in results.models] == ["model/b/qat", "model/resnet/ptq"]  # in one order
    assert [row.subject for row in results.measurements] == ["add", "conv2d", "linear"]
    assert results.footer is not None
    assert (results.footer.models, results.footer.measurements) == ({"VERIFIED": 2}, 3)


@pytest.mark.parametrize(("changes", "outcome"), [({}, "FAIL"), ({"waived": True}, "PASS")])
def test_a_model_that_does_not_pass_fails_the_run_unless_waived(
    runs: Any, made: Any, changes: Any, outcome: str
) -> None:
    red = made.model("model/unet/ptq", verdict="REFUTED", waiver=made.waiver, **changes)
    results = made.results([runs.header(pairs=1), runs.claim(), red])
    assert results.outcome == outcome and not results.problems


def test_the_writer_calls_no_failing_model_and_no_problem_a_pass(runs: Any, made: Any) -> None:
    for number, (row, problems) in enumerate(
        [(made.model(verdict="CRASHED"), []), (runs.claim(), ["a waiver expired"])]
    ):
        with ResultsWriter(runs.directory / f"{number}.jsonl") as writer:
            writer.write_line(json.dumps(runs.header()))
            writer.write_line(json.dumps(row))
            with pytest.raises(ResultsError, match="outcome PASS with exit status 0"):
                writer.close(outcome=Outcome.PASS, exit_status=0, seconds=1, problems=problems)


def test_models_alone_can_pass_and_measurements_alone_show_nothing(runs: Any, made: Any) -> None:
    header = runs.header(claims=0, pairs=1)
    assert made.results([header, made.model()]).outcome is Outcome.PASS
    results = made.results([header, made.measurement()])
    assert results.outcome is Outcome.FAIL and "no claim was tested" in results.problems


def test_problems_of_the_run_fail_it_and_are_all_that_is_told(runs: Any, made: Any) -> None:
    found = [runs.header(pairs=1), runs.claim()]
    results = made.results(found, problems=["a waiver expired"], notes=["nothing compared"])
    assert (results.outcome, results.problems) == (Outcome.FAIL, ("a waiver expired",))


@pytest.mark.parametrize(
    ("line", "changes", "problem"),
    [
        (-1, {"models": {"VERIFIED": 2}}, "the footer's models: 2 VERIFIED; the rows give 1 VERIFIED"),
        (-1, {"measurements": 0}, "the footer's measurements: 0; the rows give 1"),
        (2, {"model": "model/b/ptq"}, "model 'model/b/ptq' has 2 model rows; one is expected"),
        (2, {"verdict": "TIMEOUT"}, "the footer says PASS, with exit status 0 and 1 TIMEOUT"),
    ],
)
def test_a_disagreement_is_a_problem(runs: Any, made: Any, line: int, changes: Any, problem: str) -> None:
    others = [made.model(), made.model("model/b/ptq")] if "model" in changes else [made.model()]
    path = made.path([runs.header(pairs=1), runs.claim(), *others, made.measurement()])
    found = [json.loads(text) for text in path.read_text().splitlines()]
    found[line] |= changes
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    results = read_results(path)
    assert any(problem in told for told in results.problems), results.problems
    assert results.outcome is Outcome.FAIL


@pytest.mark.parametrize("change", [{"reason": 3}, {"url": 3}, None])
def test_a_waiver_is_whole(runs: Any, made: Any, change: Any) -> None:
    waiver = made.waiver | change if change else {"reason": "no url, no expiry"}
    with pytest.raises(ResultsError, match="'waiver' is"):
        runs.lines([runs.claim(waived=True, waiver=waiver)])


@pytest.mark.parametrize("key", ["max_lsb", "message", "evidence", "verdict"])
def test_any_other_difference_is_seen(runs: Any, made: Any, key: str) -> None:
    change = {"max_lsb": 0.1, "message": "x", "evidence": {"where": {"case": "y"}}, "verdict": "TOLERATED"}[key]
    first, second = (
        made.results([runs.header(pairs=1), check, runs.claim()])
        for check in (runs.check(), runs.check(**{key: change}))
    )
    assert comparable(first) != comparable(second)
