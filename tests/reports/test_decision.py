"""The decision on a run and what it does not show: of small runs that end in every way, and in every report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fx_quant_conformance.reports.compare import render_board
from fx_quant_conformance.reports.decision import format_decision, format_no_failure, format_share, list_untried
from fx_quant_conformance.reports.digest import verdict_line
from fx_quant_conformance.reports.html import build_report, render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.results import Results, read_results
from fx_quant_conformance.reports.schema import ModelResult
from fx_quant_conformance.reports.terminal import summary
from fx_quant_conformance.reports.verdicts import VERDICT_TEXTS, VERDICTS, Outcome, Verdict
from tests.reports.pages import Page


def run_of(runs: Any, made: Any, verdicts: str, **header: Any) -> Results:
    """A run with a claim for each of these verdicts, and of one reason; a verdict in small letters is waived."""
    rows = []
    for number, word in enumerate(verdicts.split()):
        waived = {"waived": True, "waiver": made.waiver | {"expires": f"203{number}-01-31"}}
        more = waived if word.islower() else {}
        rows.append(runs.claim(f"c{number}", verdict=word.upper(), reason="why", **more))
    results: Results = runs.results(rows, **header)
    return results


def stopped(runs: Any, count: int) -> Results:
    """A run of so many claims that was killed after the first."""
    path = runs.lines([runs.claim("c0")], claims=count)
    path.write_bytes(path.read_bytes()[:-9])
    return read_results(path)


@pytest.mark.parametrize(
    ("verdicts", "header", "text"),
    [
        ("VERIFIED VERIFIED", {}, "PASS, 2 of 2 claims verified (100 %)"),
        (
            "VERIFIED refuted unexercised",
            {},
            "PASS with 2 waivers (first expires 2031-01-31), 1 of 3 claims verified (33 %)",
        ),
        ("VERIFIED TOLERATED", {}, "PASS with 1 TOLERATED, 1 of 2 claims verified (50 %)"),
        (
            "CRASHED REFUTED REFUTED VERIFIED refuted",
            {},
            "FAIL because 1 claim crashed and 2 claims are refuted; 1 of 5 claims verified (20 %)",
        ),
        ("VERIFIED UNEXERCISED", {}, "FAIL because 1 claim is unexercised; 1 of 2 claims verified (50 %)"),
        (
            "VERIFIED",
            {"claims": 7},
            "FAIL because the header's claims: 7; the rows give 1; 1 of 7 claims verified (14 %)",
        ),
    ],
)
def test_the_decision_says_why_and_how_much_is_verified(
    runs: Any, made: Any, verdicts: str, header: Any, text: str
) -> None:
    assert format_decision(run_of(runs, made, verdicts, **header)) == text


def test_a_run_that_stopped_says_how_far_it_came(runs: Any) -> None:
    results = stopped(runs, 4)
    told = "INCOMPLETE because the run stopped after 1 of 4 claims; 1 of 4 claims verified (25 %)"
    assert format_decision(results) == told
    assert "3 claims that the run did not reach" in list_untried(results)
    assert format_no_failure(results) == "No claim that was judged fails; not all were reached."
    assert "3 claims of 4 were never reached" in Page(render_html(results)).text


def test_all_that_lets_a_run_pass_and_all_that_is_wrong_is_counted(runs: Any, made: Any) -> None:
    results = run_of(runs, made, "VERIFIED refuted")
    assert results.footer is not None
    waived = ModelResult(model="model/net", verdict=Verdict.REFUTED, waived=True)
    both = replace(results, models=(waived,))
    assert format_decision(both).startswith("PASS with 2 waivers")
    for count, text in ((1, "a"), (2, "a (and 1 further problem)"), (3, "a (and 2 further problems)")):
        wrong = replace(results, footer=replace(results.footer, outcome=Outcome.FAIL), problems=tuple("abc"[:count]))
        assert format_decision(wrong).startswith(f"FAIL because {text}; ")


def test_a_run_that_was_told_to_leave_out_says_so(runs: Any, made: Any) -> None:
    """It said that it had stopped."""
    results = run_of(runs, made, "VERIFIED", claims=4)
    assert results.footer is not None
    footer = replace(results.footer, outcome=Outcome.INCOMPLETE, problems=["a and 2 more left out by -k"])
    results = replace(results, footer=footer)
    told = "INCOMPLETE because 1 of 4 claims were judged: a and 2 more left out by -k; 1 of 4 claims verified (25 %)"
    assert format_decision(results) == told


def test_where_models_alone_do_not_pass_they_are_named(runs: Any, made: Any) -> None:
    results = run_of(runs, made, "VERIFIED")
    wrong = replace(results, models=(ModelResult(model="model/own/net", verdict=Verdict.REFUTED),))
    assert format_no_failure(wrong) == "No claim that was judged fails; 1 model does not pass and stand below."


def test_the_largest_error_comes_first_of_one_verdict(runs: Any, made: Any) -> None:
    """0.89 LSB stood above 255."""
    results = run_of(runs, made, "REFUTED REFUTED REFUTED CRASHED")
    errors = [0.89, 255.0, None, None]
    claims = [replace(c, max_lsb=e) for c, e in zip(results.claims, errors, strict=True)]
    results = replace(results, claims=tuple(claims))
    shown = [view.claim for group in build_report(results).failures.groups for view in group.views]
    assert shown == list(results.failures())
    assert [(each.verdict.value, each.max_lsb) for each in shown] == [
        ("CRASHED", None),
        ("REFUTED", None),
        ("REFUTED", 255.0),
        ("REFUTED", 0.89),
    ]


def test_the_rule_below_a_tables_heads_is_not_as_wide_as_its_longest_cell(runs: Any) -> None:
    results = runs.results([runs.claim("c0", verdict="REFUTED", reason="why " * 99)])
    rules = [line for line in summary(results, "r.html").splitlines() if set(line) == {"-", " "}]
    assert rules and max(len(rule.split()[-1]) for rule in rules) == 60


@pytest.mark.parametrize("verdicts", ["VERIFIED refuted", "VERIFIED REFUTED"])
def test_every_report_has_the_decision_and_a_pass_with_waivers_is_not_green(
    runs: Any, made: Any, verdicts: str
) -> None:
    results = run_of(runs, made, verdicts)
    text, by_leave = format_decision(results), "refuted" in verdicts
    html, board = render_html(results), render_board([results])
    assert text in Page(html).text.partition("What the verdicts mean")[0]
    assert verdict_line(results) == f"qnnpack: {text}"
    escaped = re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), markdown(results))
    assert f"**qnnpack: {text}**" in escaped
    assert text in board and (">PASS with waivers<" in board) is by_leave
    [classes] = [attrs["class"] for _, attrs in Page(html).tags if "outcome" in (attrs.get("class") or "").split()]
    assert ("with-waivers" in (classes or "").split()) is by_leave


def test_unexercised_claims_are_listed_waived_or_not(runs: Any, made: Any) -> None:
    results = run_of(runs, made, "VERIFIED unexercised unexercised UNEXERCISED")
    assert build_report(results).unexercised.total == 3
    assert "3 claims (2 waived): why" in Page(render_html(results)).text
    assert "(2 waived) why" in summary(results, "r.html")


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ("VERIFIED refuted", "No claim that was judged fails; 1 would, but for a waiver."),
        (
            "VERIFIED UNEXERCISED",
            "No claim that was judged is refuted; 1 of unexercised or unshown claims stand below.",
        ),
        ("", "No claim that was judged fails; the run fails all the same: its first lines say why."),
    ],
)
def test_no_run_that_fails_says_that_no_claim_fails(runs: Any, made: Any, verdicts: str, text: str) -> None:
    assert format_no_failure(run_of(runs, made, verdicts)) == text


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ({"profile": "full", "claims_in_config": 1}, None),
        ({"claims_in_config": 1}, "most cases of each claim: profile quick tries a few; full and stress try more"),
        ({"profile": "full", "claims_in_config": 2}, "1 claim of the config: it is not selected"),
        (
            {"profile": "full", "shard": {"place": 2, "of": 3}},
            "the claims of the other shards: this is shard 2/3",
        ),
        (
            {"profile": "full", "claims_in_config": 1, "limits": {"nn.Linear": {"bias": "True"}}},
            "argument values beyond the limits that the backend declares for 1 op",
        ),
        (
            {"profile": "full", "claims_in_config": 1, "resumed": 1},
            "anything new of 1 claims and models: an earlier run judged them (--resume)",
        ),
        (
            {"profile": "full", "claims_in_config": 1, "foreign_code": ["conftest.py of /npu", "tqdm 4.70.1"]},
            "that the suite judged alone: beside it ran conftest.py of /npu; tqdm 4.70.1",
        ),
    ],
)
def test_what_was_not_tried_is_listed(runs: Any, made: Any, header: dict[str, Any], line: str | None) -> None:
    results = run_of(runs, made, "VERIFIED", **header)
    assert list(list_untried(results)) == ([line] if line else [])
    assert not line or line in Page(render_html(results)).text


def test_each_verdict_is_explained_in_place(runs: Any, made: Any) -> None:
    text = Page(render_html(run_of(runs, made, "VERIFIED"))).text
    legend = text.partition("What the verdicts mean ")[2].partition(" Not shown by this run")[0]
    assert tuple(VERDICT_TEXTS) == VERDICTS
    assert len({text.glyph for text in VERDICT_TEXTS.values()}) == len(VERDICTS)
    for verdict, said in VERDICT_TEXTS.items():
        assert f"{said.glyph} {verdict} {said.meaning} {said.passing}" in legend


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (0, 9, "0 %"), (1, 1000, "1 %"), (999, 1000, "99 %"), (9, 9, "100 %"), (491, 853, "58 %")],
)
def test_a_share_is_all_or_nothing_only_if_it_is(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


def test_the_bound_is_shown_whole(runs: Any) -> None:
    check, claim = runs.refuted()
    page = Page(render_html(runs.results([check | {"allowed": "0.5 + 0.000305"}, claim])))
    assert "largest distance 18 LSB (allowed 0.5 + 0.000305) · 24 cases" in page.text
    listed = page.tables["Every claim of the run; a stage has the worst outcome of its checks"]
    assert listed[0][5:7] == ["LSB", "allowed"] and listed[1][5:7] == ["18", "0.5 + 0.000305"]


def test_claims_with_one_cause_are_one_group(runs: Any) -> None:
    rows = [row for number in range(3) for row in runs.refuted(f"broken{number}")]
    for number, row in enumerate(rows):
        row["message" if row["kind"] == "check" else "reason"] = (
            f"{number} of 24 outputs are off by {number / 3:.3g} LSB"
        )
    other = runs.claim("other", verdict="CRASHED", reason="killed by SIGSEGV")
    crashed, refuted = build_report(runs.results([*rows, other])).failures.groups
    assert [view.claim.claim for view in crashed.views] == ["other"]
    assert refuted.verdicts == {"REFUTED": 3}
