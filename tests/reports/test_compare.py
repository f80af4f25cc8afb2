"""The scoreboard: runs of several backends side by side."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fx_quant_conformance.reports.compare import build_board, render_board
from fx_quant_conformance.reports.families import FAMILIES, OTHER, find_family
from fx_quant_conformance.reports.results import ResultsError, read_results
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS, Outcome, Verdict
from tests.reports.pages import Page
from tests.support.reporting import main


def test_columns_are_backends_and_lines_are_ops_without_constraints(runs: Any) -> None:
    bounded = {"dtype_config": "in=qint8[-127..127,s>=2^-12],out=qint8", "dtypes": "in=qint8,out=qint8"}
    bare = {"dtype_config": "in=qint8,out=qint8", "dtypes": "in=qint8,out=qint8"}
    a = runs.results([runs.claim("x", pattern="nn.ReLU", **bounded)], backend="a")
    b = runs.results([runs.claim("x", pattern="nn.ReLU", **bare), runs.claim("y")], backend="b")
    board = build_board([b, a])
    assert list(board.runs) == ["a", "b"]
    assert [(line.pattern, line.dtypes) for line in board.lines] == [
        ("nn.Linear", "in=quint8,w=qint8,out=quint8"),
        ("nn.ReLU", "in=qint8,out=qint8"),
    ]
    assert [[cell is not None for cell in line.cells] for line in board.lines] == [[False, True], [True, True]]


def test_a_cell_is_the_worst_of_its_claims(runs: Any) -> None:
    rows = [
        runs.claim("a", max_lsb=0.4),
        runs.claim("b", verdict="REFUTED", waived=True, max_lsb=18.0, seconds=2.0),
        runs.claim("c", verdict="TOLERATED", max_lsb=None),
    ]
    [line] = build_board([runs.results(rows)]).lines
    [cell] = line.cells
    assert cell is not None
    assert (cell.verdict, cell.waived, cell.max_lsb, cell.claims, cell.seconds) == (Verdict.REFUTED, True, 18.0, 3, 5.0)
    [line] = build_board([runs.results([*rows, runs.claim("d", verdict="REFUTED", max_lsb="inf")])]).lines
    assert line.cells[0] is not None and line.cells[0].max_lsb == "inf"


def test_coverage_is_counted_per_backend(runs: Any) -> None:
    rows = [
        runs.claim("a"),
        runs.claim("b", pattern="nn.ReLU", verdict="REFUTED"),
        runs.claim("c", verdict="TOLERATED"),
    ]
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
    assert (found["verified"], found["refuted"], found["tolerated"], found["crashed"]) == ("1", "1", "1", "0")
    assert (found["seconds"], found["claims per second"]) == ("76", "0.04")


def test_fingerprints_that_differ_are_marked(made: Any, runs: Any) -> None:
    measured = [("a", {"ties": "half_even", "bias": "int32"}), ("b", {"ties": "half_up", "bias": "int32"})]
    files = [
        made.results([runs.header(pairs=1, backend=name), runs.claim(), made.measurement("conv", **values)])
        for name, values in measured
    ]
    prints = {("conv", "bias"): ("int32", "int32"), ("conv", "ties"): ("half_even", "half_up")}
    assert build_board(files).prints == prints
    [_, *rows] = Page(render_board(files)).tables["Properties of kernels, and whether backends differ in them"]
    assert [row[1:3] for row in rows] == [["bias", ""], ["ties", "differ"]]


def test_two_runs_of_one_backend_are_told_apart(runs: Any) -> None:
    both = [runs.results([runs.claim()], isa=isa) for isa in ("avx2", "avx512")]
    assert list(build_board(both).runs) == ["qnnpack avx2", "qnnpack avx512"]
    again = [runs.results([runs.claim()], started=f"2026-01-0{day}") for day in (1, 2)]
    assert len(build_board(again).runs) == 2
    with pytest.raises(ResultsError, match="two results files are of the same run"):
        build_board([both[0], both[0]])


def test_what_is_not_whole_is_refused(runs: Any) -> None:
    path = runs.lines([runs.claim()])
    path.write_bytes(path.read_bytes()[:-9])
    assert read_results(path).outcome is Outcome.INCOMPLETE
    for results in (read_results(path), runs.results([runs.claim()], shard={"place": 1, "of": 2})):
        with pytest.raises(ResultsError, match="is incomplete or a shard"):
            build_board([results])


def test_a_crash_that_is_waived_does_not_hide_a_fault_that_is_not(runs: Any) -> None:
    rows = [runs.claim("known", verdict="CRASHED", waived=True), runs.claim("open", verdict="REFUTED")]
    [line] = build_board([runs.results(rows)]).lines
    [cell] = line.cells
    assert cell is not None
    assert (cell.verdict, cell.waived) == (Verdict.CRASHED, False)


def test_a_cell_is_waived_only_if_all_its_worst_claims_are(runs: Any) -> None:
    rows = [runs.claim(name, verdict="REFUTED", waived=name != "c") for name in ("a", "b", "c")]
    for count, waived in ((2, True), (3, False)):
        [line] = build_board([runs.results(rows[:count])]).lines
        assert line.cells[0] is not None
        assert line.cells[0].waived is waived


def test_the_largest_error_of_a_cell_is_one_that_is_no_number_if_there_is_one(runs: Any) -> None:
    errors = {"a": 2.0, "b": None, "c": 18.0, "d": "inf", "e": "nan"}
    rows = [runs.claim(name, verdict="REFUTED", max_lsb=error) for name, error in errors.items()]
    for left_out, largest in (("", "nan"), ("e", "inf"), ("de", 18.0), ("cde", 2.0), ("acde", None)):
        [line] = build_board([runs.results([row for row in rows if row["claim"] not in left_out])]).lines
        assert line.cells[0] is not None and line.cells[0].max_lsb == largest


def test_a_cell_says_everything_in_words(runs: Any) -> None:
    rows = [runs.claim("a"), runs.claim("b", verdict="REFUTED", waived=True, max_lsb=18.0, seconds=2.0)]
    page = Page(render_board([runs.results(rows)]))
    said = "REFUTED waived, 2 claims, up to 18 LSB, 3.5 s"
    [mark] = [attrs for tag, attrs in page.tags if attrs.get("title") == said]
    assert mark == {"class": "mark REFUTED waived", "role": "img", "title": said, "aria-label": said}
    assert page.tables["Op × dtypes × backend"][1][2:] == [VERDICT_TEXTS[Verdict.REFUTED].glyph] * 2
    [line] = build_board([runs.results([runs.claim("a", verdict="UNEXERCISED", max_lsb=None)])]).lines
    assert line.cells[0] is not None and line.cells[0].words == "UNEXERCISED, 1 claim, 1.5 s"


def test_the_worst_lines_come_first_and_then_go_by_name(runs: Any) -> None:
    verdicts = {"nn.B": "VERIFIED", "nn.A": "VERIFIED", "nn.C": "CRASHED", "nn.D": "UNSHOWN", "nn.E": "REFUTED"}
    a = runs.results([runs.claim(name, pattern=name, verdict=verdicts[name]) for name in verdicts], backend="a")
    b = runs.results([runs.claim("x", pattern="nn.B"), runs.claim("y", pattern="nn.Z", verdict="CRASHED", waived=True)])
    assert [line.pattern for line in build_board([a, b]).lines] == ["nn.C", "nn.Z", "nn.E", "nn.D", "nn.A", "nn.B"]


def test_a_line_differs_if_two_backends_that_claim_it_do(runs: Any) -> None:
    verdicts: dict[str, list[str | None]] = {
        "nn.Alike": ["REFUTED", "REFUTED", None],
        "nn.Alone": ["CRASHED", None, None],
        "nn.Unlike": ["VERIFIED", None, "TOLERATED"],
        "nn.All": ["VERIFIED", "VERIFIED", "VERIFIED"],
    }
    files = [
        runs.results(
            [runs.claim(name, pattern=name, verdict=row[n], waived=n == 0) for name, row in verdicts.items() if row[n]],
            backend=f"npu{n}",
        )
        for n in range(3)
    ]
    assert {line.pattern for line in build_board(files).lines if line.differs} == {"nn.Unlike"}


def test_families_are_summed_up_per_backend(runs: Any) -> None:
    verdicts = {"nn.Conv2d": "VERIFIED", "nn.Conv1d+nn.ReLU": "TOLERATED", "F.relu": "VERIFIED", "npu.Own": "REFUTED"}
    a = runs.results([runs.claim(name, pattern=name, verdict=verdict) for name, verdict in verdicts.items()])
    b = runs.results([runs.claim("x", pattern="nn.Tanh")], backend="x86")
    page = Page(render_board([a, b]))
    assert page.tables["Share of the claims that is VERIFIED; a dash: nothing is claimed"] == [
        ["family", "qnnpack", "x86"],
        ["Convolution", "50 %", "-"],
        ["Activation", "100 %", "100 %"],
        ["Other", "0 %", "-"],
        ["all families", "50 %", "100 %"],
    ]
    titles = [attrs["title"] for tag, attrs in page.tags if tag == "td" and "title" in attrs]
    assert titles == [
        "1 of 2 claims verified",
        "not claimed",
        "1 of 1 claim verified",
        "1 of 1 claim verified",
        "0 of 1 claim verified",
        "not claimed",
        "2 of 4 claims verified",
        "1 of 1 claim verified",
    ]


def test_an_op_belongs_to_one_family() -> None:
    names = [name for family in FAMILIES.values() for name in family]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    spelled = {
        "nn.Conv2d+nn.BatchNorm2d+nn.ReLU": "Convolution",
        "torch.add(*,nn.Conv2d)+nn.ReLU": "Convolution",
        "nniqat.ConvBnReLU3d": "Convolution",
        "torch.conv_transpose1d": "Convolution",
        "F.linear+nn.Tanh": "Linear",
        "nn.Linear+nn.BatchNorm1d": "Linear",
        "nn.BatchNorm2d+F.relu": "Normalization",
        "operator.add": "Arithmetic",
        "operator.mul+torch.relu": "Arithmetic",
        ".relu_": "Activation",
        "F.relu6": "Activation",
        "nn.LSTM": "Recurrent",
        "torch.adaptive_avg_pool1d": "Pooling",
        "F.pad": "Shape and copy",
        "nn.UpsamplingNearest2d": "Resampling",
        "nn.EmbeddingBag": "Embedding",
        "npu.Convoluted": OTHER,
        "": OTHER,
    }
    assert {pattern: find_family(pattern) for pattern in spelled} == spelled


def test_the_command_writes_the_page(runs: Any, capsys: Any) -> None:
    paths = [str(runs.lines([runs.claim()], backend=name)) for name in ("a", "b")]
    target = runs.directory / "board.html"
    assert main(["compare", *paths, "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"2 runs side by side: {target}\n"
    assert target.read_text() == render_board([read_results(path) for path in paths])
    assert main(["compare", *paths, "-o", paths[0]]) == 2
