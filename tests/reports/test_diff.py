"""Differences between two runs: what got worse is found, whatever else changed."""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.reports.diff import Change, compare_runs, diff_text
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.shard import Shard
from tests.support.reporting import main

WAIVER = {"reason": "issue 12", "url": None, "expires": "2027-01-31", "max_lsb": None}
WAIVED = {"verdict": "REFUTED", "waived": True, "waiver": WAIVER}


def change(runs: Any, old: dict[str, Any], new: dict[str, Any]) -> tuple[Change, str]:
    found = compare_runs(*(runs.results([runs.claim("a", **changes)]) for changes in (old, new)))
    [row] = found.rows
    return row.change, row.why


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ({}, {"verdict": "REFUTED"}, "passed before"),
        ({}, {"verdict": "UNEXERCISED"}, "passed before"),
        ({}, {"verdict": "TOLERATED"}, "was VERIFIED"),
        ({"verdict": "FALLBACK"}, {"verdict": "REFUTED"}, "was FALLBACK"),
        ({"verdict": "REFUTED"}, {"verdict": "CRASHED"}, "was REFUTED"),
        (WAIVED, {"verdict": "REFUTED"}, "is not waived any more"),
        ({}, WAIVED, "was VERIFIED"),
        ({"verdict": "REFUTED", "max_lsb": 3.0}, {"verdict": "REFUTED", "max_lsb": 4.0}, "the largest error was 3 LSB"),
        (
            {"verdict": "REFUTED", "max_lsb": 3.0},
            {"verdict": "REFUTED", "max_lsb": "inf"},
            "the largest error was 3 LSB",
        ),
        ({"verdict": "REFUTED", "failing": 3}, {"verdict": "REFUTED", "failing": 5}, "5 cases fail, not 3"),
    ],
)
def test_what_got_worse_regressed_and_the_way_back_improved(runs: Any, old: Any, new: Any, why: str) -> None:
    assert change(runs, old, new) == (Change.REGRESSED, why)
    assert change(runs, new, old)[0] is Change.IMPROVED


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ({"max_lsb": 0.49}, {"max_lsb": 0.5}, "LSB was 0.49, is 0.5"),
        ({"verdict": "REFUTED", "failing": None}, {"verdict": "REFUTED", "failing": 5}, "failing cases was None, is 5"),
    ],
)
def test_other_numbers_are_neither(runs: Any, old: Any, new: Any, why: str) -> None:
    assert change(runs, old, new) == (Change.CHANGED, why)


@pytest.mark.parametrize(
    ("rule", "stage"), [("LOW-01", "lower"), ("NUM-07", "numerics"), ("NUM-03", "refusal")], ids=str
)
def test_another_rule_or_stage_is_a_change_and_no_smaller_error(runs: Any, rule: str, stage: str) -> None:
    """Before, a wrong number that became a structural fault had "improved: a smaller error"."""
    number = runs.results(runs.refuted("a"))
    check = runs.check("a", outcome="fail", verdict="REFUTED", rule=rule, stage=stage)
    structure = runs.results([check, runs.claim("a", verdict="REFUTED", max_lsb=None)])
    [row] = compare_runs(number, structure).changed_rows
    assert (row.change, row.why) == (
        Change.CHANGED,
        f"rule was NUM-03 in numerics, is {rule} in {stage}, LSB was 18, is -",
    )
    [back] = compare_runs(structure, number).changed_rows
    assert back.change is Change.CHANGED


def test_equal_runs_are_unchanged_whatever_they_took(runs: Any) -> None:
    diff = compare_runs(*(runs.results(runs.large(60), started=f"2026-01-0{day}") for day in (1, 2)))
    assert diff.counts[Change.UNCHANGED] == 60 and diff.changed_rows == () and not diff.regressed and diff.basis == ()


def test_a_model_regresses_as_a_claim_does(runs: Any, made: Any) -> None:
    old, new = (
        made.results([runs.header(pairs=1), runs.claim(), made.model(verdict=v)]) for v in ("VERIFIED", "REFUTED")
    )
    [row] = compare_runs(old, new).changed_rows
    assert (row.name, row.change, row.why) == ("model/resnet/ptq", Change.REGRESSED, "passed before")


def test_added_and_removed_are_no_regressions_and_the_worst_come_first(runs: Any) -> None:
    old = runs.results(
        [runs.claim("gone"), runs.claim("same"), runs.claim("bad"), runs.claim("good", verdict="REFUTED")]
    )
    new = runs.results(
        [runs.claim("new"), runs.claim("same"), runs.claim("bad", verdict="REFUTED"), runs.claim("good")]
    )
    rows = compare_runs(old, new).rows
    assert [(row.name, row.change.value) for row in rows] == [
        ("bad", "regressed"),
        ("gone", "removed"),
        ("new", "added"),
        ("good", "improved"),
        ("same", "unchanged"),
    ]
    assert not compare_runs(new, runs.results([runs.claim("same")])).regressed


RANGED = "nn.Conv2d/static:in=quint8[0..127],w=*/ptq/x"


@pytest.mark.parametrize(
    ("claim", "shard", "removed"),
    [
        (["a*"], None, ["ab"]),
        ([RANGED], None, []),
        (["nn.Conv2d/static:in=quint8[0..127]*"], None, [RANGED]),
        ([], None, ["ab", "c", RANGED]),
        ([], {"place": 1, "of": 1}, ["ab", "c", RANGED]),
    ],
)
def test_what_the_new_run_was_not_to_run_is_not_removed(
    runs: Any, claim: list[str], shard: Any, removed: list[str]
) -> None:
    """Before, each claim that ``--claim`` left out was listed as removed."""
    old = runs.results([runs.claim(name) for name in ("a", "ab", "c", RANGED)])
    rows = [runs.claim("a"), *([runs.claim(RANGED)] if claim == [RANGED] else [])]
    found = compare_runs(old, runs.results(rows, options={"claim": claim}, shard=shard))
    assert [row.name for row in found.rows if row.change is Change.REMOVED] == removed
    left_out = 4 - len(rows) - len(removed)
    said = f"selection: {left_out} of the old run's claims and models are not compared: the new run left them out"
    assert found.basis == ((said,) if left_out else ())


def test_what_belongs_to_another_shard_is_not_removed(runs: Any) -> None:
    """The digests of the IDs put 40 names into both halves."""
    names = [f"claim {number}" for number in range(40)]
    old, half = runs.results(map(runs.claim, names)), Shard(place=1, of=2)
    mine = [name for name in names if half.has(name)]
    new = runs.results(map(runs.claim, mine[1:]), shard={"place": 1, "of": 2})
    assert 1 < len(mine) < 40
    assert [row.name for row in compare_runs(old, new).changed_rows] == mine[:1]


def test_an_incomplete_run_does_not_pass_the_gate(runs: Any) -> None:
    old, path = runs.results([runs.claim("a"), runs.claim("b")]), runs.lines([runs.claim("a"), runs.claim("b")])
    path.write_bytes(path.read_bytes()[:-9])
    found = compare_runs(old, read_results(path))
    assert found.regressed and not found.counts[Change.REGRESSED]
    assert "the new run is incomplete: what it did not reach is not known to hold" in diff_text(found, 100)


def test_what_the_runs_themselves_differ_in_is_said(runs: Any) -> None:
    found = compare_runs(runs.results([runs.claim()], seed=1), runs.results([runs.claim()], torch="2.14.0"))
    assert found.basis == (
        "torch: 2.13.0+cpu in the old run, 2.14.0 in the new one",
        "seed: 1 in the old run, 7 in the new one",
    )


def test_the_command_ends_with_1_on_a_regression_alone(runs: Any, capsys: Any) -> None:
    good, bad = (str(runs.lines(rows)) for rows in ([runs.claim("a")], runs.refuted("a")))
    assert main(["diff", good, bad]) == 1
    assert capsys.readouterr().out.startswith("REGRESSED: 1 regressed, 0 removed, 0 added, 0 changed, 0 improved")
    assert main(["diff", bad, good]) == 0
    assert capsys.readouterr().out.startswith("no regression: 0 regressed, 0 removed, 0 added, 0 changed, 1 improved")
