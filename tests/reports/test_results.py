"""The results file: written rows are read back, bad ones refused with their line, lies never pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.results import Results, ResultsError, leading_check, read_results
from fx_quant_conformance.reports.verdicts import PASSING, VERDICTS, Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter

text = st.text(max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
lsb = st.none() | number | st.sampled_from(["inf", "-inf", "nan"])
scalar = st.none() | st.booleans() | st.integers(-9, 9) | text
verdict = st.sampled_from([v.value for v in VERDICTS])
claim_rows = st.fixed_dictionaries(
    {
        "kind": st.just("claim"),
        "claim": text,
        "pattern": text,
        "dtype_config": text,
        "flow": st.sampled_from(["ptq", "qat"]),
        "scheme": text,
        "verdict": verdict,
        "waived": st.booleans(),
        "reason": text,
        "max_lsb": lsb,
        "repro": text,
        "seconds": number,
    },
    optional={"decisions": st.lists(st.dictionaries(text, scalar, max_size=3), min_size=1, max_size=3)},
)
some_text = st.text(min_size=1, max_size=20)
wheres = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("case", "input", "change", "detail"), some_text) | {"output": st.integers(0, 9)}
)
statistics = st.fixed_dictionaries(
    {}, optional={"distances": st.lists(st.integers(0, 99), min_size=1), "sqnr_db": number}
)
evidence = st.fixed_dictionaries(
    {"own": scalar},
    optional={
        "where": wheres,
        "expected": st.lists(number),
        "found": st.lists(st.integers(-9, 9)),
        "traceback": text,
        "index": st.lists(st.lists(st.integers(0, 9))),
        "float_ops": st.lists(text),
        "qparams": st.dictionaries(text, st.dictionaries(text, scalar, max_size=2), max_size=2),
    },
)
check_rows = st.fixed_dictionaries(
    {
        "kind": st.just("check"),
        "claim": text,
        "stage": text,
        "rule": text,
        "verdict": verdict,
        "outcome": st.sampled_from(["pass", "fail", "error", "skip"]),
        "message": text,
        "max_lsb": lsb,
        "slack_lsb": lsb,
        "cases": st.none() | st.integers(0, 99),
        "seconds": number,
    },
    optional={"evidence": evidence, "statistics": statistics, "failing": st.integers(1, 99)},
)


@pytest.mark.slow
@given(st.lists(claim_rows | check_rows, max_size=8))
def test_a_file_gives_back_what_was_written(tmp_path_factory: Any, rows: list[dict[str, Any]]) -> None:
    path = tmp_path_factory.mktemp("round") / "results.jsonl"
    header = _header() | {"options": {"without_execution_evidence": False}}
    with ResultsWriter(path) as writer:
        for row in (header, *rows):
            writer.write_line(json.dumps(row))
        writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1)
    results = read_results(path)
    assert encode(results.header) == header
    for kind, found in (("claim", results.claims), ("check", results.checks)):
        written = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["claim"])  # in one order
        assert [encode(row) for row in found] == written
    assert not any(problem.startswith("the footer's") for problem in results.problems)
    assert results.outcome is Outcome.FAIL


@pytest.mark.slow
@given(st.data())
def test_a_cut_file_keeps_every_whole_row_and_is_incomplete(tmp_path_factory: Any, data: Any) -> None:
    path = tmp_path_factory.mktemp("cut") / "results.jsonl"
    rows = data.draw(st.lists(claim_rows, min_size=1, max_size=4))
    with ResultsWriter(path) as writer:
        for row in (_header(), *rows):
            writer.write_line(json.dumps(row))
        writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1)
    content = path.read_bytes()
    end = data.draw(st.integers(content.index(b"\n") + 1, len(content) - 1))
    path.write_bytes(content[:end])
    results = read_results(path)
    assert results.outcome is Outcome.INCOMPLETE
    assert len(results.claims) == content[:end].count(b"\n") - 1
    assert results.problems[0].startswith("no footer")


def test_verdicts_are_ordered_worst_first_and_nothing_shown_is_unexercised() -> None:
    names = "CRASHED TIMEOUT REFUTED FALLBACK UNEXERCISED UNSHOWN TOLERATED VERIFIED"
    assert " ".join(VERDICTS) == names
    assert {"TOLERATED", "VERIFIED"} == PASSING
    assert Verdict.worst(VERDICTS[::-1]) is Verdict.CRASHED
    assert Verdict.worst([]) is Verdict.UNEXERCISED


def test_a_run_in_which_everything_passes_is_a_pass(runs: Any) -> None:
    rows = [runs.check(), runs.claim(), runs.claim("b", verdict="TOLERATED"), *runs.refuted(waived=True)]
    results = runs.results(rows)
    assert (results.outcome, results.problems) == (Outcome.PASS, ())
    assert results.counts == {"REFUTED": 1, "TOLERATED": 1, "VERIFIED": 1}
    assert results.waived == 1


@pytest.mark.parametrize("verdict", [v for v in VERDICTS if v not in PASSING])
def test_one_claim_that_does_not_pass_fails_the_run(runs: Any, verdict: Verdict) -> None:
    results = runs.results([runs.claim(), runs.claim("b", verdict=verdict.value)])
    assert results.outcome is Outcome.FAIL


def test_a_run_of_no_claims_is_no_pass(runs: Any) -> None:
    results = runs.results([])
    assert results.outcome is Outcome.FAIL
    assert results.problems == ("no claim was tested",)


def test_a_run_in_which_everything_passes_that_ended_as_fail_says_so(runs: Any) -> None:
    results = _edited(runs.lines([runs.claim()]), -1, outcome="FAIL", exit_status=1)
    assert results.outcome is Outcome.FAIL
    assert "every claim passes, yet the run ended as FAIL (exit status 1)" in results.problems[0]


def test_pairs_are_distinct_and_in_order(runs: Any) -> None:
    rows = [
        runs.claim("a"),
        runs.claim("b", pattern="torch.cat"),
        runs.claim("c", flow="qat"),
        runs.claim("d", dtype_config="in=qint8"),
    ]
    results = runs.results(rows)
    dtype = results.claims[0].dtype_config
    assert results.pairs == (("nn.Linear", dtype), ("torch.cat", dtype), ("nn.Linear", "in=qint8"))
    assert [claim.claim for claim in results.by_pair()["nn.Linear", dtype]] == ["a", "c"]


def test_failures_come_worst_first_without_waived_and_unexercised(runs: Any) -> None:
    rows = [
        runs.claim("f", verdict="FALLBACK"),
        runs.claim("c", verdict="CRASHED"),
        runs.claim("v"),
        runs.claim("w", verdict="TIMEOUT", waived=True),
        runs.claim("u", verdict="UNEXERCISED", reason=" "),
    ]
    rows += [runs.claim(name, verdict="UNEXERCISED", reason="odd") for name in "xy"]
    results = runs.results(rows)
    assert [claim.claim for claim in results.failures()] == ["c", "f"]
    reasons = [(reason, [claim.claim for claim in claims]) for reason, claims in results.unexercised().items()]
    assert reasons == [("odd", ["x", "y"]), ("no reason given", ["u"])], "the most frequent first"


def test_the_leading_check_is_the_first_of_the_worst(runs: Any) -> None:
    changes = [{}, {"verdict": "TOLERATED"}, {"verdict": "REFUTED", "outcome": "fail", "rule": "X"}]
    results = runs.results([*(runs.check(**change) for change in changes), runs.claim(verdict="REFUTED")])
    assert leading_check(results.checks).rule == "X"  # type: ignore[union-attr]
    assert leading_check(results.checks[:1]) is None


# A file that disagrees with itself is read, and is never a pass.


@pytest.mark.parametrize(
    ("line", "changes", "problem"),
    [
        (0, {"claims": 9}, "the header's claims: 9; the rows give 2"),
        (0, {"pairs": 0}, "the header's pairs: 0; the rows give 1"),
        (0, {"claims_in_config": 2, "pairs": 3}, "the header's pairs: 3; the rows give 1"),
        (-1, {"claims": 3}, "the footer's claims: 3; the rows give 2"),
        (-1, {"checks": 0}, "the footer's checks: 0; the rows give 1"),
        (-1, {"pairs": 2}, "the footer's pairs: 2; the rows give 1"),
        (-1, {"counts": {"VERIFIED": 1}}, "the footer's counts: 1 VERIFIED; the rows give 2 VERIFIED"),
        (-1, {"sha256": "0" * 64}, "the footer's sha256: 0000"),
        (-1, {"exit_status": 3}, "the footer says PASS, with exit status 3"),
        (1, {"claim": "elsewhere"}, "check numerics/NUM-03 names claim 'elsewhere', which has no claim row"),
        (1, {"outcome": "fail", "verdict": "REFUTED"}, "its check numerics/NUM-03 says REFUTED"),
        (2, {"claim": "b"}, "claim 'b' has 2 claim rows; one is expected"),
        (2, {"verdict": "TIMEOUT"}, "the footer says PASS, with exit status 0 and 1 TIMEOUT"),
    ],
)
def test_a_disagreement_is_a_problem_and_no_pass(runs: Any, line: int, changes: Any, problem: str) -> None:
    path = runs.lines([runs.check(), runs.claim(), runs.claim("b")])
    results = _edited(path, line, reseal="sha256" not in changes, **changes)
    assert any(problem in found for found in results.problems), results.problems
    assert results.outcome is Outcome.FAIL


def test_a_subset_of_the_config_may_have_fewer_pairs(runs: Any) -> None:
    assert runs.results([runs.claim()], pairs=50, claims_in_config=404).outcome is Outcome.PASS


def test_an_incomplete_footer_is_incomplete(runs: Any) -> None:
    assert _edited(runs.lines([runs.claim()]), -1, outcome="INCOMPLETE").outcome is Outcome.INCOMPLETE


# A malformed file is refused, with the line.


@pytest.mark.parametrize(
    ("line", "damage", "message"),
    [
        (2, lambda row: "{nonsense", "not a line of JSON"),
        (2, lambda row: "", "not a line of JSON"),
        (2, lambda row: "[" * 100_000, "not a line of JSON"),
        (2, lambda row: '{"kind": "claim", "max_lsb": NaN}', "NaN is not JSON"),
        (2, lambda row: '{"kind": "claim", "max_lsb": 1e999}', "1e999 is not JSON"),
        (2, lambda row: '{"kind": "claim", "max_lsb": 1' + "0" * 400 + "}", "is not JSON"),
        (2, lambda row: "[1]", "expected a JSON object, found list"),
        (2, lambda row: row | {"kind": "verdict"}, "unknown kind of row 'verdict'; expected one of header"),
        (2, lambda row: row | {"kind": ["claim"]}, "unknown kind of row ['claim']"),
        (
            2,
            lambda row: {k: v for k, v in row.items() if k not in ("pattern", "verdict")},
            "claim row has no 'verdict', 'pattern'",
        ),
        (2, lambda row: row | {"verdict": "FINE"}, "'verdict' is 'FINE'; expected one of CRASHED, TIMEOUT"),
        (2, lambda row: row | {"verdict": ["FINE"]}, "'verdict' is ['FINE']"),
        (2, lambda row: row | {"waived": 1}, "'waived' is 1; expected true or false"),
        (2, lambda row: row | {"max_lsb": True}, "'max_lsb' is True; expected a number or 'inf'"),
        (2, lambda row: row | {"max_lsb": "big"}, "'max_lsb' is 'big'"),
        (2, lambda row: row | {"flow": "both"}, "'flow' is 'both'; expected 'ptq' or 'qat'"),
        (2, lambda row: row | {"reason": None}, "'reason' is None; expected a string"),
        (2, lambda row: row | {"decisions": {}}, "'decisions' is {}; expected a list"),
        (2, lambda row: row | {"decisions": [{"a": [1]}]}, "'decisions[0].a' is [1]"),
        (1, lambda row: row | {"schema": 3}, "schema 3, this suite reads 2: use the suite that wrote it ('0.1.0')"),
        (1, lambda row: row | {"seed": "7"}, "'seed' is '7'; expected an integer"),
        (1, lambda row: row | {"cpu_flags": "avx2"}, "'cpu_flags' is 'avx2'; expected a list"),
        (1, lambda row: row | {"versions": {"a": 1}}, "'versions.a' is 1; expected a string"),
        (3, lambda row: row | {"counts": {"FINE": 1}}, "'key of counts' is 'FINE'"),
    ],
)
def test_a_malformed_line_is_named(runs: Any, line: int, damage: Callable[..., Any], message: str) -> None:
    path = runs.lines([runs.claim()])
    lines = path.read_text().splitlines()
    damaged = damage(json.loads(lines[line - 1]))
    lines[line - 1] = damaged if isinstance(damaged, str) else json.dumps(damaged)
    path.write_text("".join(text + "\n" for text in lines))
    with pytest.raises(ResultsError) as caught:
        read_results(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("order", "line", "message"),
    [
        ((), 1, "no header row"),
        ((1, 2), 1, "no header row"),
        ((0, 0, 1, 2), 2, "a second header row"),
        ((0, 1, 2, 1), 4, "a claim row after the footer"),
        ((0, 1, 2, 2), 4, "a footer row after the footer"),
    ],
)
def test_rows_out_of_order_are_named(runs: Any, order: tuple[int, ...], line: int, message: str) -> None:
    path = runs.lines([runs.claim()])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(ResultsError, match=rf":{line}: .*{message}"):
        read_results(path)


def test_a_cut_row_after_the_footer_is_refused(runs: Any) -> None:
    path = runs.lines([runs.claim()])
    path.write_bytes(path.read_bytes() + b'{"kind": "cl')
    with pytest.raises(ResultsError, match=":4: text after the footer"):
        read_results(path)


def test_bytes_that_are_not_utf8_are_named(runs: Any) -> None:
    path = runs.lines([runs.claim()])
    path.write_bytes(path.read_bytes().replace(b"nn.Linear", b"nn.\xff"))
    with pytest.raises(ResultsError, match=":2: not a line of JSON"):
        read_results(path)


def test_bad_evidence_is_named_by_its_key(runs: Any) -> None:
    with pytest.raises(ResultsError, match=r"'evidence.index\[0\]' is 3; expected a list"):
        runs.lines([runs.check(evidence={"index": [3]}), runs.claim()])


def test_keys_of_a_later_minor_version_are_left_out(runs: Any) -> None:
    results = _edited(runs.lines([runs.claim()]), 1, colour="blue")
    assert results.outcome is Outcome.PASS


def _header() -> dict[str, Any]:
    names = "suite_version suite_commit backend torch python platform cpu engine profile config_name started"
    row: dict[str, Any] = {name: name for name in [*names.split(), "config_sha256"]}
    numbers = dict.fromkeys(["seed", "claims", "claims_in_config", "pairs"], 3)
    return (
        row
        | numbers
        | {
            "kind": "header",
            "schema": 2,
            "versions": {},
            "cpu_flags": [],
            "options": {"deep": [{"a": None}]},
            "representation": "DECOMPOSED",
        }
    )


def _edited(path: Path, line: int, *, reseal: bool = True, **changes: Any) -> Results:
    """The file with one row changed, its digest made to fit again if `reseal`."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[line] |= changes
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    if reseal:
        rows[-1]["sha256"] = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
        lines[-1] = json.dumps(rows[-1]).encode() + b"\n"
    else:
        original = path.read_bytes().splitlines(keepends=True)
        lines = [lines[i] if rows[i] is rows[line] else original[i] for i in range(len(lines))]
    path.write_bytes(b"".join(lines))
    return read_results(path)
