"""``--cache``: a second run lowers nothing, what an answer depends on is asked anew, and a kill leaves it whole."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.run import caching
from conformance.run.caching import check_cache
from conformance.run.options import EXPORTING
from reports.rerun import build_command
from reports.results import Results, comparable, read_results
from reports.verdicts import Outcome, Verdict
from tests.conformance.support.suite_runs import (
    Ran,
    clean_environment,
    kill_after_a_claim,
    options,
    run,
    start,
)

OWN = """
import os
from fakes import Good

class Own(Good):
    name = "own"

    def versions(self):
        return {"compiler": os.environ.get("MADE_UP_VERSION", "1")}
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("plain"), "fakes:Good")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "folder"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Ran:
    return run(tmp_path_factory.mktemp("filled"), "fakes:Good", f"--cache={cache}")


LATE = """
from fakes import Good


class Late(Good):
    def lower(self, reference_model, example_inputs):
        import late_kernels

        return super().lower(reference_model, example_inputs)
"""


def counts(results: Results) -> tuple[int, int, int]:
    return results.lowerings, results.runs, results.cached


def test_without_the_option_all_is_run_and_nothing_is_kept(plain: Ran) -> None:
    lowerings, runs, cached = counts(plain.results)
    assert lowerings > 0 and runs > lowerings and cached == 0 and plain.results.header.options["cache"] is False
    assert f"\n{lowerings} lowerings · {runs} runs\n" in plain.out
    assert [*plain.folder.parent.rglob("*.answers")] == []


def test_the_work_of_a_claim_whose_process_died_is_counted(tmp_path: Path) -> None:
    """A lowering that kills the process was asked for; no run was answered."""
    died = run(tmp_path, "fakes:Misbehaves", f"--cache={tmp_path / 'cache'}", "--claim=nn.Conv1d/*").results
    assert {claim.verdict for claim in died.claims} == {Verdict.CRASHED}
    assert {(claim.lowerings, claim.runs, claim.cached) for claim in died.claims} == {(1, 0, 0)}
    assert [*(tmp_path / "cache").rglob("*.answers")] == []


def test_filling_a_cache_is_a_run_like_any_other(plain: Ran, filled: Ran) -> None:
    assert comparable(filled.results) == comparable(plain.results)
    assert counts(filled.results) == counts(plain.results) and filled.results.header.options["cache"] is True
    assert all(row.lowerings and row.runs for row in filled.results.judged)


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_second_run_lowers_nothing_and_judges_the_same(
    tmp_path: Path, plain: Ran, filled: Ran, cache: Path, workers: str
) -> None:
    before = {path: path.read_bytes() for path in cache.rglob("*.answers")}
    ran = run(tmp_path, "fakes:Good", f"--cache={cache}", workers)
    assert ran.status == 0 and comparable(ran.results) == comparable(plain.results)
    assert counts(ran.results) == (0, 0, plain.results.runs)
    assert "\n0 lowerings · 0 runs · 100 % of all runs from the cache\n" in ran.out
    assert {path: path.read_bytes() for path in cache.rglob("*.answers")} == before and len(before) == len(
        filled.results.judged
    )


def test_another_seed_is_asked_anew_in_the_same_folder(tmp_path: Path, filled: Ran, cache: Path) -> None:
    ran = run(tmp_path, "fakes:Good", f"--cache={cache}", "--seed=5", "--claim=nn.Linear/*")
    assert ran.results.cached < ran.results.runs and len([*cache.iterdir()]) == 1
    again = run(tmp_path / "again", "fakes:Good", f"--cache={cache}")
    assert counts(again.results) == (0, 0, filled.results.runs), "its own answers are still there"


def test_what_answers_depend_on_is_asked_for_anew(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(OWN)

    def ran(name: str, **variables: str) -> tuple[int, int, int]:
        one = "--claim=nn.Linear/*per_tensor*"
        folder, cached = tmp_path / "runs" / name, f"--cache={tmp_path / 'cache'}"
        return counts(run(folder, "made_up:Own", cached, one, cwd=tmp_path, **variables).results)

    lowerings, runs, _ = first = ran("first")
    assert lowerings and ran("again") == (0, 0, runs)
    assert ran("version", MADE_UP_VERSION="2") == first, "another version that the backend names"
    (tmp_path / "made_up.py").write_text(f"{OWN}\n# edited\n")
    assert ran("edited") == first and ran("edited again") == (0, 0, runs)
    (tmp_path / "kernels.py").write_text("")
    assert ran("beside it") == first, "a module that it may import"
    (tmp_path / "made_up.py").write_text(OWN)
    (tmp_path / "kernels.py").unlink()
    assert ran("as at first") == (0, 0, runs)


def test_what_is_imported_late_from_elsewhere_is_not_kept(tmp_path: Path) -> None:
    """A package that only ``lower`` imports, from another folder than the backend's: the key does not tell it."""
    late, own = tmp_path / "elsewhere" / "late_kernels", tmp_path / "own"
    for folder in (late, own):
        folder.mkdir(parents=True)
    (late / "__init__.py").write_text("")
    (own / "made_up.py").write_text(LATE)
    path = os.pathsep.join([*clean_environment()["PYTHONPATH"].split(os.pathsep), str(late.parent)])

    def ran(name: str) -> tuple[int, int, int]:
        options = (f"--cache={tmp_path / 'cache'}", "--claim=nn.Linear/*per_tensor*")
        return counts(run(tmp_path / name, "made_up:Late", *options, cwd=own, PYTHONPATH=path).results)

    first = ran("first")
    assert first[0] and first[2] == 0 and ran("again") == first
    assert [*(tmp_path / "cache").rglob("*.answers")] == []


def test_a_report_in_the_folder_of_the_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(OWN)
    ran = run(tmp_path / "x", "made_up:Own", f"--cache={tmp_path}", "--claim=nn.Linear/*", cwd=tmp_path)
    assert ran.status == 4 and "lies in a folder that the run writes to" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_kill_in_the_middle_leaves_a_cache_that_the_next_run_takes(tmp_path: Path, workers: str) -> None:
    marker, path = tmp_path / "may go on", tmp_path / "report" / "results.jsonl"
    given: dict[str, Any] = {"FAKE_MARKER": str(marker)}
    both, cached = "--claim=nn.Linear/*", f"--cache={tmp_path / 'cache'}"

    killed = kill_after_a_claim(tmp_path, "fakes:Waits", workers, both, cached, **given)
    assert killed.outcome is Outcome.INCOMPLETE and len(killed.claims) == 1
    marker.touch()
    assert start(tmp_path / "again", "fakes:Waits", workers, both, cached, **given).wait(timeout=120) == 0
    again = read_results(tmp_path / "again" / "report" / "results.jsonl")
    whole = run(tmp_path / "whole", "fakes:Waits", both, **given).results
    resumed = run(tmp_path / "resumed", "fakes:Waits", both, cached, f"--resume={path}", **given).results
    assert comparable(again) == comparable(resumed) == comparable(whole)
    assert counts(resumed) == counts(whole), "of each claim as it was run"
    done = killed.claims[0].claim
    for new, old in zip(again.claims, whole.claims, strict=True):
        is_cached = new.claim == done
        assert (new.lowerings, new.runs, new.cached) == (
            (0, 0, old.runs) if is_cached else (old.lowerings, old.runs, 0)
        ), new.claim


def test_claims_that_the_killed_run_has_concluded_are_not_run_again(tmp_path: Path, filled: Ran, cache: Path) -> None:
    """A file for each piece of work: what is left of a cache is used."""
    part = tmp_path / "cache" / next(cache.iterdir()).name
    part.mkdir(parents=True)
    kept = sorted(cache.rglob("*.answers"))[0]
    (part / kept.name).write_bytes(kept.read_bytes())
    (part / ".unfinished-abc").write_bytes(kept.read_bytes()[:100])
    ran = run(tmp_path, "fakes:Good", f"--cache={tmp_path / 'cache'}")
    both = [*zip(ran.results.judged, filled.results.judged, strict=True)]
    assert sorted(bool(new.cached) for new, _ in both) == [False] * (len(both) - 1) + [True]
    assert all(new.runs + new.cached == old.runs for new, old in both)


def test_what_raises_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    cached = f"--cache={tmp_path / 'cache'}"
    first, second = (run(tmp_path / name, "fakes:LowerRaises", cached).results for name in ("first", "second"))
    assert counts(first) == counts(second) and first.lowerings > 0 and second.cached == 0
    assert comparable(first) == comparable(second)


@pytest.mark.parametrize("backend", ["vectors:somewhere", "command:somewhere.toml"])
def test_a_device_has_no_cache(tmp_path: Path, backend: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--cache: what {backend} ran lies in files of its own"):
        check_cache(replace(options(tmp_path), backend=backend, cache=tmp_path))


def test_a_platform_without_fork_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "CAN_FORK", False)
    check_cache(options(tmp_path))
    with pytest.raises(pytest.UsageError, match="which this platform cannot; run without --cache"):
        check_cache(options(tmp_path, cache=tmp_path))


def test_a_folder_that_cannot_be_written_to_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run(tmp_path, "fakes:Good", f"--cache={tmp_path / 'file'}")
    assert ran.status == 4 and f"--cache: cannot write to {tmp_path / 'file'}: " in ran.err
    assert "Traceback" not in ran.err


def test_sources_that_cannot_be_read_are_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(OWN)
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    ran = run(tmp_path / "run", "made_up:Own", f"--cache={tmp_path / 'cache'}", cwd=tmp_path)
    assert ran.status == 4 and f"--cache: {tmp_path / 'gone.py'} cannot be read: " in ran.err
    assert not (tmp_path / "cache").exists()


def test_no_command_that_runs_again_uses_a_cache(filled: Ran) -> None:
    assert not any("cache=" in word for word in build_command(filled.results, None))
    assert not any("--cache" in claim.repro for claim in filled.results.claims)
    assert "--cache" not in EXPORTING
