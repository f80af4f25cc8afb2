"""The scoreboard: runs of several backends side by side."""

from __future__ import annotations

from typing import Any

import pytest

from reports.__main__ import main
from reports.compare import build_board, render_board
from reports.results import ResultsError, read_results
from reports.verdicts import Outcome, Verdict
from tests.reports.pages import Page


def test_columns_are_backends_and_lines_are_ops_without_constraints(runs: Any) -> None:
    bounded = {"dtype_config": "in=qint8[-127..127,s>=2^-12],out=qint8", "dtypes": "in=qint8,out=qint8"}
    bare = {"dtype_config": "in=qint8,out=qint8", "dtypes": "in=qint8,out=qint8"}
    a = runs.results([runs.claim("x", pattern="nn.ReLU", **bounded)], backend="a")
    b = runs.results([runs.claim("x", pattern="nn.ReLU", **bare), runs.claim("y")], backend="b")
    board = build_board([b, a])
    assert [column.name for column in board.columns] == ["a", "b"]
    assert [(line.pattern, line.dtypes) for line in board.lines] == [
        ("nn.Linear", "in=quint8,w=qint8,out=quint8"), ("nn.ReLU", "in=qint8,out=qint8"),
    ]  # fmt: skip
    assert [[cell is not None for cell in line.cells] for line in board.lines] == [[False, True], [True, True]]


def test_a_cell_is_the_worst_of_its_claims(runs: Any) -> None:
    rows = [
        runs.claim("a", max_lsb=0.4), runs.claim("b", verdict="REFUTED", waived=True, max_lsb=18.0, seconds=2.0),
        runs.claim("c", verdict="QUALITY", max_lsb=None),
    ]  # fmt: skip
    [line] = build_board([runs.results(rows)]).lines
    [cell] = line.cells
    assert cell is not None
    assert (cell.verdict, cell.waived, cell.max_lsb, cell.claims, cell.seconds) == (Verdict.REFUTED, True, 18.0, 3, 5.0)
    [line] = build_board([runs.results([*rows, runs.claim("d", verdict="REFUTED", max_lsb="inf")])]).lines
    assert line.cells[0] is not None and line.cells[0].max_lsb == "inf"


def test_coverage_is_counted_per_backend(runs: Any) -> None:
    rows = [runs.claim("a"), runs.claim("b", pattern="nn.ReLU", verdict="REFUTED"), runs.claim("c", verdict="QUALITY")]
    page = Page(render_board([runs.results(rows)]))
    [header, row] = page.tables["Claims and verdicts of each backend"]
    found = dict(zip(header, row, strict=True))
    assert (found["backend"], found["run"], found["claims"], found["ops"], found["waived"]) == (
        "qnnpack",
        "FAIL",
        "3",
        "2",
        "0",
    )
    assert (found["verified"], found["refuted"], found["quality"], found["crashed"]) == ("1", "1", "1", "0")
    assert (found["seconds"], found["claims per second"]) == ("76", "0.04")


def test_fingerprints_that_differ_are_marked(made: Any, runs: Any) -> None:
    measured = [("a", {"ties": "half_even", "bias": "int32"}), ("b", {"ties": "half_up", "bias": "int32"})]
    files = [
        made.results([runs.header(pairs=1, backend=name), runs.claim(), made.measurement("conv", **values)])
        for name, values in measured
    ]
    assert [(p.key, p.values, p.differs) for p in build_board(files).prints] == [
        ("bias", ("int32", "int32"), False), ("ties", ("half_even", "half_up"), True),
    ]  # fmt: skip


def test_two_runs_of_one_backend_are_told_apart(runs: Any) -> None:
    both = [runs.results([runs.claim()], isa=isa) for isa in ("avx2", "avx512")]
    assert [column.name for column in build_board(both).columns] == ["qnnpack avx2", "qnnpack avx512"]
    again = [runs.results([runs.claim()], started=f"2026-01-0{day}") for day in (1, 2)]
    assert len({column.name for column in build_board(again).columns}) == 2
    with pytest.raises(ResultsError, match="two results files are of the same run"):
        build_board([both[0], both[0]])


def test_what_is_not_whole_is_refused(runs: Any) -> None:
    path = runs.lines([runs.claim()])
    path.write_bytes(path.read_bytes()[:-9])
    assert read_results(path).outcome is Outcome.INCOMPLETE
    for results in (read_results(path), runs.results([runs.claim()], shard={"place": 1, "of": 2})):
        with pytest.raises(ResultsError, match="is incomplete or a shard"):
            build_board([results])


def test_the_command_writes_the_page(runs: Any, capsys: Any) -> None:
    paths = [str(runs.lines([runs.claim()], backend=name)) for name in ("a", "b")]
    target = runs.directory / "board.html"
    assert main(["compare", *paths, "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"2 runs side by side: {target}\n"
    assert target.read_text() == render_board([read_results(path) for path in paths])
    assert main(["compare", *paths, "-o", paths[0]]) == 2
