"""The terminal summary says the verdict first, the worst next, and fits the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.text import format_lsb
from tests.support.reporting import main


def test_the_distance_from_float_of_models_that_were_handed_in_is_said_the_farthest_first(runs: Any, made: Any) -> None:
    ratios = {"near": [40.25, 61.0], "far": [12.0, -3.5], "exact": ["inf"], "unknown": [8.0, "nan"], "none": []}
    rows = [made.model(f"model/own/{name}", deployment={}, float_db=each) for name, each in ratios.items()]
    rows.append(made.model("model/of/the/suite", float_db=[3.0]))
    text = summary(made.results([runs.header(pairs=1, claims=1), runs.claim(), *rows]), "out.html", width=200)
    told = ["nan model/own/unknown", "-3.5 model/own/far", "40.2 model/own/near", "exact model/own/exact"]
    block = text.partition("float model to the reference model's error, dB:\n")[2].partition("\n\n")[0]
    assert [" ".join(line.split()) for line in block.split("\n")[2:]] == told


def test_waivers_are_told_by_reason_the_largest_first(runs: Any, made: Any) -> None:
    rows = [runs.claim("d", verdict="FALLBACK", waived=True, waiver=made.waiver | {"reason": "no kernel"})]
    rows += [runs.claim(f"c{n}", verdict="REFUTED", waived=True, waiver=made.waiver) for n in range(2)]
    text = summary(runs.results(rows), "out.html", width=200)
    block = text.partition("waived, by finding or reason:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in block[2:]] == ["2", "1"]


def test_what_failing_cases_share_stands_first_if_it_is_short(runs: Any) -> None:
    def told(shared: list[str]) -> str:
        check, claim = runs.refuted("broken")
        check["evidence"] |= {"shared": shared}
        return summary(runs.results([check, claim]), "r.html", width=120)

    assert "only where groups > 1: NUM-03: 3 of 24" in told(["groups > 1", "in_channels = 16"])
    assert "only where" not in told(["a" * 49]) and "only where" not in summary(runs.results(runs.refuted()), "r.html")


@pytest.mark.parametrize("width", [1, 80, 400])
def test_any_width_is_kept_where_there_is_room(runs: Any, width: int) -> None:
    text = summary(runs.results(runs.large(60)), "out.html", width=width)
    table = text.split("worst first")[1].split("\n\n")[0].splitlines()[1:-1]
    assert max(map(len, table)) <= max(width, 62)


def test_of_many_problems_the_first_are_told_and_the_others_counted(runs: Any, made: Any) -> None:
    results = made.results([runs.header(pairs=1), runs.claim()], problems=[f"problem {n}" for n in range(25)])
    text = summary(results, "out.html")
    assert "! problem 19\n! 5 further problems, in the report\n" in text and "problem 20" not in text


def test_an_empty_run_has_a_summary(runs: Any) -> None:
    assert summary(runs.results([]), "out.html").startswith("0 claims: none ran\n! no claim was tested")


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.5006, "0.5006"), (255.0, "255"), (3, "3"), ("inf", "inf")])
def test_distances_are_short(value: Any, text: str) -> None:
    assert format_lsb(value) == text


# fx-quant-conformance report render


def test_render_writes_the_report_and_exits_0_on_a_pass(runs: Any, capsys: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    assert main(["render", str(path)]) == 0
    assert path.with_suffix(".html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    last = f"report: {path.with_suffix('.html')}\nqnnpack: PASS, 1 of 1 claim verified (100 %)\n"
    assert capsys.readouterr().out.endswith(last)


def test_a_lone_surrogate_does_not_stop_the_report(runs: Any) -> None:
    path = runs.lines([runs.claim("\udc80", verdict="REFUTED", reason="\ud800")])
    assert main(["render", str(path)]) == 1


def test_render_exits_2_when_it_cannot_write_or_would_replace_what_it_reads(runs: Any, capsys: Any) -> None:
    path = runs.lines([runs.claim()])
    before = path.read_text()
    assert main(["render", str(path), "-o", str(runs.directory / "none" / "o.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert main(["render", str(path), "-o", str(path)]) == 2
    assert path.read_text() == before
