"""Every number of every report comes from the one file: recounted here from its lines, by code of its own."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.terminal import summary
from tests.reports.pages import Page

Row = dict[str, Any]
PASSING = {"VERIFIED", "TOLERATED"}


def of(rows: list[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def numbers(page: Page, label: str) -> int:
    """The number beside a link of the page's bar, or in a heading in brackets."""
    found = re.search(rf"{label} \(?(\d[\d,]*)", page.text.partition("Summary ")[2])
    assert found, label
    return int(found[1].replace(",", ""))


def test_the_page_counts_claims_as_the_lines_do(rows: list[Row], page: Page) -> None:
    claims = of(rows, "claim")
    for verdict, count in Counter(claim["verdict"] for claim in claims).items():
        assert re.search(rf"\b{count} {verdict}\b", page.text.partition("Claims ")[0])
    waived = sum(claim["waived"] for claim in claims)
    assert f"{waived} of these waived" in page.text
    pairs = {(claim["pattern"], claim["dtype_config"]) for claim in claims}
    of_config = rows[0]["claims_in_config"], rows[0]["pairs"], len(of(rows, "check"))
    told = (
        f"{len(claims)} of {of_config[0]} in the config, {of_config[2]:,} checks, {len(pairs)} of {of_config[1]} pairs"
    )
    assert told in page.text
    assert numbers(page, "All claims") == len(claims) == len(page.tables[LISTED]) - 1


LISTED = "Every claim of the run; a stage has the worst outcome of its checks"


def test_failures_waived_and_unexercised_are_counted_so(rows: list[Row], page: Page) -> None:
    claims = of(rows, "claim")
    red = [c for c in claims if not c["waived"] and c["verdict"] not in PASSING | {"UNEXERCISED"}]
    open_ = [c for c in claims if not c["waived"] and c["verdict"] == "UNEXERCISED"]
    assert numbers(page, "Failures") == len(red)
    assert numbers(page, "Unexercised") == len(open_)
    reasons = Counter(claim["reason"] for claim in open_)
    for reason, count in reasons.items():
        assert f"{count} claim{'s' if count != 1 else ''}: {reason}" in page.text
    waived = sum(claim["waived"] for claim in claims)
    assert numbers(page, r"Waived") == waived


def test_every_claim_stands_in_the_list_with_its_verdict(rows: list[Row], page: Page) -> None:
    listed = {row[0]: (row[4], row[5]) for row in page.tables[LISTED][1:]}
    for claim in of(rows, "claim"):
        verdict = ("WAIVED · " if claim["waived"] else "") + claim["verdict"]
        lsb = "-" if claim["max_lsb"] is None else f"{claim['max_lsb']:.6g}"
        assert listed[claim["claim"]] == (verdict, lsb)


def test_checks_are_counted_by_rule_and_outcome(rows: list[Row], page: Page) -> None:
    [header, *table] = page.tables["Checks by rule; docs/spec.md of the suite has all rules"]
    assert header == ["rule", "requirement", "claims", "pass", "fail", "error", "skip"]
    counts = Counter((check["rule"], check["outcome"]) for check in of(rows, "check"))
    claims = {rule: {c["claim"] for c in of(rows, "check") if c["rule"] == rule} for rule, _ in counts}
    expected = [
        [rule, str(len(claims[rule])), *(str(counts[rule, outcome]) for outcome in header[3:])]
        for rule in sorted(claims)
    ]
    assert [[row[0], *row[2:]] for row in table] == expected
    failing = {
        rule: {c["claim"] for c in of(rows, "check") if c["rule"] == rule and c["outcome"] in ("fail", "error")}
        for rule in claims
    }
    for row in table:
        count = len(failing[row[0]])
        assert (f"{count} claim{'s' if count != 1 else ''} with a check of it that fails" in row[1]) == bool(count)
        assert all(name in row[1] for name in sorted(failing[row[0]])[:50])


@pytest.mark.slow
def test_counts_have_their_thousands_apart(runs: Any) -> None:
    rows = runs.large(1234)
    page, claims = Page(render_html(runs.results(rows, claims_in_config=36218, seed=12345))), of(rows, "claim")
    count, checks = len(claims), len(of(rows, "check"))
    assert count == 1234 and checks > 1000
    assert f"1,234 of 36,218 in the config, {checks:,} checks" in page.text
    assert numbers(page, "All claims") == count and "All claims 1,234" in page.text
    verified = sum(claim["verdict"] == "VERIFIED" for claim in claims)
    assert f"{verified} of 1,234 claims verified" in page.text.partition("Claims ")[0]
    rules = page.tables["Checks by rule; docs/spec.md of the suite has all rules"]
    passed = Counter(check["rule"] for check in of(rows, "check") if check["outcome"] == "pass")
    assert {row[0]: row[3] for row in rules[1:]} == {rule: f"{passed[rule]:,}" for rule, *_ in rules[1:]}
    assert "seed 12345" in page.text  # a number that names something is one word


def test_a_run_of_which_no_work_is_known_says_none(runs: Any) -> None:
    results = runs.results([runs.claim()])
    assert " runs" not in summary(results, "o.html") and " runs" not in markdown(results)
    assert "<dt>Work</dt>" not in render_html(results)
