"""What a rerun proved: in words, with a bound that follows from the draw, and only beside its own run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

import pytest

from reports import __main__ as reports
from reports.against_suite import Findings
from reports.description import Opened, RunDescription
from reports.html import render_html
from reports.markdown import markdown
from reports.rerun import RerunOutcome
from reports.rerun_record import RerunRecord, bound_differing, read_record, write_record
from reports.results import Results, ResultsError, read_results
from tests.reports.pages import Page

UNITS = [f"c{number}" for number in range(12)]
RECORD = RerunRecord(
    results="ab", units=UNITS, of=865, seed=7, chosen=False, started="2026-12-01T00:00:00+00:00", cpu="Some CPU",
    torch="2.13.0",
)  # fmt: skip
WHAT = "12 of 865 claims, models and measurements"
HEAD = f"A rerun of {WHAT}, drawn at random (seed 7), on Some CPU, torch 2.13.0, 2026-12-01"


SAME = "all gave the same, bit for bit"
WITHOUT_PLACE = {"cpu": "", "started": ""}
TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "the same": ({}, f"{HEAD}: {SAME}; with 95 % confidence at most 189 of the 865 (22 %) would differ."),
    "by chance": (
        {"tolerated": ["c1"], "varying": 2},
        f"{HEAD}: 11 gave the same, bit for bit; 1 differed as what varies by chance may; of 2 that vary by chance the "
        "verdicts and waivers alone were compared; with 95 % confidence at most 189 of the 865 (22 %) would differ.",
    ),
    "not the same": (
        {"differing": UNITS[:5]},
        f"{HEAD}: 5 of 12 gave something else: c0, c1, c2 and 2 more; with 95 % confidence at most 591 of the 865 "
        "(68 %) would differ.",
    ),
    "a given seed": (
        {"chosen": True, **WITHOUT_PLACE},
        f"A rerun of {WHAT}, with seed 7, which was given: {SAME}; a seed that was "
        "given bounds nothing, as it can be chosen.",
    ),
    "all": ({"of": 12, **WITHOUT_PLACE}, f"A rerun of all 12 claims, models and measurements: {SAME}."),
}


@pytest.mark.parametrize(("changes", "said"), TOLD.values(), ids=TOLD)
def test_a_rerun_is_told_in_a_line(changes: dict[str, Any], said: str) -> None:
    assert replace(RECORD, **changes).describe() == said


@pytest.mark.parametrize("of", range(1, 9))
def test_the_bound_is_that_of_all_draws(of: int) -> None:
    """Of all draws, counted one by one, more than 5 % have as few that differ; of one more unit at most 5 %."""

    def count_draws(drawn: int, number: int, few: int) -> int:
        return sum(sum(unit < number for unit in draw) <= few for draw in combinations(range(of), drawn))

    for drawn in range(1, of + 1):
        for differing in range(drawn + 1):
            most, total = bound_differing(drawn, of, differing), comb(of, drawn)
            assert 20 * count_draws(drawn, most, differing) > total
            assert most == of - (drawn - differing) or 20 * count_draws(drawn, most + 1, differing) <= total


def test_the_bound_is_near_the_rule_of_three_where_many_are_drawn_of_far_more() -> None:
    assert 0.9 * 0.03 < bound_differing(100, 50_000, 0) / 50_000 < 0.03
    assert bound_differing(865, 865, 0) == 0 and bound_differing(864, 865, 0) == 0


def test_a_report_says_first_what_a_rerun_proved(runs: Any) -> None:
    results: Results = runs.results([runs.claim()])
    html = render_html(results, None, RECORD)
    assert html.index('<p class="rerun">A rerun of 12 of 865') < html.index('<dl class="facts">')
    assert 'role="alert"' not in html
    worse = replace(RECORD, differing=["<b>c1"], units=["<b>c1"])
    html = render_html(results, None, worse)
    assert "A rerun gave something else. A rerun of 1 of 865" in Page(html).text and "<b>c1" not in html
    assert "gave the same, bit for bit" in markdown(results, None, RECORD)
    assert "rerun" not in markdown(results) and 'class="rerun"' not in render_html(results)


def test_a_record_is_read_as_it_was_written_and_for_its_own_run_only(runs: Any, tmp_path: Path) -> None:
    results: Results = runs.results([runs.claim()])
    assert results.footer is not None
    record, path = replace(RECORD, results=results.footer.sha256), tmp_path / "rerun.json"
    write_record(record, path)
    assert read_record(path, results) == record and read_record(None, results) is None
    other = runs.results([runs.claim("other")])
    with pytest.raises(ResultsError, match=f"is of the results with sha256 {record.results[:12]}; that of these is"):
        read_record(path, other)
    with pytest.raises(ResultsError, match="that of these is none, as the run is incomplete"):
        read_record(path, replace(results, footer=None))
    with pytest.raises(ResultsError, match="cannot be written"):
        write_record(record, tmp_path)


BAD = {
    "other JSON": ('{"kind": "header"}', "is no record of a rerun .*unknown kind of row 'header'"),
    "no JSON": ("A rerun", "is no record of a rerun"),
    "nothing run": ({"units": []}, "contradicts itself: 0 units of 865; each is there once"),
    "one twice": ({"units": ["a", "a"]}, "contradicts itself: 2 units of 865"),
    "more than all": ({"of": 3}, "contradicts itself: 12 units of 3"),
    "too many": ({"of": 10**9}, "contradicts itself"),
    "one that was not run": ({"differing": ["d"]}, "contradicts itself: d was not run again"),
    "one that differs twice": ({"differing": ["c1"], "tolerated": ["c1"]}, "a unit differs twice"),
    "a text for a number": ({"seed": "7"}, "'seed' is '7'; expected an integer"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_record_is_refused(runs: Any, tmp_path: Path, name: str) -> None:
    content, said = BAD[name]
    path = tmp_path / "rerun.json"
    write_record(RECORD, path)
    text = content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content)
    path.write_text(text)
    with pytest.raises(ResultsError, match=said):
        read_record(path, runs.results([runs.claim()]))


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A certificate of a run of two claims; the second one differs when it is run again."""
    path = runs.lines([runs.claim("a"), runs.claim("b")])
    results = read_results(path)
    monkeypatch.setattr(reports, "verify", lambda folder: (results, []))
    monkeypatch.setattr(reports, "describe_signature", lambda *paths: "")
    opened = Opened(header=results.header, claims=[], jobs=[], waivers={}, allowed=[], problems=[])
    said = RunDescription(suite_version="", suite_commit="", detection={}, stages=[], random=0, opened=opened)
    monkeypatch.setattr(reports, "describe", lambda *given: said)
    monkeypatch.setattr(reports, "compare_with_suite", lambda *given: Findings())

    def rerun(results: Results, units: list[str], *given: Any) -> RerunOutcome:
        differing = {unit: ["max_lsb differ"] for unit in units if unit == "b"}
        return RerunOutcome(differing=differing, header=results.header)

    monkeypatch.setattr(reports, "rerun", rerun)
    (tmp_path / "certificate").mkdir()
    (tmp_path / "results.jsonl").write_bytes(path.read_bytes())
    return tmp_path / "certificate"


def test_what_verify_records_render_shows(certificate: Path, capsys: Any) -> None:
    record, results = certificate.parent / "rerun.json", certificate.parent / "results.jsonl"
    command = ["verify", str(certificate), "--rerun=1", f"--record={record}"]
    assert {reports.main([*command, f"--draw={seed}"]) for seed in range(8)} == {0, 1}
    assert reports.main(["verify", str(certificate), "--rerun=2", f"--record={record}"]) == 1
    told = capsys.readouterr().out
    assert f"{record}: A rerun of 1 of 2 claims, models and measurements, with seed 0, which was given, on Some" in told
    assert reports.main(["render", str(results), "--rerun", str(record)]) == 0
    text = Page(results.with_suffix(".html").read_text()).text
    assert "A rerun of all 2 claims, models and measurements, on Some CPU" in text
    assert "2025-01-02: 1 of 2 gave something else: b." in text
    assert reports.main(["markdown", str(results), "--rerun", str(certificate / "none")]) == 2
    assert "none: cannot be read: No such file" in capsys.readouterr().err


def test_a_record_needs_a_rerun_and_a_place_outside_of_the_certificate(certificate: Path, capsys: Any) -> None:
    assert reports.main(["verify", str(certificate), "--record=x.json"]) == 2
    assert reports.main(["verify", str(certificate), "--rerun=1", f"--record={certificate / 'x.json'}"]) == 2
    told = capsys.readouterr().err
    assert "--record: needs --rerun=N" in told and "would change the certificate; choose a place outside of it" in told
