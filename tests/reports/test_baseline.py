"""Baselines: what is compared with what, what a difference says, and of which runs a file is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fx_quant_conformance.reports.baseline import (
    MOST_SHOWN,
    Deviation,
    Drift,
    baseline_of,
    compare_baseline,
    name_file,
    read_baseline_file,
    write_baseline,
)
from fx_quant_conformance.reports.diff import Side
from fx_quant_conformance.reports.results import Lead, Results, ResultsError, read_results
from fx_quant_conformance.reports.verdicts import PASSING, Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.support.reporting import main

if TYPE_CHECKING:
    from tests.conftest import Row, Runs

FULL = {"profile": "full", "isa": "avx2", "seed": 0, "options": {"max_examples": None}}
FOUND = {"add": "VERIFIED", "conv": "REFUTED", "linear": "VERIFIED", "mul": "TOLERATED"}
FAILING = 3
"""In how many cases a claim of these runs fails, if it fails."""
NAME = "qnnpack.avx2.torch-2.13.txt"


def rows(runs: Runs, found: dict[str, str], rule: str = "NUM-03", failing: int | None = FAILING) -> list[Row]:
    made: list[Row] = []
    for name, verdict in found.items():
        fails = Verdict(verdict) not in PASSING
        if fails:
            made.append(runs.check(name, outcome="fail", verdict=verdict, rule=rule))
        made.append(runs.claim(name, verdict=verdict, failing=failing if fails else 0))
    return made


def whole(runs: Runs, found: dict[str, str] = FOUND, *, failing: int | None = FAILING, **changes: Any) -> Results:
    """A full run of a config that has just these claims."""
    made = rows(runs, found, changes.pop("rule", "NUM-03"), failing)
    return runs.results(made, **(FULL | {"claims_in_config": len(found)} | changes))


def written(runs: Runs, found: dict[str, str] = FOUND, **changes: Any) -> Path:
    """The baseline of such a run."""
    path = runs.directory / NAME
    path.write_text(baseline_of(whole(runs, found, **changes)).text, encoding="utf-8")
    return path


def compared(
    runs: Runs,
    path: Path,
    found: dict[str, str] = FOUND,
    *,
    rule: str = "NUM-03",
    failing: int | None = FAILING,
    **changes: Any,
) -> Drift:
    """What differs between a baseline and a run."""
    header = whole(runs, **({"claims_in_config": 4} | changes)).header
    seen = {
        name: Side(verdict, Lead() if verdict in PASSING else Lead(rule, "numerics"), failing, 18.0)
        for name, verdict in ((name, Verdict(each)) for name, each in found.items())
    }
    return compare_baseline(path, seen, header)


def test_a_file_has_a_line_for_each_claim_that_is_not_verified(runs: Runs) -> None:
    path = written(runs, dict(reversed(FOUND.items())))
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["claims"] == 4
    assert lines == ["REFUTED NUM-03 3 conv", "TOLERATED - ? mul"]
    baseline = read_baseline_file(path)
    assert baseline.deviations == {
        "conv": Deviation(Verdict.REFUTED, "NUM-03", FAILING),
        "mul": Deviation(Verdict.TOLERATED, "", None),
    }
    assert baseline.text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        (FAILING - 1, "improved: a smaller error, or fewer cases; it is REFUTED by NUM-03"),
        (FAILING + 1, "regressed: 4 cases fail, not 3; it is REFUTED by NUM-03"),
    ],
)
def test_a_claim_that_fails_in_more_cases_or_fewer_differs(runs: Runs, failing: int, change: str) -> None:
    assert compared(runs, written(runs), failing=failing).differences[1:] == (f"conv: {change}",)


def test_a_claim_that_fails_by_another_rule_differs(runs: Runs) -> None:
    """Before, only verdict and count were held: a refusal could become a wrong number."""
    assert compared(runs, written(runs), rule="LOW-01").differences[1:] == (
        "conv: changed: rule was NUM-03, is LOW-01; it is REFUTED by LOW-01",
    )


def test_counts_that_are_chance_are_not_compared(runs: Runs) -> None:
    path = written(runs)
    assert compared(runs, path, failing=None) == Drift()
    assert compared(runs, written(runs, failing=None), failing=FAILING + 1) == Drift()


def test_of_several_runs_it_keeps_what_they_agree_in(runs: Runs) -> None:
    found = {"a": "REFUTED"}
    files = [
        runs.lines(rows(runs, found, rule, failing), **FULL, claims_in_config=1)
        for rule, failing in (("NUM-03", 5), ("NUM-07", 5), ("NUM-03", 6))
    ]
    for some, known in ((files[:1], ("NUM-03", 5)), (files[:2], (None, 5)), (files, (None, None))):
        write_baseline(some, runs.directory)
        read = read_baseline_file(runs.directory / NAME)
        assert read.deviations == {"a": Deviation(Verdict.REFUTED, *known)}


def test_several_runs_agree_in_what_they_are_of_and_in_their_verdicts(runs: Runs) -> None:
    def files(*made: tuple[dict[str, str], dict[str, Any]]) -> list[Path]:
        return [runs.lines(rows(runs, each), **(FULL | {"claims_in_config": 4} | more)) for each, more in made]

    for other, more in ((FOUND | {"linear": "CRASHED"}, {}), (FOUND, {"seed": 1})):
        with pytest.raises(ResultsError, match="no baseline: two runs"):
            write_baseline(files((FOUND, {}), (other, more)), runs.directory)
    with pytest.raises(ResultsError, match="no baseline: conv is REFUTED in one run and FALLBACK in the other"):
        write_baseline(files((FOUND, {}), (FOUND | {"conv": "FALLBACK"}, {})), runs.directory)


def test_what_crashes_may_be_refuted_the_next_time_and_not_the_other_way_round(runs: Runs) -> None:
    """A kernel that leaves its memory dies or is only wrong, by chance."""
    dies, wrong = FOUND | {"conv": "CRASHED"}, FOUND | {"conv": "REFUTED"}
    assert compared(runs, written(runs, dies), wrong) == Drift()
    worse = compared(runs, written(runs, wrong), dies)
    assert worse.differences[1:] == ("conv: regressed: was REFUTED; it is CRASHED by NUM-03",)
    files = [runs.lines(rows(runs, each), **FULL, claims_in_config=4) for each in (dies, wrong)]
    write_baseline(files, runs.directory)
    assert read_baseline_file(runs.directory / NAME).deviations["conv"].verdict is Verdict.CRASHED


def test_waived_claims_are_known_as_they_were_found(runs: Runs) -> None:
    made = [*rows(runs, {"conv": "REFUTED"})[:1], runs.claim("conv", verdict="REFUTED", failing=3, waived=True)]
    found = runs.results(made, **FULL, claims_in_config=1)
    assert baseline_of(found).deviations == {"conv": Deviation(Verdict.REFUTED, "NUM-03", 3)}


def test_differences_begin_with_what_got_worse(runs: Runs) -> None:
    found = {"add": "TOLERATED", "conv": "VERIFIED", "linear": "CRASHED", "new": "VERIFIED"}
    said = compared(runs, written(runs), found)
    assert said.note == ""
    assert said.differences == (
        f"{NAME} differs in 4 places; if that is meant, fx-quant-conformance report baseline writes it anew",
        "add: regressed: was VERIFIED; it is TOLERATED",
        "linear: regressed: was VERIFIED; it is CRASHED by NUM-03",
        "mul: not in the new run",
        "conv: improved: was REFUTED; it is VERIFIED",
    )


@pytest.mark.parametrize("found", [{"conv": "REFUTED"}, {}])
def test_a_selection_compares_what_was_run(runs: Runs, found: dict[str, str]) -> None:
    assert compared(runs, written(runs), found) == Drift()
    worse = compared(runs, written(runs), {"conv": "CRASHED"})
    assert worse.differences[1:] == ("conv: regressed: was REFUTED; it is CRASHED by NUM-03",)


def test_many_differences_are_counted(runs: Runs) -> None:
    many = {f"add{number:02}": "VERIFIED" for number in range(MOST_SHOWN + 3)}
    said = compared(runs, written(runs, many), dict.fromkeys(many, "REFUTED"), claims_in_config=len(many))
    assert "differs in 23 places" in said.differences[0]
    assert said.differences[MOST_SHOWN] == "add19: regressed: was VERIFIED; it is REFUTED by NUM-03"
    assert said.differences[MOST_SHOWN + 1 :] == ("… and 3 more",)


def test_another_config_is_a_difference(runs: Runs) -> None:
    said = compared(runs, written(runs), config_sha256="cd" * 32, claims_in_config=5)
    assert said.differences[1:] == (
        "the config is not the one that the baseline is of: its sha256 differs",
        "the config has 5 claims; the baseline is of 4",
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"torch": "2.14.0"}, "it is of torch 2.13, the run of 2.14"),
        ({"profile": "quick"}, "it is of profile full, the run of quick"),
        ({"profile": "stress", "seed": 3}, "it is of profile full, the run of stress, it is of seed 0, the run of 3"),
        ({"options": {"max_examples": 2}}, "the run has --max-examples"),
    ],
)
def test_only_like_is_compared_with_like(runs: Runs, changes: dict[str, Any], why: str) -> None:
    said = compared(runs, written(runs), dict.fromkeys(FOUND, "CRASHED"), **changes)
    assert said == Drift(note=f"{NAME}: {why}: nothing compared")


def test_a_level_without_a_file_is_noted(runs: Runs) -> None:
    note = (
        "no baseline: none.txt does not exist: nothing compared; fx-quant-conformance report baseline makes it "
        "from the results of a run of profile full"
    )
    assert compared(runs, runs.directory / "none.txt", isa="avx512_vnni") == Drift(note=note)
    for level, said in (("custom", "custom"), ("", "not known")):
        note = f"no baseline: the level of the kernels is {said}: nothing compared"
        assert compared(runs, written(runs), isa=level) == Drift(note=note)


@pytest.mark.parametrize("torch", ["2.13.0+cu130", "2.13.2+cpu"])
def test_every_wheel_of_a_release_is_compared(runs: Runs, torch: str) -> None:
    said = compared(runs, written(runs), {**FOUND, "add": "REFUTED"}, torch=torch)
    assert said.note == "" and said.differences[1:] == ("add: regressed: was VERIFIED; it is REFUTED by NUM-03",)
    assert name_file(whole(runs, torch=torch).header) == NAME


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no baseline: "),
        ("{", "is no baseline: Expecting property name"),
        ("[1]", "is no baseline: unknown kind of row None; expected one of baseline"),
        ('{"kind": "baseline"}', "is no baseline: baseline row has no 'backend'"),
        ("WHOLE\nGOOD NUM-03 3 conv", "is no baseline: a line has verdict, rule, number and ID; found 'GOOD NUM-03"),
        ("WHOLE\nREFUTED NUM-03 conv", "is no baseline: a line has verdict, rule, number and ID; found 'REFUTED"),
    ],
)
def test_a_file_that_is_none_is_a_difference(runs: Runs, text: str, why: str) -> None:
    path = written(runs)
    path.write_text(text.replace("WHOLE", path.read_text(encoding="utf-8").splitlines()[0]), encoding="utf-8")
    said = compared(runs, path)
    assert len(said.differences) == 1 and said.differences[0].startswith(f"{path}: {why}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"claims_in_config": 9}, "the run leaves claims out; run pytest conformance --backend=qnnpack to its end"),
        ({"profile": "quick"}, "the run is of profile quick, not full"),
        ({"options": {"max_examples": 2}}, "the run has --max-examples"),
        ({"isa": "custom"}, "the level of the kernels is custom"),
        ({"isa": ""}, "the level of the kernels is not known"),
        ({"pairs": 7}, "the file disagrees with itself: the header's pairs: 7; the rows give 1"),
    ],
)
def test_no_file_is_written_of_such_a_run(runs: Runs, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ResultsError, match=why):
        baseline_of(whole(runs, **changes))


def test_no_file_is_written_of_an_incomplete_run(runs: Runs) -> None:
    path = runs.lines([runs.claim()], **FULL, claims_in_config=1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ResultsError, match="the run is incomplete"):
        baseline_of(read_results(path))


def test_a_run_that_failed_by_its_baseline_renews_it(runs: Runs) -> None:
    path = runs.directory / "failed.jsonl"
    with ResultsWriter(path) as writer:
        for row in (runs.header(**FULL, claims_in_config=1, pairs=1), runs.claim("add")):
            writer.write_line(json.dumps(row))
        writer.close(outcome=Outcome.FAIL, exit_status=1, seconds=1.0, problems=["add: improved: was REFUTED"])
    assert baseline_of(read_results(path)).deviations == {}


def test_the_commands_write_a_baseline_and_compare_with_it(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    results = runs.lines(rows(runs, FOUND), **FULL, claims_in_config=4)
    assert main(["baseline", str(results), "-o", str(runs.directory)]) == 0
    path = runs.directory / NAME
    assert capsys.readouterr().out == f"{path}: 2 of 4 claims are not VERIFIED\n"
    assert main(["diff", str(path), str(results)]) == 0
    assert capsys.readouterr().out.startswith(
        "no regression: 0 regressed, 0 removed, 0 added, 0 changed, 0 improved, 4"
    )
    worse = runs.lines(rows(runs, FOUND | {"add": "REFUTED"}), **FULL, claims_in_config=4)
    assert main(["diff", str(path), str(worse)]) == 1
    assert capsys.readouterr().out.startswith("REGRESSED: 1 regressed")


def test_the_command_refuses_in_one_line(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    quick = runs.lines(rows(runs, FOUND), **(FULL | {"profile": "quick"}), claims_in_config=4)
    for file, why in ((quick, "the run is of profile quick"), (runs.directory / "none", "cannot be read")):
        assert main(["baseline", str(file), "-o", str(runs.directory)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("reports: ") and why in told and told.count("\n") == 1
    assert not (runs.directory / NAME).exists()
