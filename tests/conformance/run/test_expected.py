"""Expected verdicts: what is compared with what, what a difference says, and which runs a file is written of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.__main__ import main
from conformance.run.expected import (
    MOST_SHOWN,
    Drift,
    ExpectedError,
    VerdictSeen,
    compare_expected,
    expected_of,
    expected_path_of,
    expected_text_of,
    read_expected,
)
from reports.codec import decode
from reports.results import Results, read_results
from reports.schema import Header
from reports.verdicts import PASSING, Outcome, Verdict
from reports.writer import ResultsWriter

if TYPE_CHECKING:
    from tests.conftest import Row, Runs

FULL = {"profile": "full", "isa": "avx2", "seed": 0, "options": {"max_examples": None}}
FOUND = {"add": "VERIFIED", "conv": "REFUTED", "linear": "VERIFIED", "mul": "QUALITY"}
FAILING = 3
"""In how many cases a claim of these runs fails, if it fails."""
NAME = "qnnpack.avx2.torch-2.13.json"


def rows(runs: Runs, found: dict[str, str]) -> list[Row]:
    return [runs.claim(name, verdict=verdict, failing=_failing(verdict)) for name, verdict in found.items()]


def _failing(verdict: str) -> int:
    return 0 if Verdict(verdict) in PASSING else FAILING


def whole(runs: Runs, found: dict[str, str] = FOUND, **changes: Any) -> Results:
    """A full run of a config that has just these claims."""
    return runs.results(rows(runs, found), **(FULL | {"claims_in_config": len(found)} | changes))


def written(runs: Runs, found: dict[str, str] = FOUND, **changes: Any) -> Path:
    """The file of expected verdicts of such a run."""
    path = runs.directory / NAME
    path.write_text(expected_text_of(expected_of(whole(runs, found, **changes))), encoding="utf-8")
    return path


def compared(
    runs: Runs, path: Path, found: dict[str, str] = FOUND, failing: int | None = FAILING, **changes: Any
) -> Drift:
    """Compare a run that found this; what fails does so in ``failing`` cases."""
    header = decode(runs.header(**(FULL | {"claims_in_config": len(FOUND)} | changes)))
    assert isinstance(header, Header)
    seen = {name: VerdictSeen(Verdict(verdict), _failing(verdict) and failing) for name, verdict in found.items()}
    return compare_expected(path, seen, header)


def test_the_same_verdicts_do_not_differ(runs: Runs) -> None:
    assert compared(runs, written(runs)) == Drift()


def test_a_file_is_read_as_it_was_written_a_claim_a_line(runs: Runs) -> None:
    path = written(runs, dict(reversed(FOUND.items())))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.strip(' ,"').replace('": "', "=") for line in lines[-9:-5]] == [f"{k}={v}" for k, v in FOUND.items()]
    expected = read_expected(path)
    assert expected.verdicts == FOUND
    assert (expected.schema, expected.backend, expected.isa, expected.seed) == (2, "qnnpack", "avx2", 0)
    assert expected.failing == {"conv": FAILING}
    assert expected_text_of(expected) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("failing", [FAILING - 1, FAILING + 1])
def test_a_claim_that_fails_in_more_cases_or_fewer_differs(runs: Runs, failing: int) -> None:
    said = compared(runs, written(runs), failing=failing)
    assert said.differences[1:] == (
        f"conv: REFUTED as expected, but in {failing} cases and comparisons, not in {FAILING}",
    )


def test_counts_that_are_chance_are_not_compared(runs: Runs) -> None:
    path = written(runs)
    assert compared(runs, path, failing=None) == Drift()
    chance = [runs.claim(name, verdict=verdict, failing=None) for name, verdict in FOUND.items()]
    found = runs.results(chance, **(FULL | {"claims_in_config": len(FOUND)}))
    assert expected_of(found).failing == {}
    path.write_text(expected_text_of(expected_of(found)), encoding="utf-8")
    assert compared(runs, path, failing=FAILING + 1) == Drift()


def test_of_several_runs_the_counts_that_agree_are_kept(runs: Runs) -> None:
    def run(broken: int) -> Results:
        claims = [runs.claim(name, verdict="REFUTED", failing=count) for name, count in (("a", 5), ("b", broken))]
        return runs.results(claims, **(FULL | {"claims_in_config": 2}))

    assert expected_of(run(7), run(7)).failing == {"a": 5, "b": 7}
    assert expected_of(run(7), run(7), run(8)).failing == {"a": 5}


def test_several_runs_agree_in_what_they_are_of_and_in_their_verdicts(runs: Runs) -> None:
    other = FOUND | {"linear": "CRASHED"}
    with pytest.raises(ExpectedError, match="not show the same: linear is VERIFIED in one and CRASHED in the other"):
        expected_of(whole(runs), whole(runs, other))
    with pytest.raises(ExpectedError, match="not show the same: seed is 0 in one and 1 in the other"):
        expected_of(whole(runs), whole(runs, seed=1))
    with pytest.raises(ExpectedError, match="not show the same: it is of other claims: mul"):
        expected_of(whole(runs), whole(runs, {name: FOUND[name] for name in FOUND if name != "mul"}))


def test_what_crashes_may_be_refuted_the_next_time_and_not_the_other_way_round(runs: Runs) -> None:
    """A kernel that leaves its memory dies or is only wrong, by chance."""
    dies, wrong = FOUND | {"conv": "CRASHED"}, FOUND | {"conv": "REFUTED"}
    assert compared(runs, written(runs, dies), wrong) == Drift()
    worse = compared(runs, written(runs, wrong), dies)
    assert worse.differences[1:] == ("conv: expected REFUTED, found CRASHED",)
    for pair in ((dies, wrong), (wrong, dies)):
        assert expected_of(*(whole(runs, each) for each in pair)).verdicts["conv"] is Verdict.CRASHED


def test_waived_claims_are_expected_as_they_were_found(runs: Runs) -> None:
    found = runs.results(
        [runs.claim("conv", verdict="REFUTED", waived=True)], **(FULL | {"claims_in_config": 1}), claims=1
    )
    assert expected_of(found).verdicts == {"conv": Verdict.REFUTED}


def test_differences_begin_with_what_got_worse(runs: Runs) -> None:
    found = {"add": "QUALITY", "conv": "VERIFIED", "linear": "CRASHED", "new": "VERIFIED"}
    said = compared(runs, written(runs), found)
    assert said.note == ""
    assert said.differences == (
        f"{NAME} differs in 5 places; if that is meant, python -m conformance expect RESULTS.jsonl writes it anew",
        "linear: expected VERIFIED, found CRASHED",
        "add: expected VERIFIED, found QUALITY",
        "mul: expected QUALITY, not judged",
        "new: found VERIFIED; the file has no such claim",
        "conv: expected REFUTED, found VERIFIED",
    )


@pytest.mark.parametrize("found", [{"conv": "REFUTED"}, {}])
def test_a_selection_compares_what_was_run(runs: Runs, found: dict[str, str]) -> None:
    assert compared(runs, written(runs), found, claims=1) == Drift()
    worse = compared(runs, written(runs), {"conv": "CRASHED"}, claims=1)
    assert worse.differences[1:] == ("conv: expected REFUTED, found CRASHED",)


def test_many_differences_are_counted(runs: Runs) -> None:
    many = {f"add{number:02}": "VERIFIED" for number in range(MOST_SHOWN + 3)}
    said = compared(runs, written(runs, many), dict.fromkeys(many, "REFUTED"), claims_in_config=len(many))
    assert "differs in 23 places" in said.differences[0]
    assert said.differences[MOST_SHOWN] == "add19: expected VERIFIED, found REFUTED"
    assert said.differences[MOST_SHOWN + 1 :] == ("… and 3 more",)


def test_another_config_is_a_difference(runs: Runs) -> None:
    said = compared(runs, written(runs), config_sha256="cd" * 32)
    assert said.differences[1:] == ("the config is not the one that the file is of: its sha256 differs",)


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
        "no expected verdicts: none.json does not exist: nothing compared; python -m conformance expect RESULTS.jsonl "
        "makes it from the results of a run of profile full"
    )
    assert compared(runs, runs.directory / "none.json", isa="avx512_vnni") == Drift(note=note)
    for level, said in (("custom", "custom"), ("", "not known")):
        note = f"no expected verdicts: the level of the kernels is {said}: nothing compared"
        assert compared(runs, written(runs), isa=level) == Drift(note=note)


@pytest.mark.parametrize("torch", ["2.13.0+cu130", "2.13.0", "2.13.2+cpu"])
def test_every_wheel_of_a_release_is_compared(runs: Runs, torch: str) -> None:
    said = compared(runs, written(runs), {**FOUND, "add": "REFUTED"}, torch=torch)
    assert said.note == "" and said.differences[1:] == ("add: expected VERIFIED, found REFUTED",)
    header = whole(runs, torch=torch).header
    assert expected_path_of(header, runs.directory).name == NAME


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no file of expected verdicts: Expecting property name"),
        ("[1]", "no file of expected verdicts: "),
        (
            '{"schema": 2, "verdicts": {"add": "GOOD"}}',
            "no file of expected verdicts: 'GOOD' is not a valid Verdict; write it anew",
        ),
        ('{"verdicts": {}}', "no file of expected verdicts: "),
    ],
)
def test_a_file_that_is_none_is_a_difference(runs: Runs, text: str, why: str) -> None:
    path = runs.directory / NAME
    path.write_text(text, encoding="utf-8")
    said = compared(runs, path)
    assert len(said.differences) == 1 and said.differences[0].startswith(f"{path}: {why}")


def test_a_file_of_another_schema_is_refused(runs: Runs) -> None:
    path = written(runs)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"schema": 1}), encoding="utf-8")
    with pytest.raises(ExpectedError, match="schema 1; expected 2: write it anew from a run"):
        read_expected(path)


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
    with pytest.raises(ExpectedError, match=why):
        expected_of(whole(runs, **changes))


def test_no_file_is_written_of_an_incomplete_run(runs: Runs) -> None:
    path = runs.directory / "cut.jsonl"
    with ResultsWriter(path) as writer:
        for row in (runs.header(**FULL, claims_in_config=1, pairs=1), runs.claim()):
            writer.write_line(json.dumps(row))
    with pytest.raises(ExpectedError, match="the run is incomplete"):
        expected_of(read_results(path))


def test_a_run_that_failed_by_its_expectations_renews_them(runs: Runs) -> None:
    path = runs.directory / "failed.jsonl"
    with ResultsWriter(path) as writer:
        for row in (runs.header(**FULL, claims_in_config=1, pairs=1), runs.claim("add")):
            writer.write_line(json.dumps(row))
        writer.close(
            outcome=Outcome.FAIL, exit_status=1, seconds=1.0, problems=["add: expected REFUTED, found VERIFIED"]
        )
    assert expected_of(read_results(path)).verdicts == {"add": Verdict.VERIFIED}


def test_the_command_writes_the_file_of_the_runs_backend_and_level(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    results = runs.lines(rows(runs, FOUND), **FULL, claims_in_config=len(FOUND))
    folder = runs.directory / "new"
    assert main(["expect", str(results), "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / NAME}: 4 verdicts\n"
    header = read_results(results).header
    assert expected_path_of(header, folder) == folder / NAME
    assert read_expected(folder / NAME).verdicts == FOUND


def test_the_command_refuses_in_one_line(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    quick = runs.lines(rows(runs, FOUND), **(FULL | {"profile": "quick"}), claims_in_config=len(FOUND))
    for file, why in ((quick, "the run is of profile quick"), (runs.directory / "none", "cannot be read")):
        assert main(["expect", str(file), "--folder", str(runs.directory / "new")]) == 2
        told = capsys.readouterr().err
        assert told.startswith("ERROR: ") and why in told and told.count("\n") == 1
    assert not (runs.directory / "new").exists()


def test_the_command_starts_without_torch() -> None:
    code = "import sys, conformance.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0
