"""What a run leaves beside its results: shards, live progress, JUnit, job summary, baseline, scripts and graphs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.run.progress import EVERY_IN_LOG, Progress, format_progress
from reports.merge import merge
from reports.results import read_results
from reports.schema import ClaimResult, Row
from reports.shard import Shard
from reports.verdicts import Outcome, Verdict
from reports.writer import ResultsWriter
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, clean_environment, command, run
from tests.support.comparable import comparable
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("workers", ["-n0", "-n1"])
SOME = ("nn.Linear*", "torch.cat*", "nn.*Pool2d*", "torch.add*", "model/chunked*", "model/two_*")
SELECTED = tuple(f"--claim={glob}" for glob in SOME)


# -- shards -----------------------------------------------------------------------------------------------------------


def test_shards_divide_any_ids_without_a_gap_or_an_overlap() -> None:
    names = [f"claim {number}" for number in range(500)]
    shards = [Shard(place=place, of=8) for place in range(1, 9)]
    owners = [[str(shard) for shard in shards if shard.has(name)] for name in names]
    assert all(len(each) == 1 for each in owners)
    sizes = Counter(each[0] for each in owners)
    assert set(sizes) == {f"{place}/8" for place in range(1, 9)} and min(sizes.values()) > 30


def test_where_a_claim_belongs_never_changes() -> None:
    """`printf torch.cat | sha256sum` begins with a125cef23550f954, and 0x954 % 8 is 4: the fifth."""
    assert [place for place in range(1, 9) if Shard(place=place, of=8).has("torch.cat")] == [5]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    folder = tmp_path_factory.mktemp("shards")
    return [run(folder / str(place), "qnnpack", f"--shard={place}/4", *SELECTED) for place in range(1, 5)]


def test_four_shards_merged_equal_the_unsharded_run(tmp_path: Path, shards: list[Ran]) -> None:
    whole = run(tmp_path, "qnnpack", *SELECTED, "-n2")
    assert len(whole.results.claims) > 60 and len(whole.results.models) > 2
    assert {ran.status for ran in shards} | {whole.status} == {0}
    merged = merge([ran.folder / "results.jsonl" for ran in reversed(shards)], tmp_path / "merged.jsonl")
    assert comparable(merged) == comparable(whole.results)
    footers = [results.footer for results in (merged, whole.results)]
    totals = [
        (f.counts, f.claims, f.checks, f.pairs, f.models, f.measurements, f.outcome, f.problems) for f in footers if f
    ]
    assert len(totals) == 2 and totals[0] == totals[1]
    assert merged.outcome is Outcome.PASS and merged.problems == ()


def test_a_shard_says_what_it_is(shards: list[Ran]) -> None:
    assert shards[1].results.header.shard == Shard(place=2, of=4)
    assert "This is shard 2/4 of a run" in (shards[1].folder / "report.html").read_text()


def test_a_shard_without_a_claim_passes_and_merges(tmp_path: Path) -> None:
    """The claim that the glob matches is in one of the two shards."""
    claim = "--claim=nn.Linear/*per_channel*"
    rans = [run(tmp_path / str(place), "fakes:Good", f"--shard={place}/2", claim) for place in (1, 2)]
    assert {ran.status for ran in rans} == {0} and sorted(len(ran.results.claims) for ran in rans) == [0, 1]
    merged = merge([ran.folder / "results.jsonl" for ran in rans], tmp_path / "merged.jsonl")
    assert merged.outcome is Outcome.PASS and merged.header.claims == 1
    (empty,) = (ran.results.header.shard for ran in rans if not ran.results.claims)
    with_workers = run(tmp_path / "workers", "fakes:Good", f"--shard={empty}", claim, "-n1")
    assert with_workers.status == 0 and not with_workers.results.claims


@pytest.mark.parametrize("text", ["0/8", "9/8", "1", "1/0", "a/b", "-1/8"])
def test_a_shard_that_is_none_is_a_usage_error(tmp_path: Path, text: str) -> None:
    ran = run(tmp_path, "fakes:Good", f"--shard={text}")
    assert ran.status == 4 and f"expected K/N with 1 <= K <= N, such as 2/8, found '{text}'" in ran.err


# -- live progress ----------------------------------------------------------------------------------------------------


def test_the_line_says_what_is_done_and_how_long_the_rest_takes() -> None:
    verdicts = Counter({Verdict.VERIFIED: 28, Verdict.REFUTED: 2})
    line = format_progress(verdicts, 30, 120, 20.0)
    assert line == "30 of 120: 2 REFUTED, 28 VERIFIED; 20.0 s, about 1 min 0 s left"
    assert format_progress(Counter(), 0, 120, 1.0) == "0 of 120: no verdict yet; 1.0 s"


@BOTH
def test_on_a_terminal_the_line_is_written_over_in_place_of_dots(tmp_path: Path, workers: str) -> None:
    ours, theirs = pty.openpty()
    words = command(tmp_path, "fakes:Good", "--max-examples=20", workers)
    with subprocess.Popen(words, cwd=FAKES, env=clean_environment(), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b"".join(iter(lambda: _chunk(ours), b"")).decode(errors="replace")
    os.close(ours)
    assert process.returncode == 0, text
    shown = re.findall(r"\r(\d+) of (\d+): (\d+) VERIFIED; [\d.]+ s, about [\d.]+ s left", text)
    assert shown and all(done == verified for done, _, verified in shown), text
    assert not re.search(r"^\.+\s", text, re.M), "pytest's dots stand beside the line"
    assert re.search(r"\d+ passed", text)


def _chunk(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # on Linux the end of a terminal is an error
        return b""


class Log:
    """Stands for pytest's reporter where the output is a file."""

    def __init__(self, verbosity: int = 0) -> None:
        self.verbosity, self.isatty, self.lines = verbosity, False, list[str]()

    def ensure_newline(self) -> None:
        """Nothing is open."""

    def write_line(self, line: str) -> None:
        self.lines.append(line)


def test_in_a_log_a_line_comes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("conformance.run.progress.time.monotonic", lambda: now)
    log: Any = Log()
    progress = Progress(log)
    for done in range(100):
        now = done * 1.0
        progress.show(Counter({Verdict.VERIFIED: done}), done, 100)
    assert [line.split(" of ")[0] for line in log.lines] == ["30", "60", "90"] and EVERY_IN_LOG == 30


@pytest.mark.parametrize("verbosity", [-2, 1])
def test_who_asked_for_less_or_more_gets_pytests_own_output(verbosity: int) -> None:
    log: Any = Log(verbosity)
    assert not Progress(log).replaces_dots
    assert Progress(None).replaces_dots is False


# -- what other programs read -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far_off(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("far_off")
    junit = (f"--junit-xml={folder / 'junit.xml'}", "-o", "junit_family=xunit1")
    return run(folder, "fakes:FarOff", *junit, GITHUB_STEP_SUMMARY=str(folder / "summary.md"))


def test_junit_has_claim_verdict_and_rule_of_every_claim(far_off: Ran) -> None:
    cases = list(ElementTree.parse(far_off.folder.parent / "junit.xml").iter("testcase"))
    every = [{item.get("name"): item.get("value") for item in case.iter("property")} for case in cases]
    found = [each for each in every if "claim" in each]
    claims = {claim.claim: claim for claim in far_off.results.claims}
    assert {each["claim"]: each["verdict"] for each in found} == {name: c.verdict for name, c in claims.items()}
    assert {each["rule"] for each in found} == {"NUM-03"}
    assert sum(len(list(case.iter("failure"))) for case in cases) == sum(
        not row.passes for row in far_off.results.judged
    )


def test_junit_is_the_golden_one(far_off: Ran) -> None:
    """Times, lines, the machine's name and its last digits scrubbed; UPDATE_GOLDEN=1 writes the file anew."""
    text = (far_off.folder.parent / "junit.xml").read_text(encoding="utf-8")
    text = re.sub(r' (time|timestamp|hostname|line)="[^"]*"', r' \1="…"', text).replace("><", ">\n<")
    text = re.sub(r"(distance|allowed)( 0\.5 \+)? [-\d.e+]+", r"\1\2 …", text)
    golden = Path(__file__).parent / "golden" / "junit.xml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_the_job_summary_is_appended_where_the_variable_says(far_off: Ran) -> None:
    text = (far_off.folder.parent / "summary.md").read_text()
    assert text.startswith("## FAIL: good against good config\n")
    assert f"job summary: {far_off.folder.parent / 'summary.md'}\n" in far_off.out


def test_a_job_summary_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good", GITHUB_STEP_SUMMARY="/dev/null/summary.md")
    assert ran.status == 0 and "job summary: /dev/null/summary.md cannot be written" in ran.out


def test_hostile_text_is_inert_in_junit(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Hostile", f"--junit-xml={tmp_path / 'junit.xml'}", "-o", "junit_family=xunit1")
    assert ran.status == 1, ran.out
    text = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert "evil" in text and not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    names = {element.tag for element in ElementTree.fromstring(text).iter()}
    assert names <= {"testsuites", "testsuite", "testcase", "properties", "property", "failure", "system-out"}


# -- an earlier run ---------------------------------------------------------------------------------------------------


def test_the_report_shows_the_differences_to_a_baseline(tmp_path: Path, far_off: Ran) -> None:
    good = run(tmp_path / "good", "fakes:Good")
    ran = run(tmp_path / "bad", "fakes:FarOff", f"--baseline={good.folder / 'results.jsonl'}")
    html = (ran.folder / "report.html").read_text()
    assert len(ran.results.judged) >= 2 and not any(row.passes for row in ran.results.judged)
    assert f"{len(ran.results.judged)} regressed" in html
    assert "Differences from the baseline" not in (far_off.folder / "report.html").read_text()


@pytest.mark.parametrize(("text", "told"), [(None, "cannot be read"), ("hello\n", "not a line of JSON")])
def test_a_bad_baseline_is_told_before_anything_runs(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "old.jsonl"
    if text is not None:
        path.write_text(text)
    ran = run(tmp_path, "fakes:Good", f"--baseline={path}")
    assert ran.status == 4 and told in ran.err and not (ran.folder / "report.html").exists()


# -- evidence of claims that fail -------------------------------------------------------------------------------------


def test_a_claim_that_fails_has_a_script_that_fails_by_itself(far_off: Ran) -> None:
    for claim in far_off.results.claims:
        path = far_off.folder / claim.script_path
        assert path.read_text() == claim.script
        assert _status(claim.script) == 1
        assert _status(claim.script.replace("fakes:FarOff", "reference")) == 0


def test_a_claim_whose_process_dies_has_a_script_too(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Misbehaves", "--claim=nn.Conv1d/*", "--claim=nn.Conv3d/*")
    died = [claim for claim in ran.results.claims if claim.verdict is Verdict.CRASHED]
    assert died and all("find_backend('fakes:Misbehaves')" in claim.script for claim in died)
    assert all({"float model", "reference model"} == claim.graphs.keys() for claim in died)
    assert all(_status(claim.script) not in (0, 1) for claim in died)


def test_where_nothing_quantized_ran_the_script_shows_it_and_the_report_what_ran_instead(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Idle")
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.FALLBACK}
    assert [_status(claim.script) for claim in ran.results.claims] == [1] * len(ran.results.claims)
    checks = [check for check in ran.results.checks if check.verdict is Verdict.FALLBACK]
    assert checks and all(check.evidence["kernels"] == ["sgemm"] for check in checks)
    assert "sgemm" in (ran.folder / "report.html").read_text()


REFUTED_OF_QNNPACK = (
    "nn.Conv2d+nn.ReLU/*in=qint8*/ptq/per_channel_symmetric",  # what is fused stays one module
    "nn.Linear/*float16*",  # a weight without a qscheme
    "nn.EmbeddingBag/*w=quint4x2*/ptq/*",  # a module that knows no bias
    "nnqat.Linear/*in=qint8*/per_channel_symmetric",  # scales that are too many for one line
    "operator.mul+torch.relu/*quint8*/ptq/*",  # on a grid of the kernel's own
)


@pytest.mark.parametrize("glob", REFUTED_OF_QNNPACK)
def test_scripts_of_a_real_engine_fail_for_its_sake_alone(tmp_path: Path, glob: str) -> None:
    ran = run(tmp_path, "qnnpack", f"--claim={glob}", "--no-waivers", "--profile=quick")
    (claim,) = ran.results.claims
    assert not claim.passes
    assert _status(claim.script) != 0
    assert _status(claim.script.replace("find_backend('qnnpack')", "find_backend('reference')")) == 0


def test_own_modules_have_scripts_too(tmp_path: Path) -> None:
    """Before: "no script: Shift is no module of torch.nn". One is made by its constructor, the other unpickled."""
    ran = run(tmp_path, "own_modules:Zeros", "--profile=quick")
    scripts = {claim.pattern: claim.script for claim in ran.results.claims}
    assert "self.m0 = own_modules.Shift(0.5)" in scripts["own_modules.Shift"]
    assert "self.m0 = unpickled(" in scripts["own_modules.Gain"]
    for script in scripts.values():
        assert script.index("find_backend('own_modules:Zeros')") < script.index("import own_modules")
        assert _status(script) == 1
        assert _status(script.replace("own_modules:Zeros", "reference")) == 0
    ops = {claim.op for claim in ran.results.claims}
    assert ops == {"own_modules.Shift(0.5)(x)", "own_modules.Gain(…)(x)"}


def _status(script: str) -> int:
    return run_python("-c", script, cwd=FAKES, environment=clean_environment(), timeout=120).returncode


def test_a_claim_that_holds_has_neither_script_nor_graphs(tmp_path: Path, far_off: Ran) -> None:
    good = run(tmp_path, "fakes:Good", "--claim=*per_tensor_symmetric")
    assert all(claim.script == "" and claim.graphs == {} for claim in good.results.claims)
    assert not list(good.folder.glob("scripts/*"))
    assert all(claim.script and claim.graphs for claim in far_off.results.claims)


def test_the_graphs_are_those_of_the_pattern_before_and_after(far_off: Ran) -> None:
    graphs = far_off.results.claims[0].graphs
    assert graphs["float model"].splitlines() == ["x = input", "op0 = Linear(x)", "return op0"]
    lines = graphs["reference model"].splitlines()
    assert lines[0] == "x = input" and lines[-1].startswith("return ")
    assert sum("quantize_per_tensor(" in line for line in lines) == 2
    assert sum(line.endswith(".dequantize()") for line in lines) == 2


def test_distances_are_counted_of_every_output_element(far_off: Ran, tmp_path: Path) -> None:
    for results, beyond in ((far_off.results, True), (run(tmp_path, "fakes:Good").results, False)):
        checks = [check for check in results.checks if check.stage == "numerics"]
        counts = [check.statistics.distances for check in checks if check.statistics]
        assert checks and len(counts) == len(checks) and all(sum(each) > 100 for each in counts)
        assert all((sum(each[6:]) > 0) is beyond for each in counts)  # above 0.51 LSB there is no right kernel


def test_waivers_are_kept_beside_the_results(tmp_path: Path) -> None:
    waivers = tmp_path / "own.toml"
    waivers.write_text(
        '[[waiver]]\nglob = "*per_channel*"\nverdict = "REFUTED"\nrule = "LOW-01"\nreason = "r"\nexpires = 2099-01-01\n'
    )
    ran = run(tmp_path, "fakes:Deviates", FAKE_WAIVERS=str(waivers))
    assert (ran.folder / "waivers.toml").read_bytes() == waivers.read_bytes()
    assert run(tmp_path, "fakes:Good").status == 0
    assert not (ran.folder / "waivers.toml").exists()


def test_the_copy_of_an_earlier_run_in_the_same_folder_serves_as_waivers(tmp_path: Path) -> None:
    waivers = tmp_path / "waivers.toml"
    text = (
        '[[waiver]]\nglob = "*per_channel*"\nverdict = "REFUTED"\nrule = "LOW-01"\nreason = "r"\nexpires = 2099-01-01\n'
    )
    waivers.write_text(text)
    run(tmp_path, "fakes:Deviates", f"--report-dir={tmp_path}", f"--waivers={waivers}")
    assert waivers.read_text() == text, "what the user gave is not removed before it is read"


def test_of_a_claim_that_hangs_before_it_is_lowered_nothing_is_built_again(tmp_path: Path) -> None:
    """In the process of the tests nobody would stop it."""
    ran = run(tmp_path, "fakes:HangsInFuse", "--claim-timeout=3", "--claim=nn.Linear+nn.ReLU/*")
    assert {claim.verdict for claim in ran.results.claims} == {Verdict.TIMEOUT}
    assert all(claim.script == "" for claim in ran.results.claims)


# -- certificates -----------------------------------------------------------------------------------------------------


def reports(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``python -m reports``."""
    return run_python("-m", "reports", *words, cwd=REPO, environment=clean_environment())


def test_claims_of_a_certificate_are_run_again_and_compared(tmp_path: Path) -> None:
    """On a results file that says of its suite what a clean checkout says; all else is as it was run."""
    made = reports("certify", str(_as_if_clean(run(tmp_path, "fakes:Good"))), "-o", str(tmp_path / "certificate"))
    assert made.returncode == 0, made.stderr
    held = reports("verify", str(tmp_path / "certificate"), "--rerun=1")
    assert "run again: nn.Linear/" in held.stdout
    told = [line for line in held.stdout.splitlines() if line.startswith(("!", "?"))]
    assert len(told) == 1 and told[0].startswith(f"? suite_commit: {'0' * 40} in the old run, ")
    assert held.returncode == 3 and "certificate: holds, with doubts" in held.stdout


def test_a_rerun_that_gives_something_else_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Good")
    reports("certify", str(_as_if_clean(ran, max_lsb=0.125)), "-o", str(tmp_path / "certificate"))
    done = reports("verify", str(tmp_path / "certificate"), "--rerun=99")
    told = [line for line in done.stdout.splitlines() if line.startswith("!")]
    assert done.returncode == 1 and len(told) == len(ran.results.claims), done.stdout
    assert all(" when it was run again: LSB was 0.125, is " in line for line in told), done.stdout


def _as_if_clean(ran: Ran, **changes: Any) -> Path:
    """The results of a run, written anew under another commit, and with other numbers of the claims."""
    path, results = ran.folder.parent / "results.jsonl", ran.results
    with ResultsWriter(path) as writer:
        writer.write(replace(results.header, suite_commit="0" * 40))
        rows: tuple[Row, ...] = (*results.checks, *results.claims, *results.models, *results.measurements)
        for row in rows:
            writer.write(replace(row, **changes) if isinstance(row, ClaimResult) else row)
        writer.close(outcome=Outcome.PASS, exit_status=0, seconds=1.0)
    assert read_results(path).outcome is Outcome.PASS
    return path
