"""Reports of ten thousand claims and more: small enough, quick enough, and every link leads somewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.html import render_html
from reports.page import anchor

pytestmark = pytest.mark.slow

MOST_BYTES = 5_000_000
Row = dict[str, Any]


def rows_of(runs: Any, count: int) -> list[Row]:
    """Rows of so many claims, each with its checks of numerics alone: the others are but counted on the page."""
    return [row for row in runs.large(count) if row.get("stage", "numerics") == "numerics"]


@pytest.fixture
def large(runs: Any, written: Any) -> Path:
    path: Path = written("large", lambda: render_html(runs.results(rows_of(runs, 10_000))))
    return path


@pytest.fixture
def larger(runs: Any, written: Any) -> Path:
    path: Path = written("larger", lambda: render_html(runs.results(rows_of(runs, 12_000))))
    return path


def claims(rows: list[Row], **values: str) -> list[str]:
    """The IDs of the claims that have these values."""
    return [row["claim"] for row in rows if row["kind"] == "claim" and values.items() <= row.items()]


def test_ten_thousand_claims_are_listed_in_five_megabytes(opened: Any, large: Path) -> None:
    assert large.stat().st_size <= MOST_BYTES
    assert opened(large.as_uri()).locator("#all-claims tbody tr").count() == 10_000


def test_of_ten_thousand_claims_the_filter_answers_within_three_seconds(
    opened: Any, until: Any, runs: Any, large: Path
) -> None:
    expected = [name for name in claims(runs.large(10_000), verdict="REFUTED") if "nn.LSTM" in name]
    answered = "told => document.getElementById('shown').textContent === told"

    def milliseconds() -> float:
        page = opened(large.as_uri())
        page.fill("#filter", "lstm refuted")
        taken: float = until(page, answered, f"{len(expected)} of 10,000 claims")
        assert page.locator("#all-claims tbody tr:not([hidden])").count() == len(expected)
        page.context.close()
        return taken

    assert 20 < len(expected) < 100
    # the one time that a test asks for, for it was asked for: the best of some loads, so that no noise fails it
    assert any(milliseconds() <= 3000 for _ in range(5))


def test_rows_of_a_long_report_are_found_sorted_and_linked(opened: Any, in_sight: Any, runs: Any, large: Path) -> None:
    name = claims(runs.large(10_000), verdict="VERIFIED")[2000]
    page = opened(f"{large.as_uri()}?sort=4-descending#{anchor(name)}")
    in_sight(page, anchor(name))
    assert page.locator("#all-claims tbody td:nth-child(5)").first.text_content() == "VERIFIED"
    other = page.locator(".matrix td a.VERIFIED").last
    other.click()
    in_sight(page, other.get_attribute("href")[1:])
    edges = "row => [...row.cells].map((cell) => Math.round(cell.getBoundingClientRect().left))"
    places = page.locator("#all-claims thead tr").evaluate(edges)
    assert len(places) == 9 and places == sorted(set(places)) == page.locator(":target").evaluate(edges)
    titles, *rows = (row.evaluate(edges)[1:] for row in page.locator(".matrix tr").all()[:4])
    assert len(titles) == 19 and rows == [titles] * 3  # the first column stays in sight where the others are scrolled


def test_counts_with_thousands_are_sorted_as_numbers(opened: Any, large: Path) -> None:
    page = opened(large.as_uri())
    table = page.locator("table", has=page.locator("caption", has_text="Checks by rule"))
    for direction in ("ascending", "descending"):
        table.locator("button.sort", has_text="pass").click()
        texts = table.locator("tbody td:nth-child(4)").all_inner_texts()
        counts = [int(text.replace(",", "")) for text in texts]
        assert counts == sorted(counts, reverse=direction == "descending") and max(counts) > 1000


def test_of_more_claims_the_verified_ones_are_in_the_matrix_alone(
    opened: Any, in_sight: Any, runs: Any, larger: Path
) -> None:
    rows = runs.large(12_000)
    verified, all_claims = claims(rows, verdict="VERIFIED"), claims(rows)
    assert larger.stat().st_size <= MOST_BYTES
    page = opened(larger.as_uri())
    for name in (verified[0], verified[2000], verified[-1]):
        page.goto(f"{larger.as_uri()}?q=no+row#{anchor(name)}")
        in_sight(page, anchor(name))
    page.keyboard.press("Escape")
    assert "VERIFIED" in page.inner_text(f".matrix [id='{anchor(verified[-1])}']")
    assert page.inner_text("#shown") == "{0:,} of {0:,} claims".format(len(all_claims) - len(verified))
    assert "VERIFIED" not in page.eval_on_selector_all(
        "#all-claims td:nth-child(5)", "all => all.map(cell => cell.textContent.trim())"
    )
    assert page.locator(".matrix td a").count() == 12_000
    missing = """links => links.map(a => a.getAttribute("href").slice(1)).filter(id => !document.getElementById(id))"""
    assert page.eval_on_selector_all("a[href^='#']", missing) == []
    found = "names => names.filter(name => !document.getElementById(name))"
    assert page.evaluate(found, [anchor(name) for name in all_claims]) == []
