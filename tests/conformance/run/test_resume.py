"""Resuming: what an earlier run has judged is taken from its file, ruled on by today's waivers; the rest is run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.conformance.run.report_folder import KEPT
from fx_quant_conformance.conformance.run.resume import Earlier, read_earlier
from fx_quant_conformance.reports.results import ResultsError, read_results
from fx_quant_conformance.reports.schema import ClaimResult, Measurement
from fx_quant_conformance.reports.verdicts import Outcome, Verdict
from fx_quant_conformance.reports.writer import ResultsWriter
from tests.conformance.support.made_up_runs import Session, checks, model, waiver, work
from tests.conformance.support.suite_runs import FAKES, REPO, Ran, kill_after_a_claim, run
from tests.support.comparable import comparable

WAIVER = """
[[waiver]]
glob = "*per_channel*"
verdict = "REFUTED"
rule = "LOW-01"
reason = "weights per channel are declined"
url = "https://example.org/issues/12"
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("good"), "fakes:Good")


def resume(folder: Path, backend: str, *options: str, **variables: Any) -> Ran:
    """Run the suite with --resume for the file that its own will replace."""
    return run(folder, backend, f"--resume={folder / 'report' / 'results.jsonl'}", *options, **variables)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    marker = tmp_path / "may go on"
    given: dict[str, Any] = {"FAKE_MARKER": str(marker)}
    both = "--claim=nn.Linear/*"
    killed = kill_after_a_claim(tmp_path, "fakes:Waits", both, **given)
    assert killed.outcome is Outcome.INCOMPLETE and len(killed.claims) == 1
    marker.touch()
    ran = resume(tmp_path, "fakes:Waits", both, **given)
    assert ran.status == 0 and "1 passed" in ran.out, ran.out
    assert read_results(tmp_path / "report" / KEPT) == killed
    whole = run(tmp_path / "whole", "fakes:Waits", both, **given)
    assert comparable(ran.results) == comparable(whole.results)
    assert ran.results.footer and "whose time is not known" in ran.results.footer.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_of_a_run_that_came_to_its_end_nothing_is_run_again(tmp_path: Path, good: Ran, workers: str) -> None:
    ran = run(tmp_path, "fakes:Good", f"--resume={good.folder / 'results.jsonl'}", workers)
    assert ran.status == 0 and comparable(ran.results) == comparable(good.results)
    count = len(good.results.judged)
    note = f"resumed: {count} of {count} claims, models and measurements are from the run that began at "
    assert ran.results.footer and ran.results.footer.notes[0].startswith(note)
    assert good.results.footer and ran.results.footer.seconds > good.results.footer.seconds
    assert not (ran.folder / KEPT).exists() and "passed" not in ran.out.rpartition("conformance")[2]


@pytest.mark.slow
def test_waivers_of_today_rule_on_what_was_judged_under_others(tmp_path: Path) -> None:
    """New ones cover it. What none covers any more is run again, for its script."""
    path = tmp_path / "waivers.toml"
    path.write_text(WAIVER)
    given: dict[str, Any] = {"FAKE_WAIVERS": str(path)}
    claims = "--claim=nn.*"
    without = run(tmp_path / "without", "fakes:Deviates", claims, "--no-waivers", **given)
    waived = run(tmp_path / "waived", "fakes:Deviates", claims, **given)
    assert (without.status, waived.status) == (1, 0)
    first, other = without.results, waived.results
    again = resume(tmp_path / "without", "fakes:Deviates", claims, **given)
    assert again.status == 0 and comparable(again.results) == comparable(other)
    again = resume(tmp_path / "waived", "fakes:Deviates", claims, "--no-waivers", **given)
    assert again.status == 1 and comparable(again.results) == comparable(first)
    assert [claim.script for claim in again.results.claims if not claim.passes] != [""]


@pytest.mark.slow
def test_a_run_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path, good: Ran) -> None:
    before = (good.folder / "results.jsonl").read_bytes()
    ran = resume(good.folder.parent, "fakes:Good", "--seed=4")
    told = "is of another run: seed is 0, and 4 in this run; run everything, without --resume"
    assert ran.status == 4 and "--resume: " in ran.err and told in ran.err
    assert "Traceback" not in ran.err and (good.folder / "results.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_kernel_that_was_edited_since_is_run_again(tmp_path: Path) -> None:
    """Before, a kernel that was edited to be wrong passed with the results of the right one."""
    kernel = tmp_path / "device.py"
    kernel.write_text("from fakes import Good\n\n\nclass Device(Good):\n    pass\n")
    given: dict[str, Any] = {"cwd": tmp_path, "PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES), str(tmp_path)])}
    one = "--claim=nn.Linear/*per_tensor*"
    right = run(tmp_path, "device:Device", one, **given)
    assert right.status == 0 and right.results.header.resumed == 0
    taken = resume(tmp_path, "device:Device", one, **given)
    assert taken.status == 0 and taken.results.header.resumed == len(taken.results.claims)
    assert "an earlier run judged them (--resume)" in (taken.folder / "report.html").read_text()
    kernel.write_text(kernel.read_text() + "    def execution(self, lowered):\n        return None\n")
    wrong = resume(tmp_path, "device:Device", one, **given)
    assert wrong.status == 4 and "is of another run: sources_sha256 is " in wrong.err


PARTLY = """
import torch
from fakes import Good


class Device(Good):
    def lower(self, model, inputs):
        if torch.per_channel_affine in [getattr(module, "weight_qscheme", None) for module in model.modules()]:
            raise ValueError("no such kernel")
        return super().lower(model, inputs)
"""


@pytest.mark.slow
def test_a_vendor_runs_again_what_failed_and_merges_it_into_the_whole(tmp_path: Path) -> None:
    """A kernel is mended: what failed is run again. The rest is of the old kernel, so nothing is certified yet."""
    kernel = tmp_path / "device.py"
    kernel.write_text(PARTLY)
    given: dict[str, Any] = {"cwd": tmp_path, "PYTHONPATH": os.pathsep.join([str(REPO), str(FAKES), str(tmp_path)])}
    claims = "--claim=nn.*"
    first = run(tmp_path / "first", "device:Device", claims, **given)
    failing = [row.id for row in first.results.judged if not row.passes]
    assert first.status == 1 and 0 < len(failing) < len(first.results.judged)
    file = f"--failed-of={first.folder / 'results.jsonl'}"
    again = run(tmp_path / "again", "device:Device", claims, file, **given)
    assert (again.status, again.results.outcome) == (1, Outcome.FAIL)
    assert comparable(again.results) == comparable(first.results)
    assert again.results.header.resumed == len(first.results.judged) - len(failing)
    kernel.write_text("from fakes import Good\n\n\nclass Device(Good):\n    pass\n")
    mended = run(tmp_path / "mended", "device:Device", claims, file, **given)
    assert all(row.passes for row in mended.results.judged)
    assert [row.id for row in mended.results.judged] == [row.id for row in first.results.judged]
    assert (mended.status, mended.results.outcome, mended.results.header.sources_sha256) == (1, Outcome.INCOMPLETE, "")
    assert "is of other sources; run everything to see what holds" in mended.out
    of_two = mended.folder / "results.jsonl"
    refused, loop = (
        run(tmp_path / "on", "device:Device", claims, f"--{option}={of_two}", **given)
        for option in ("resume", "failed-of")
    )
    assert refused.status == 4 and "does not say which sources it is of" in refused.err
    assert loop.status == 1 and loop.results.outcome is Outcome.INCOMPLETE, "also the next time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"verdict": "REFUTED"', '"verdict": "VERIFIED"', "is VERIFIED, but its check invariance/R-1 says REFUTED"),
        ('"sources_sha256": "0000', '"sources_sha256_": "0000', "does not say which sources it is of"),
    ],
    ids=["verdict", "sources"],
)
def test_what_is_taken_over_must_agree_with_itself(tmp_path: Path, old: str, new: str, told: str) -> None:
    """Before, a claim was taken as VERIFIED whose check had failed."""
    first = Session(tmp_path, ["a"])
    first.whole(first.claims[0], Verdict.REFUTED, "fail", message="far off")
    first.finish(1)
    *lines, _ = first.path.read_text().splitlines()
    edited = [line.replace(old, new) if '"kind": "check"' not in line else line for line in lines]
    assert edited != lines
    path = tmp_path / "earlier.jsonl"
    path.write_text("\n".join(edited) + "\n")
    with pytest.raises(ResultsError, match=told):
        read_earlier(Session(tmp_path, ["a"], resume=path).run)


@pytest.mark.slow
def test_a_claim_without_all_of_its_checks_is_run_again(tmp_path: Path) -> None:
    first = Session(tmp_path, ["a", "b"])
    for claim in first.claims:
        first.whole(claim, Verdict.VERIFIED, "pass")
    first.finish(0)
    *lines, _ = first.path.read_text().splitlines()
    name, other = (claim.id for claim in first.claims)
    kept = [line for line in lines if f'"claim": "{name}"' not in line or '"stage": "refusal"' not in line]
    assert len(kept) == len(lines) - 1
    path = tmp_path / "earlier.jsonl"
    path.write_text("\n".join(kept) + "\n")
    assert list(read_earlier(Session(tmp_path, ["a", "b"], resume=path).run).rows) == [other]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "changes", "told"),
    [
        ("a", {"max_examples": 3}, "options.max_examples is None, and 3 in this run;"),
        ("ab", {}, "claims is 1, and 2 in this run"),
    ],
)
def test_a_run_with_other_options_or_claims_is_another(
    tmp_path: Path, names: str, changes: dict[str, Any], told: str
) -> None:
    first = Session(tmp_path, ["a"])
    first.whole(first.claims[0])
    first.finish()
    with pytest.raises(ResultsError, match=f"is of another run: {told}"):
        read_earlier(Session(tmp_path / "now", names, resume=first.path, **changes).run)


@pytest.mark.slow
def test_what_lets_a_verdict_pass_may_change(tmp_path: Path) -> None:
    """It was refused, with both dicts of options."""
    first = Session(tmp_path, ["a"])
    first.whole(first.claims[0], Verdict.UNSHOWN)
    first.finish()
    for allowed in (False, True):
        again = Session(tmp_path / f"{allowed}", ["a"], resume=first.path, without_execution_evidence=allowed)
        [rows] = read_earlier(again.run).rows.values()
        assert [row.passes for row in rows if isinstance(row, ClaimResult)] == [allowed]


# -- which units are taken --------------------------------------------------------------------------------------------

FACT, FUZZ = "fact/fingerprint/linear", "model/fuzz/0/ptq"
MEASURED = Measurement(topic="fingerprint", subject="linear, quint8", values={"ties": "half_even"})


def earlier_of(folder: Path, *, is_stopped: bool = False, now: tuple[Any, ...] = (), **settings: Any) -> Earlier:
    """What a run takes from one of the same units; ``now``: its waivers."""
    first = Session(folder, ["a"], jobs=["model/resnet/ptq", FUZZ, FACT], **settings)
    first.whole(first.claims[0], Verdict.REFUTED, "fail", message="far off")
    for job in first.jobs[:2]:
        first.ended(job, work(model(job.id)))
    first.ended(first.jobs[2], work(MEASURED))
    if not is_stopped:
        first.finish(1)
    again = Session(folder / "now", ["a"], jobs=["model/resnet/ptq", FUZZ, FACT], waivers=now, resume=first.path)
    return read_earlier(again.run)


@pytest.mark.slow
def test_all_is_taken_of_a_run_that_came_to_its_end(tmp_path: Path) -> None:
    rows = earlier_of(tmp_path).rows
    assert rows.keys() == {"a/static:int8", "model/resnet/ptq", FUZZ, FACT}
    assert rows[FACT] == (MEASURED,) and len(rows["model/resnet/ptq"]) == 1


@pytest.mark.slow
def test_a_measurement_of_a_run_that_was_stopped_is_made_again(tmp_path: Path) -> None:
    """A measuring job may give several rows or none: none of them says that it came to its end."""
    rows = earlier_of(tmp_path, is_stopped=True).rows
    assert rows.keys() == {"a/static:int8", "model/resnet/ptq", FUZZ}


@pytest.mark.slow
def test_a_reason_is_given_once_though_a_waiver_does_not_cover_it_twice(tmp_path: Path) -> None:
    small = waiver("a/static:int8", Verdict.FALLBACK)
    rows = earlier_of(tmp_path, waivers=[small], now=(small,)).rows
    reason = rows["a/static:int8"][-1].reason  # type: ignore[union-attr]
    assert reason.startswith("far off (not waived: ") and reason.count("not waived") == 1


@pytest.mark.slow
def test_graphs_are_drawn_again_where_the_waivers_differ(tmp_path: Path) -> None:
    """They are drawn of patterns that no waiver covers."""
    session = Session(tmp_path, [], jobs=[FUZZ, "model/resnet/ptq"])
    for job in session.jobs:
        session.ended(job, work(model(job.id)))
    header = session.run.make_header()
    path = tmp_path / "other.jsonl"
    with ResultsWriter(path) as writer:
        writer.write(replace(header, waivers={"file": "other.toml", "sha256": "0" * 64}))
        for line in session.path.read_text().splitlines()[1:]:
            writer.write_line(line)
    run_now = Session(tmp_path, [], jobs=[FUZZ, "model/resnet/ptq"], resume=path).run
    assert read_earlier(run_now).rows.keys() == {"model/resnet/ptq"}


def test_without_resume_nothing_is_taken(tmp_path: Path) -> None:
    session = Session(tmp_path, ["a"])
    session.ended(session.claims[0], work(*checks(session.claims[0])))
    assert read_earlier(session.run) == Earlier()
    with pytest.raises(ResultsError, match="cannot be read"):
        read_earlier(Session(tmp_path, ["a"], resume=tmp_path / "none").run)


def test_a_run_that_was_killed_before_its_first_row_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.jsonl").touch()
    ran = resume(tmp_path, "fakes:Good")
    assert ran.status == 0 and ran.results.header.resumed == 0 and not (ran.folder / KEPT).exists()
