"""What a run leaves beside its results: shards, live progress, JUnit, job summary, baseline, scripts and graphs."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fx_quant_conformance.conformance.run.progress import EVERY_IN_LOG, Progress, format_progress
from fx_quant_conformance.reports.merge import merge
from fx_quant_conformance.reports.results import read_results
from fx_quant_conformance.reports.schema import ClaimResult, Row
from fx_quant_conformance.reports.shard import Shard
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, clean_environment, command, run
from tests.support.comparable import comparable
from tests.support.warm_python import run_python

pytestmark = pytest.mark.slow

ONE = "--claim=nn.Linear/*/per_tensor_symmetric"
SOME = ("torch.cat*", "nn.MaxPool2d/*", "model/two_*")
SELECTED = tuple(f"--claim={glob}" for glob in SOME)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("good"), "fakes:Good")


@pytest.fixture(scope="module")
def far_off(tmp_path_factory: pytest.TempPathFactory, good: Ran) -> Ran:
    """A run in which all is wrong, with all that it may leave for others."""
    folder = tmp_path_factory.mktemp("far_off")
    junit = (f"--junit-xml={folder / 'junit.xml'}", "-o", "junit_family=xunit1")
    baseline = f"--baseline={good.folder / 'results.jsonl'}"
    return run(folder, "fakes:FarOff", *junit, baseline, GITHUB_STEP_SUMMARY=str(folder / "summary.md"))


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
    return [run(folder / str(place), "qnnpack", f"--shard={place}/2", *SELECTED) for place in (1, 2)]


def test_shards_merged_equal_the_unsharded_run(tmp_path: Path, shards: list[Ran]) -> None:
    whole = run(tmp_path, "qnnpack", *SELECTED)
    assert len(whole.results.claims) > 6 and len(whole.results.models) > 2
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
    assert shards[1].results.header.shard == Shard(place=2, of=2)
    assert "This is shard 2/2 of a run" in (shards[1].folder / "report.html").read_text()


def test_a_shard_without_a_claim_passes_and_merges(tmp_path: Path) -> None:
    """The claim that the glob matches is in one of the two shards."""
    claim = "--claim=nn.Linear/*per_channel*"
    rans = [run(tmp_path / str(place), "fakes:Good", f"--shard={place}/2", claim) for place in (1, 2)]
    assert {ran.status for ran in rans} == {0} and sorted(len(ran.results.claims) for ran in rans) == [0, 1]
    merged = merge([ran.folder / "results.jsonl" for ran in rans], tmp_path / "merged.jsonl")
    assert merged.outcome is Outcome.PASS and merged.header.claims == 1


def test_a_shard_without_a_claim_passes_with_workers(tmp_path: Path) -> None:
    claim = "nn.Linear/static:in=quint8,w=qint8,b=float32,out=quint8/ptq/per_tensor_symmetric"
    [empty] = [place for place in (1, 2) if not Shard(place=place, of=2).has(claim)]
    ran = run(tmp_path, "fakes:Good", f"--shard={empty}/2", f"--claim={claim}", "-n1")
    assert ran.status == 0 and ran.results.header.claims == len(ran.results.claims) == 0


# -- live progress ----------------------------------------------------------------------------------------------------


def test_the_line_says_what_is_done_and_how_long_the_rest_takes() -> None:
    verdicts = Counter({Verdict.VERIFIED: 28, Verdict.REFUTED: 2})
    line = format_progress(verdicts, 30, 120, 20.0)
    assert line == "30 of 120: 2 REFUTED, 28 VERIFIED; 20.0 s, about 1 min 0 s left"
    assert format_progress(Counter(), 0, 120, 1.0) == "0 of 120: no verdict yet; 1.0 s"


def test_on_a_terminal_the_line_is_written_over_in_place_of_dots(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    words = command(tmp_path, "fakes:Good", "--claim=nn.*")
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
    monkeypatch.setattr("fx_quant_conformance.conformance.run.progress.time.monotonic", lambda: now)
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


def test_hostile_text_is_inert_in_junit(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Hostile", ONE, f"--junit-xml={tmp_path / 'junit.xml'}", "-o", "junit_family=xunit1")
    assert ran.status == 1, ran.out
    text = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert "evil" in text and not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    names = {element.tag for element in ElementTree.fromstring(text).iter()}
    assert names <= {"testsuites", "testsuite", "testcase", "properties", "property", "failure", "system-out"}


# -- an earlier run ---------------------------------------------------------------------------------------------------


def test_the_report_shows_the_differences_to_a_baseline(good: Ran, far_off: Ran) -> None:
    judged = far_off.results.judged
    assert len(judged) >= 2 and not any(row.passes for row in judged)
    assert f"{len(judged)} regressed" in (far_off.folder / "report.html").read_text()
    assert "Differences from the baseline" not in (good.folder / "report.html").read_text()


def test_a_bad_baseline_is_told_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text("hello\n")
    ran = run(tmp_path, "fakes:Good", f"--baseline={path}")
    assert ran.status == 4 and "not a line of JSON" in ran.err and not (ran.folder / "report.html").exists()


# -- evidence of claims that fail -------------------------------------------------------------------------------------


def test_a_claim_that_fails_has_a_script_that_fails_by_itself(far_off: Ran) -> None:
    for claim in far_off.results.claims:
        assert (far_off.folder / claim.script_path).read_text() == claim.script
    script = far_off.results.claims[0].script
    assert _status(script) == 1
    assert _status(script.replace("fakes:FarOff", "reference")) == 0


def test_numbers_of_any_size_are_reported(far_off: Ran) -> None:
    assert far_off.status == 1 and {claim.verdict for claim in far_off.results.claims} == {Verdict.REFUTED}
    found = [check.evidence["found"] for check in far_off.results.checks if "found" in (check.evidence or {})]
    assert min(float(number) for numbers in found for number in numbers) < -(2**31)


def test_a_claim_whose_process_dies_has_a_script_too(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Misbehaves", "--claim=nn.Conv3d/*")
    [died] = ran.results.claims
    assert died.verdict is Verdict.CRASHED and 'find_backend("fakes:Misbehaves")' in died.script
    assert died.graphs.keys() == {"float model", "reference model"}
    assert _status(died.script) not in (0, 1)


def test_where_nothing_quantized_ran_the_script_shows_it_and_the_report_what_ran_instead(tmp_path: Path) -> None:
    ran = run(tmp_path, "fakes:Idle", ONE)
    [claim] = ran.results.claims
    assert claim.verdict is Verdict.FALLBACK and _status(claim.script) == 1
    checks = [check for check in ran.results.checks if check.verdict is Verdict.FALLBACK]
    assert checks and all(check.evidence["kernels"] == ["sgemm"] for check in checks)
    assert "sgemm" in (ran.folder / "report.html").read_text()


REFUTED_OF_QNNPACK = (
    "nn.Conv2d+nn.ReLU/*in=qint8*/ptq/per_channel_symmetric",  # what is fused stays one module
    "nn.Linear/*float16*",  # a weight without a qscheme
    "nn.EmbeddingBag/*w=quint4x2*/qat/*",  # a module that knows no bias
    "nnqat.Linear/*in=qint8*/per_channel_symmetric",  # scales that are too many for one line
    "operator.mul+torch.relu/*quint8*/ptq/*",  # on a grid of the kernel's own
)


@pytest.fixture(scope="module")
def refuted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ClaimResult]:
    """The claims of QNNPACK that are refuted, by their globs."""
    globs = [f"--claim={glob}" for glob in REFUTED_OF_QNNPACK]
    ran = run(tmp_path_factory.mktemp("refuted"), "qnnpack", *globs, "--no-waivers")
    return {glob: row for glob in REFUTED_OF_QNNPACK for row in ran.results.claims if fnmatchcase(row.claim, glob)}


@pytest.mark.parametrize("glob", REFUTED_OF_QNNPACK)
def test_scripts_of_a_real_engine_fail_for_its_sake_alone(refuted: dict[str, ClaimResult], glob: str) -> None:
    claim = refuted[glob]
    assert not claim.passes
    assert _status(claim.script) != 0
    assert _status(claim.script.replace('find_backend("qnnpack")', 'find_backend("reference")')) == 0


def test_own_modules_have_scripts_too(tmp_path: Path) -> None:
    """Before: "no script: Shift is no module of torch.nn". One is made by its constructor, the other unpickled."""
    ran = run(tmp_path, "own_modules:Zeros", "--claim=own_modules.*")
    scripts = {claim.pattern: claim.script for claim in ran.results.claims}
    assert "self.m0 = own_modules.Shift(0.5)" in scripts["own_modules.Shift"]
    assert "self.m0 = unpickled(" in scripts["own_modules.Gain"]
    for script in scripts.values():
        assert script.index('find_backend("own_modules:Zeros")') < script.index("import own_modules")
        assert _status(script) == 1
        assert _status(script.replace("own_modules:Zeros", "reference")) == 0
    ops = {claim.op for claim in ran.results.claims}
    assert ops == {"own_modules.Shift(0.5)(x)", "own_modules.Gain(…)(x)"}


def _status(script: str) -> int:
    return run_python("-c", script, cwd=FAKES, environment=clean_environment(), timeout=120).returncode


def test_a_claim_that_holds_has_neither_script_nor_graphs(good: Ran, far_off: Ran) -> None:
    assert all(claim.script == "" and claim.graphs == {} for claim in good.results.claims)
    assert not list(good.folder.glob("scripts/*"))
    assert all(claim.script and claim.graphs for claim in far_off.results.claims)


def test_the_graphs_are_those_of_the_pattern_before_and_after(far_off: Ran) -> None:
    graphs = far_off.results.claims[0].graphs
    assert graphs["float model"].splitlines() == ["x = input", "op0 = Linear(x)", "return op0"]
    lines = graphs["reference model"].splitlines()
    assert lines[0] == "x = input" and lines[-1].startswith("return ")
    for verb in ("quantize", "dequantize"):
        assert sum(f" = {verb}_per_tensor.default(" in line for line in lines) == 2, lines


def test_distances_are_counted_of_every_output_element(far_off: Ran, good: Ran) -> None:
    for results, beyond in ((far_off.results, True), (good.results, False)):
        checks = [check for check in results.checks if check.stage == "numerics"]
        counts = [check.statistics.distances for check in checks if check.statistics]
        assert checks and len(counts) == len(checks) and all(sum(each) > 100 for each in counts)
        assert all((sum(each[6:]) > 0) is beyond for each in counts)  # above 0.51 LSB there is no right kernel


def test_waivers_are_kept_beside_the_results_and_serve_the_next_run_in_the_same_folder(tmp_path: Path) -> None:
    """What the user gives is not removed before it is read."""
    waivers = tmp_path / "own.toml"
    text = (
        '[[waiver]]\nglob = "*per_channel*"\nverdict = "REFUTED"\nrule = "LOW-01"\nreason = "r"\nexpires = 2099-01-01\n'
    )
    waivers.write_text(text)
    first = run(tmp_path, "fakes:Deviates", "--claim=nn.*", FAKE_WAIVERS=str(waivers))
    copy = first.folder / "waivers.toml"
    assert first.status == 0 and "1 WAIVED" in first.out and copy.read_text() == text
    again = run(tmp_path, "fakes:Deviates", "--claim=nn.*", f"--waivers={copy}", FAKE_WAIVERS="none")
    assert again.status == 0 and copy.read_text() == text


def test_of_a_claim_that_hangs_before_it_is_lowered_nothing_is_built_again(tmp_path: Path) -> None:
    """In the process of the tests nobody would stop it."""
    ran = run(tmp_path, "fakes:HangsInFuse", "--claim-timeout=2", "--claim=nn.Linear+nn.ReLU/*/per_tensor*")
    [claim] = ran.results.claims
    assert claim.verdict is Verdict.TIMEOUT and claim.script == ""


# -- certificates -----------------------------------------------------------------------------------------------------


def reports(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``fx-quant-conformance report``."""
    return run_python("-m", "fx_quant_conformance", "report", *words, cwd=REPO, environment=clean_environment())


def test_claims_of_a_certificate_that_give_something_else_when_they_are_run_again_are_told(
    tmp_path: Path, good: Ran
) -> None:
    """Of a results file that says of its suite what a clean checkout says."""
    reports("certify", str(_as_if_clean(good, tmp_path, max_lsb=0.125)), "-o", str(tmp_path / "certificate"))
    done = reports("verify", str(tmp_path / "certificate"), "--rerun=99")
    told = [line for line in done.stdout.splitlines() if line.startswith("!")]
    assert "run again: nn.Linear/" in done.stdout
    assert done.returncode == 1 and len(told) == len(good.results.claims), done.stdout
    assert all(" when it was run again: LSB was 0.125, is " in line for line in told), done.stdout


def _as_if_clean(ran: Ran, folder: Path, **changes: Any) -> Path:
    """The results of a run, written anew under another commit, and with other numbers of the claims."""
    path, results = folder / "results.jsonl", ran.results
    with ResultsWriter(path) as writer:
        writer.write(replace(results.header, suite_commit="0" * 40))
        rows: tuple[Row, ...] = (*results.checks, *results.claims, *results.models, *results.measurements)
        for row in rows:
            writer.write(replace(row, **changes) if isinstance(row, ClaimResult) else row)
        writer.close(outcome=Outcome.PASS, exit_status=0, seconds=1.0)
    assert read_results(path).outcome is Outcome.PASS
    return path
