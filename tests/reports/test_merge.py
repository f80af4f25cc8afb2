"""Merging shards: together they are the whole run, and nothing less is taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.merge import merge
from fx_quant_conformance.reports.results import ResultsError, digest_ids, read_results
from fx_quant_conformance.reports.verdicts import Outcome
from tests.support.comparable import comparable
from tests.support.reporting import main


def shards(runs: Any, of: int = 3, **changes: Any) -> list[Path]:
    """A run of twelve claims in so many parts."""
    return [shard(runs, place, of, **changes) for place in range(1, of + 1)]


def shard(runs: Any, place: int, of: int, **changes: Any) -> Path:
    rows = [row for number in range(12) if number % of == place - 1 for row in claim(runs, number)]
    path: Path = runs.lines(rows, shard={"place": place, "of": of}, **WHOLE | changes)
    return path


def claim(runs: Any, number: int) -> list[Any]:
    name = f"claim {number:02}"
    return [runs.check(name), runs.claim(name, pattern=f"nn.Op{number % 5}")]


WHOLE = {
    "claims_in_config": 12,
    "pairs": 5,
    "claims_sha256": digest_ids(f"claim {number:02}" for number in range(12)),
}


def test_a_shard_that_has_lost_rows_is_refused(runs: Any) -> None:
    """Before, three shards of which two were emptied, header and totals with them, were PASS with 4 of 12 claims."""
    paths = [shards(runs)[0], *(runs.lines([], shard={"place": place, "of": 3}, **WHOLE) for place in (2, 3))]
    told = "the shards have 4 of 12 claims, or other ones: a shard has lost rows; run it again"
    with pytest.raises(ResultsError, match=told):
        merge(paths, runs.directory / "all.jsonl")


@pytest.mark.parametrize(
    ("sources", "told"), [("12" * 32, "sources_sha256 is '1212"), ("", "does not say which sources it is of")]
)
def test_shards_of_other_sources_are_refused(runs: Any, sources: str, told: str) -> None:
    """Before, a kernel that was edited between two shards was merged with what the other one showed."""
    paths = [*shards(runs)[:2], shard(runs, 3, 3, sources_sha256=sources)]
    with pytest.raises(ResultsError, match=told):
        merge(paths, runs.directory / "all.jsonl")


def test_the_merged_file_counts_what_earlier_runs_judged(runs: Any) -> None:
    paths = [shard(runs, place, 3, resumed=place) for place in (1, 2, 3)]
    assert merge(paths, runs.directory / "all.jsonl").header.resumed == 6


def test_the_merged_file_names_all_foreign_code(runs: Any) -> None:
    paths = [shard(runs, place, 3, foreign_code=[f"tqdm {place}"]) for place in (2, 1)] + [shard(runs, 3, 3)]
    assert merge(paths, runs.directory / "all.jsonl").header.foreign_code == ["tqdm 1", "tqdm 2"]


def test_shards_together_are_the_whole(runs: Any) -> None:
    whole = runs.results([row for number in range(12) for row in claim(runs, number)], **WHOLE)
    merged = merge(shards(runs)[::-1], runs.directory / "all.jsonl")
    assert comparable(merged) == comparable(whole)
    assert (merged.outcome, merged.problems, merged.counts) == (Outcome.PASS, (), whole.counts)
    assert merged.footer and merged.footer.notes == ["merged from 3 shards; the time is that of all of them together"]
    assert merged.footer.seconds == 3 * 75.5


def test_a_failing_shard_fails_the_whole(runs: Any) -> None:
    paths = shards(runs)
    rows = [*claim(runs, 1), *claim(runs, 4), *claim(runs, 7), *runs.refuted("claim 10", pattern="nn.Op0")]
    paths[1] = runs.lines(rows, shard={"place": 2, "of": 3}, **WHOLE)
    merged = merge(paths, runs.directory / "all.jsonl")
    assert (merged.outcome, merged.problems) == (Outcome.FAIL, ())


def test_a_shard_may_have_no_claim(runs: Any) -> None:
    paths = shards(runs, of=13)
    assert read_results(paths[-1]).claims == () and read_results(paths[-1]).outcome is Outcome.PASS
    assert len(merge(paths, runs.directory / "all.jsonl").claims) == 12


def test_machines_may_differ(runs: Any) -> None:
    paths = shards(runs)
    paths[2] = shard(runs, 3, 3, cpu="Other CPU", platform="Linux-7", cpu_flags=["avx2"], started="2024-01-01T00:00:00")
    header = merge(paths, runs.directory / "all.jsonl").header
    assert (header.cpu, header.platform) == ("Some CPU @ 2.60GHz; Other CPU", "Linux-6.1-x86_64; Linux-7")
    assert (header.cpu_flags, header.started, header.shard) == (["avx2"], "2024-01-01T00:00:00", None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 8}, "seed is 8; {first} has 7: another run"),
        ({"torch": "2.14.0"}, "torch is '2.14.0'; {first} has '2.13.0+cpu': another run"),
        ({"suite_commit": "f" * 40}, "suite_commit is 'ffff"),
        ({"config_sha256": "00" * 32}, "config_sha256 is '0000"),
        ({"isa": "avx2"}, "isa is 'avx2'; {first} has None: another run"),
        ({"options": {"strict": True}}, "options is {{'strict': True}}"),
        ({"versions": {"qnnpack": "9"}}, "versions is {{'qnnpack': '9'}}"),
        ({"profile": "full"}, "profile is 'full'; {first} has 'quick': another run"),
    ],
)
def test_a_shard_of_another_run_is_refused(runs: Any, changes: Any, told: str) -> None:
    paths = shards(runs)
    paths[1] = shard(runs, 2, 3, **changes)
    with pytest.raises(ResultsError) as raised:
        merge(paths, runs.directory / "all.jsonl")
    assert str(raised.value).startswith(f"{paths[1]}: {told.format(first=paths[0])}")


def test_a_missing_or_doubled_shard_is_refused(runs: Any) -> None:
    paths = shards(runs)
    target = runs.directory / "all.jsonl"
    with pytest.raises(ResultsError, match="shard 2/3 is missing"):
        merge([paths[0], paths[2]], target)
    with pytest.raises(ResultsError, match=r"shard 1/3 is here twice, the first is .*run0"):
        merge([*paths, shard(runs, 1, 3)], target)
    with pytest.raises(ResultsError, match=r"in different numbers of parts: of 3 .* and of 4 "):
        merge([*paths, shard(runs, 4, 4)], target)
    with pytest.raises(ResultsError, match="is no shard"):
        merge([runs.lines([runs.claim()])], target)
    assert not target.exists()


def test_an_incomplete_or_edited_shard_is_refused(runs: Any) -> None:
    paths, target = shards(runs), runs.directory / "all.jsonl"
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-9])
    with pytest.raises(ResultsError, match=f"{paths[1]}: shard 2/3 is incomplete; run it again"):
        merge(paths, target)
    paths[1].write_bytes(content.replace(b"0.4996", b"0.4990"))
    with pytest.raises(ResultsError, match=f"{paths[1]}: disagrees with itself: the footer's sha256"):
        merge(paths, target)


def test_the_command_writes_results_and_report(runs: Any, capsys: Any) -> None:
    target = runs.directory / "all.jsonl"
    words = ["merge", *map(str, shards(runs)), "-o", str(target)]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("12 claims: 12 VERIFIED\n")
    assert target.with_suffix(".html").exists() and read_results(target).outcome is Outcome.PASS
    assert main(["merge", str(target), "-o", str(target)]) == 2
    assert "would replace a shard" in capsys.readouterr().err
