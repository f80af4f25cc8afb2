"""The history of backends: runs in order, apart by backend, profile and level, with the counts of their files."""

from __future__ import annotations

import random
from typing import Any

import pytest

from reports.__main__ import main
from reports.diff import Change
from reports.history import HEIGHT, TOP, Trend, build_history, render_history
from reports.results import Results, ResultsError, read_results
from reports.verdicts import VERDICTS
from tests.reports.pages import Page

VERDICT_ROWS: tuple[dict[str, int], ...] = (
    {"VERIFIED": 3, "REFUTED": 2}, {"VERIFIED": 4, "REFUTED": 1, "CRASHED": 1}, {"VERIFIED": 5},
)  # fmt: skip


def _run(runs: Any, counts: dict[str, int], day: int, **header: Any) -> Results:
    names = [verdict for verdict, count in counts.items() for _ in range(count)]
    rows = [runs.claim(f"claim {place}", verdict=verdict) for place, verdict in enumerate(names)]
    results: Results = runs.results(rows, started=f"2026-01-0{day}T03:04:05+00:00", **header)
    return results


def _series(runs: Any, **header: Any) -> list[Results]:
    return [
        _run(runs, counts, day, suite_commit=f"{day}" * 40, suite_version=f"0.{day}.0", **header)
        for day, counts in enumerate(VERDICT_ROWS, start=1)
    ]


def _days(trend: Trend) -> list[str]:
    return [moment.results.header.started[:10] for moment in trend.moments]


def test_runs_stand_in_the_order_of_their_start_whatever_the_order_of_the_files(runs: Any) -> None:
    series = _series(runs)
    text = render_history(series)
    for seed in range(5):
        random.Random(seed).shuffle(series)
        [trend] = build_history(series)
        assert _days(trend) == ["2026-01-01", "2026-01-02", "2026-01-03"]
        assert render_history(series) == text


def test_counts_and_shares_are_those_of_the_files(runs: Any) -> None:
    page = Page(render_history(_series(runs)))
    titles, *rows = page.tables["Claims of qnnpack quick"]
    found = [dict(zip(titles, row, strict=True)) for row in rows]
    for row, counts, share in zip(found, VERDICT_ROWS, ("60 %", "67 %", "100 %"), strict=True):
        assert {name: int(row[name.lower()]) for name in ("VERIFIED", "REFUTED", "CRASHED")} == {
            "VERIFIED": 0, "REFUTED": 0, "CRASHED": 0,
        } | counts  # fmt: skip
        assert (row["claims"], row["share verified"]) == (str(sum(counts.values())), share)
    assert [row["suite"] for row in found] == ["1" * 12, "2" * 12, "3" * 12]
    assert [row["version"] for row in found] == ["0.1.0", "0.2.0", "0.3.0"]
    assert "quality" not in titles  # no run has it


def test_differences_are_those_from_the_run_before(runs: Any) -> None:
    first, second, third = _series(runs)
    [trend] = build_history([first, second, third])
    assert [moment.changes is None for moment in trend.moments] == [True, False, False]
    titles, *rows = Page(render_history([third, second, first])).tables["Claims of qnnpack quick"]
    names = ["regressed", "improved", "added", "removed"]
    found = [[row[titles.index(name)] for name in names] for row in rows]
    # claim 3 is VERIFIED, claim 5 new and CRASHED; then claim 4 is VERIFIED and claim 5 gone
    assert found == [["-"] * 4, ["0", "1", "1", "0"], ["0", "1", "0", "1"]]
    again = Page(render_history([second, _run(runs, {"VERIFIED": 3, "REFUTED": 2, "CRASHED": 1}, 4)]))
    titles, _, row = again.tables["Claims of qnnpack quick"]
    assert [row[titles.index(name)] for name in names] == ["1", "0", "0", "0"]


def test_models_are_counted_neither_in_bars_nor_in_differences(runs: Any, made: Any) -> None:
    files = [
        runs.results(
            [runs.claim(), made.model(verdict=verdict, waived=verdict == "REFUTED")], started=f"2026-01-0{day}"
        )
        for day, verdict in enumerate(("VERIFIED", "REFUTED"), start=1)
    ]
    [trend] = build_history(files)
    assert [dict(moment.counts) for moment in trend.moments] == [{"VERIFIED": 1}] * 2
    assert trend.moments[1].changes == {Change.UNCHANGED: 1}


def test_backends_profiles_and_levels_stand_apart(runs: Any) -> None:
    kinds: list[dict[str, str]] = [
        {"backend": backend, "profile": profile, "isa": isa}
        for backend in ("a", "b") for profile in ("full", "quick") for isa in ("avx2", "avx512")
    ]  # fmt: skip
    files = [run for kind in kinds for run in _series(runs, **kind)[:2]]
    random.Random(1).shuffle(files)
    trends = build_history(files)
    assert [trend.name for trend in trends] == [" ".join(kind.values()) for kind in kinds]
    assert all(_days(trend) == ["2026-01-01", "2026-01-02"] for trend in trends)
    page = Page(render_history(files))
    assert [tag for tag, _ in page.tags].count("svg") == len(page.tables) == len(kinds)
    assert len(set(page.ids())) == len(page.ids())


def test_a_bar_is_made_of_its_verdicts_the_worst_on_top(runs: Any) -> None:
    [trend] = build_history(_series(runs))
    most = max(sum(counts.values()) for counts in VERDICT_ROWS)
    for counts, place in zip(VERDICT_ROWS, trend.chart.places, strict=True):
        parts = [part for part in trend.chart.parts if part.x < place < part.x + part.width]
        assert [part.kind for part in parts] == [verdict for verdict in VERDICTS if verdict in counts]
        assert [part.height for part in parts] == pytest.approx([HEIGHT * counts[part.kind] / most for part in parts])
        ends = [part.y + part.height for part in parts]
        assert ends == pytest.approx([*(part.y for part in parts[1:]), TOP + HEIGHT])  # no gap, down to the axis
        assert [part.label for part in parts] == [f"{counts[part.kind]} {part.kind}" for part in parts]


def test_a_drawing_says_in_words_what_it_shows(runs: Any) -> None:
    text = render_history(_series(runs))
    page = Page(text)
    [drawing] = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert drawing["role"] == "img" and set((drawing["aria-labelledby"] or "").split()) <= set(page.ids())
    assert "Claims of qnnpack by verdict, run by run" in page.text
    assert "The share verified was 60 %, and is 100 %." in page.text
    for day in (1, 2, 3):
        for label in (str(day) * 12, f"0.{day}.0", f"2026-01-0{day}"):
            assert f">{label}</tspan>" in text


def test_what_is_not_whole_or_given_twice_is_refused(runs: Any, capsys: Any) -> None:
    good, cut = runs.lines([runs.claim()]), runs.lines([runs.claim()])
    cut.write_bytes(cut.read_bytes()[:-9])
    shard = runs.lines([runs.claim()], shard={"place": 1, "of": 2})
    target = runs.directory / "h.html"
    for files, told in (([good, cut], "is incomplete or a shard"), ([shard], "is incomplete or a shard"),
                        ([good, good], "two results files are of the same run")):  # fmt: skip
        assert main(["history", *map(str, files), "-o", str(target)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("reports: qnnpack") and told in err and err.count("\n") == 1
        assert not target.exists()
    with pytest.raises(ResultsError, match="is incomplete or a shard"):
        build_history([read_results(cut)])


def test_the_command_writes_the_page(runs: Any, capsys: Any, monkeypatch: Any) -> None:
    paths = [str(runs.lines([runs.claim()], started=f"2026-01-0{day}")) for day in (1, 2)]
    target = runs.directory / "h.html"
    assert main(["history", *paths, "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"2 runs in order: {target}\n"
    assert target.read_text(encoding="utf-8") == render_history([read_results(path) for path in paths])
    assert main(["history", *paths, "-o", paths[0]]) == 2
    monkeypatch.chdir(runs.directory)
    assert main(["history", *paths]) == 0
    assert (runs.directory / "build" / "history.html").is_file()
