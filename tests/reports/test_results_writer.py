"""The writer of results refuses what no reader could take, and loses nothing that it took."""

from __future__ import annotations

import enum
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fx_quant_conformance.reports.results import ResultsError, read_results
from fx_quant_conformance.reports.schema import ClaimResult
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter


class Colour(enum.StrEnum):
    RED = "REFUTED"


CLAIM = ClaimResult(
    claim="a", pattern="nn.Linear", dtype_config="in=quint8", flow="ptq", scheme="no_weight", verdict=Verdict.VERIFIED
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lsb": float("nan")}, r"row\['max_lsb'\] is nan; write a non-finite number as a string"),
        ({"decisions": [{"a": float("inf")}]}, r"row\['decisions'\]\[0\]\['a'\] is inf"),
        ({"reason": Path("x")}, r"row\['reason'\] is .* of pathlib.*; convert it to a plain builtin"),
        ({"decisions": {3}}, "convert it to a plain builtin"),
        ({"decisions": [{1: 2}]}, r"row\['decisions'\]\[0\] is keyed by 1 of int; keys are strings"),
        ({"verdict": "GOOD"}, "'verdict' is 'GOOD'; expected one of CRASHED"),
        ({"max_lsb": 10**400}, "is not JSON"),
    ],
)
def test_the_writer_refuses_a_row_that_no_file_can_hold(runs: Any, changes: dict[str, Any], message: str) -> None:
    with ResultsWriter(runs.directory / "x.jsonl") as writer:
        writer.write_line(json.dumps(runs.header()))
        with pytest.raises(ResultsError, match=r"x\.jsonl:2: .*" + message):
            writer.write(replace(CLAIM, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verdict": "GOOD"}, "'verdict' is 'GOOD'; expected one of CRASHED"),
        ({"max_lsb": float("nan")}, "NaN is not JSON"),
        ({"kind": "clam"}, "unknown kind of row 'clam'"),
        ({"kind": "footer"}, "footer row has no"),
    ],
)
def test_the_writer_refuses_a_line_that_no_reader_takes(runs: Any, changes: dict[str, Any], message: str) -> None:
    with ResultsWriter(runs.directory / "x.jsonl") as writer:
        writer.write_line(json.dumps(runs.header()))
        with pytest.raises(ResultsError, match=r"x\.jsonl:2: .*" + message):
            writer.write_line(json.dumps(runs.claim() | changes))


def test_a_row_of_an_enumeration_is_written_by_its_value(runs: Any) -> None:
    with ResultsWriter(runs.directory / "x.jsonl") as writer:
        writer.write_line(json.dumps(runs.header()))
        writer.write(replace(CLAIM, verdict=cast(Any, Colour.RED)))
    assert read_results(writer.path).claims[0].verdict is Verdict.REFUTED


def test_each_row_is_on_disk_before_the_next(runs: Any) -> None:
    writer = ResultsWriter(runs.directory / "deep" / "x.jsonl")
    for count, row in enumerate([runs.header(), runs.check(), runs.claim()], start=1):
        writer.write_line(json.dumps(row))
        assert writer.path.read_bytes().count(b"\n") == count
    assert read_results(writer.path).outcome is Outcome.INCOMPLETE
    writer.close(outcome=Outcome.PASS, exit_status=0, seconds=1)
    assert read_results(writer.path).outcome is Outcome.PASS


def test_the_writer_holds_the_order_of_rows(runs: Any) -> None:
    writer = ResultsWriter(runs.directory / "x.jsonl")
    with pytest.raises(ResultsError, match="a claim row; the first row, and no other, is the header"):
        writer.write_line(json.dumps(runs.claim()))
    with pytest.raises(ResultsError, match="header is written"):
        writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1)
    writer.write_line(json.dumps(runs.header()))
    with pytest.raises(ResultsError, match="a header row; the first row"):
        writer.write_line(json.dumps(runs.header()))
    writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1)
    with pytest.raises(ResultsError, match="the file is closed"):
        writer.write_line(json.dumps(runs.claim()))
    with pytest.raises(ResultsError, match="ends it once"):
        writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1)


def test_the_writer_refuses_a_footer_that_is_not_its_own(runs: Any) -> None:
    footer = json.loads(runs.lines([runs.claim()]).read_text().splitlines()[-1])
    with ResultsWriter(runs.directory / "x.jsonl") as writer:
        writer.write_line(json.dumps(runs.header()))
        with pytest.raises(ResultsError, match=r"a footer row; close\(\) writes it"):
            writer.write_line(json.dumps(footer))


@pytest.mark.parametrize(("verdict", "status"), [("UNEXERCISED", 0), ("VERIFIED", 1)])
def test_the_writer_calls_nothing_a_pass_that_is_none(runs: Any, verdict: str, status: int) -> None:
    with ResultsWriter(runs.directory / "x.jsonl") as writer:
        writer.write_line(json.dumps(runs.header()))
        writer.write_line(json.dumps(runs.claim(verdict=verdict)))
        with pytest.raises(ResultsError, match=f"outcome PASS with exit status {status}"):
            writer.close(outcome=Outcome.PASS, exit_status=status, seconds=1)
    assert read_results(writer.path).outcome is Outcome.INCOMPLETE
