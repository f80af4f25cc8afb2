"""The terminal summary says the verdict first, the worst next, and fits the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from reports.__main__ import main
from reports.digest import count_line, verdict_line
from reports.terminal import summary
from reports.text import spell_lsb


def test_the_verdict_line_says_it_all(runs: Any) -> None:
    results = runs.results([*runs.refuted(), runs.claim(), runs.claim("w", verdict="TIMEOUT", waived=True)])
    assert verdict_line(results) == "qnnpack: FAIL because 1 claim is refuted; 1 of 3 claims verified (33 %)"
    line = "3 claims: 1 TIMEOUT, 1 REFUTED, 1 VERIFIED (1 WAIVED)"
    assert count_line(results) == line
    assert summary(results, "out.html").startswith(line + "\n")


def test_models_are_counted_and_those_that_do_not_pass_named(runs: Any, made: Any) -> None:
    rows = [
        runs.header(pairs=1, claims=1), runs.claim(), made.model(),
        made.model("model/unet/ptq", verdict="REFUTED", reason="up1: 3 LSB", max_lsb=3.0),
        made.model("model/lstm/ptq", verdict="CRASHED", waived=True, waiver=made.waiver),
    ]  # fmt: skip
    text = summary(made.results(rows), "out.html", width=200)
    assert text.startswith("1 claim: 1 VERIFIED; 3 models: 1 CRASHED, 1 REFUTED, 1 VERIFIED (1 WAIVED)")
    block = text.partition("models that do not pass, worst first:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in block[2:]] == [["REFUTED", "model/unet/ptq", "up1:", "3", "LSB"]]


def test_the_distance_from_float_of_models_that_were_handed_in_is_said_the_farthest_first(runs: Any, made: Any) -> None:
    ratios = {"near": [40.25, 61.0], "far": [12.0, -3.5], "exact": ["inf"], "unknown": [8.0, "nan"], "none": []}
    rows = [made.model(f"model/own/{name}", deployment={}, float_db=each) for name, each in ratios.items()]
    rows.append(made.model("model/of/the/suite", float_db=[3.0]))
    text = summary(made.results([runs.header(pairs=1, claims=1), runs.claim(), *rows]), "out.html", width=200)
    told = ["nan model/own/unknown", "-3.5 model/own/far", "40.2 model/own/near", "exact model/own/exact"]
    block = text.partition("float model to the reference model's error, dB:\n")[2].partition("\n\n")[0]
    assert [" ".join(line.split()) for line in block.split("\n")[2:]] == told


def test_waivers_are_told_by_reason(runs: Any, made: Any) -> None:
    until = made.waiver | {"url": None, "reason": "no kernel"}
    rows = [runs.claim(f"c{n}", verdict="REFUTED", waived=True, waiver=made.waiver) for n in range(2)]
    rows.append(runs.claim("d", verdict="FALLBACK", waived=True, waiver=until))
    text = summary(runs.results(rows), "out.html", width=200)
    block = text.partition("waived, by finding or reason:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in block[2:]] == [
        ["2", "2027-01-31", "issue", "12:", "saturates"], ["1", "2027-01-31", "no", "kernel"],
    ]  # fmt: skip


def test_what_was_run_is_told(runs: Any, made: Any) -> None:
    rows = [runs.header(pairs=1), runs.check(), runs.check(), runs.claim(), made.measurement()]
    results = made.results(rows, notes=["nothing compared"], peak_mib=311.6)
    text = summary(results, "out.html", width=200)
    told = (
        "torch 2.13.0+cpu, Python 3.11.9; Some CPU @ 2.60GHz; profile quick, seed 7; 2 checks in 4.0 s, largest process"
    )
    assert (
        "note: nothing compared\nsuite 0.1.0 4fd1c0ffee4f; config qnnpack_config" in text
        and f"{told} 312 MiB\n" in text
    )


def test_failures_are_worst_first_with_the_deciding_check(runs: Any) -> None:
    rows = [
        *runs.refuted("slow", verdict="FALLBACK"),
        runs.claim("dead", verdict="CRASHED", reason="signal 11"),
    ]
    text = summary(runs.results(rows), "out.html", width=160)
    assert text.index("signal 11") < text.index("NUM-03: 3 of 24 outputs")
    assert "reproduce the first: pytest conformance --backend=qnnpack --claim='dead'" in text


def test_what_failing_cases_share_stands_first_if_it_is_short(runs: Any) -> None:
    def told(shared: list[str]) -> str:
        check, claim = runs.refuted("broken")
        check["evidence"] |= {"shared": shared}
        return summary(runs.results([check, claim]), "r.html", width=120)

    assert "only where groups > 1: NUM-03: 3 of 24" in told(["groups > 1", "in_channels = 16"])
    assert "only where" not in told(["a" * 49]) and "only where" not in summary(runs.results(runs.refuted()), "r.html")


def test_only_the_twenty_worst_are_listed(runs: Any) -> None:
    rows = [runs.claim(f"claim{n}", verdict="REFUTED") for n in range(25)]
    text = summary(runs.results(rows), "out.html")
    assert "25 failing claims, worst first (5 more in the report):" in text
    assert sum(line.startswith("REFUTED    -") for line in text.splitlines()) == 20


def test_unexercised_reasons_are_grouped(runs: Any) -> None:
    rows = [runs.claim(f"c{n}", verdict="UNEXERCISED", reason="odd" if n % 3 else "third") for n in range(9)]
    text = summary(runs.results(rows), "out.html")
    block = text.partition("unexercised, by reason:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in block[2:]] == [["6", "odd"], ["3", "third"]]


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 40, 80, 132, 400])
def test_any_width_is_kept_where_there_is_room(runs: Any, width: int) -> None:
    text = summary(runs.results(runs.large()), "out.html", width=width)
    table = text.split("worst first")[1].split("\n\n")[0].splitlines()[1:-1]
    assert max(map(len, table)) <= max(width, 62)


def test_text_from_a_backend_cannot_steer_the_terminal(runs: Any) -> None:
    row = runs.claim("a\x1b[2J\n\rb", verdict="REFUTED", reason="\x07\u202eout", repro="\x1b]0;x")
    text = summary(runs.results([row]), "out.html", width=200)
    assert set(text) - {"\n"} == {c for c in text if c.isprintable()}


def test_problems_are_told(runs: Any) -> None:
    results = runs.results([runs.claim()], claims=5)
    text = summary(results, "out.html")
    assert verdict_line(results).startswith("qnnpack: FAIL because the header's claims: 5; the rows give 1")
    assert "! the header's claims: 5; the rows give 1" in text


def test_of_many_problems_the_first_are_told_and_the_others_counted(runs: Any, made: Any) -> None:
    results = made.results([runs.header(pairs=1), runs.claim()], problems=[f"problem {n}" for n in range(25)])
    text = summary(results, "out.html")
    assert "! problem 19\n! 5 further problems, in the report\n" in text and "problem 20" not in text


def test_an_empty_run_has_a_summary(runs: Any) -> None:
    assert summary(runs.results([]), "out.html").startswith("0 claims: none ran\n! no claim was tested")


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.5006, "0.5006"), (255.0, "255"), (3, "3"), ("inf", "inf")])
def test_distances_are_short(value: Any, text: str) -> None:
    assert spell_lsb(value) == text


# python -m reports render


def test_render_writes_the_report_and_exits_0_on_a_pass(runs: Any, capsys: Any) -> None:
    path = runs.lines([runs.check(), runs.claim()])
    assert main(["render", str(path)]) == 0
    assert path.with_suffix(".html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    last = f"report: {path.with_suffix('.html')}\nqnnpack: PASS, 1 of 1 claim verified (100 %)\n"
    assert capsys.readouterr().out.endswith(last)


def test_render_exits_1_when_the_run_did_not_pass(runs: Any, tmp_path: Any) -> None:
    assert main(["render", str(runs.lines(runs.refuted())), "-o", str(tmp_path / "o.html")]) == 1
    assert (tmp_path / "o.html").exists()


def test_a_lone_surrogate_does_not_stop_the_report(runs: Any) -> None:
    path = runs.lines([runs.claim("\udc80", verdict="REFUTED", reason="\ud800")])
    assert main(["render", str(path)]) == 1


def test_render_exits_2_with_one_line_on_bad_input(runs: Any, capsys: Any) -> None:
    path = runs.directory / "bad.jsonl"
    path.write_text("hello\n")
    for arguments in ([str(path)], [str(path) + "x"], [str(path), "-o", str(path)]):
        assert main(["render", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"reports: {path}")
    assert path.read_text() == "hello\n"


def test_render_exits_2_when_it_cannot_write(runs: Any, capsys: Any) -> None:
    path = runs.lines([runs.claim()])
    assert main(["render", str(path), "-o", str(runs.directory / "none" / "o.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err
