"""Finding one's way in a report: order, the address, links to claims, and the keyboard alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from reports.html import render_html
from reports.page import anchor
from reports.verdicts import VERDICTS

pytestmark = pytest.mark.slow

COLUMNS = ["claim", "dtypes", "flow", "scheme", "verdict", "LSB", "allowed", "seconds", "stages"]


def cells(page: Any, title: str, table: str = "#all-claims") -> list[str]:
    """The texts of a column, in the rows that are shown, from above."""
    titles = page.locator(f"{table} thead th").all_inner_texts()
    texts = "(rows, column) => rows.map((row) => row.cells[column].textContent.trim())"
    found: list[str] = page.eval_on_selector_all(f"{table} tbody tr:not([hidden])", texts, titles.index(title))
    return found


def title(page: Any, name: str, table: str = "#all-claims") -> Any:
    """The button over a column."""
    return page.locator(f"{table} thead").get_by_role("button", name=name, exact=False)


def severity(text: str) -> int:
    return len(VERDICTS) if text == "-" else VERDICTS.index(text.removeprefix("WAIVED · ").split()[0])


def size(text: str) -> float:
    return -math.inf if text == "-" else math.inf if text in ("inf", "nan") else float(text)


KEYS: dict[str, Callable[[str], float]] = {
    "claim": lambda text: ord(text[0].casefold()),
    "dtypes": lambda text: int(text.removeprefix("D")),
    "verdict": severity,
    "LSB": size,
}


@pytest.mark.parametrize("name", KEYS)
def test_a_column_is_sorted_both_ways_and_says_so(opened: Any, name: str) -> None:
    page, key = opened(), KEYS[name]
    before = cells(page, name)
    ranks = sorted(map(key, before))
    assert [key(text) for text in before] not in (ranks, ranks[::-1])
    for direction, expected in (("ascending", ranks), ("descending", ranks[::-1])):
        title(page, name).click()
        found = cells(page, name)
        assert [key(text) for text in found] == expected
        assert sorted(found) == sorted(before)
        marks = [head.get_attribute("aria-sort") for head in page.locator("#all-claims thead th").all()]
        assert dict(zip(COLUMNS, marks, strict=True)) == dict.fromkeys(COLUMNS) | {name: direction}


def test_verdicts_are_sorted_by_severity_and_errors_that_are_no_numbers_are_the_largest(opened: Any) -> None:
    page = opened()
    title(page, "verdict").click()
    assert list(dict.fromkeys(text.removeprefix("WAIVED · ") for text in cells(page, "verdict"))) == list(VERDICTS)
    title(page, "LSB").click()
    found = list(dict.fromkeys(cells(page, "LSB")))
    assert found[:-2] == ["-", "0", "0.4996", "0.5", "18"] and set(found[-2:]) == {"inf", "nan"}


def test_one_column_at_a_time_is_said_to_be_sorted(opened: Any) -> None:
    page = opened()
    for name in ("LSB", "claim"):
        title(page, name).click()
    assert page.locator("#all-claims [aria-sort]").all_inner_texts() == ["claim"]


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_a_column_is_sorted_by_keyboard(opened: Any, key: str) -> None:
    page = opened()
    title(page, "verdict").focus()
    page.keyboard.press(key)
    assert severity(cells(page, "verdict")[0]) == 0
    page.keyboard.press(key)
    assert severity(cells(page, "verdict")[-1]) == 0


def test_a_table_that_has_dates_is_sorted_by_day(opened: Any, runs: Any) -> None:
    days = ["2027-03-05", "2027-01-31", "2026-12-24", "2027-01-09"]
    waivers = [{"reason": f"issue {n}", "url": None, "expires": day, "max_lsb": None} for n, day in enumerate(days)]
    rows = [row for n, said in enumerate(waivers) for row in runs.refuted(f"known {n}", waived=True, waiver=said)]
    path: Path = runs.directory / "waivers.html"
    path.write_text(render_html(runs.results(rows)), encoding="utf-8")
    page, table = opened(path.as_uri()), "table:has(caption:text('Accepted deviations'))"
    title(page, "up to LSB", table).click()  # nothing to sort by
    for expected in (sorted(days), sorted(days, reverse=True)):
        title(page, "expires", table).click()
        assert cells(page, "expires", table) == expected


def query(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def test_filter_and_order_stand_in_the_address(opened: Any, report: Path) -> None:
    page = opened(f"{report.as_uri()}#{anchor('shown')}")
    steps = page.evaluate("history.length")
    page.fill("#filter", "conv2d + relu & 2^")
    page.fill("#filter", "conv2d + relu 2^")
    for _ in range(2):
        title(page, "verdict").click()
    assert query(page) == {"q": ["conv2d + relu 2^"], "sort": ["4-descending"]}
    assert urlsplit(page.url).fragment == anchor("shown")
    assert page.evaluate("history.length") == steps  # going back leads out, not through all letters
    found = cells(page, "claim")
    assert 5 < len(found) < 404

    again = opened(page.url)
    assert cells(again, "claim") == found
    assert again.input_value("#filter") == "conv2d + relu 2^"
    assert again.inner_text("#shown") == f"{len(found)} of 404 claims"
    assert again.locator("#all-claims [aria-sort=descending]").all_inner_texts() == ["verdict"]

    again.fill("#filter", "")
    assert query(again) == {"sort": ["4-descending"]}
    assert urlsplit(again.url).fragment == anchor("shown")
    assert len(cells(again, "claim")) == 404


@pytest.mark.parametrize("sort", ["99-ascending", "4-sideways", "-1-ascending", "x"])
def test_an_address_that_makes_no_sense_leaves_the_order(opened: Any, report: Path, sort: str) -> None:
    address = f"{report.as_uri()}?sort={sort}"
    page = opened(f"{address}#nothing")
    assert page.locator("[aria-sort]").count() == 0
    assert cells(page, "claim") == cells(opened(), "claim")
    assert page.noted == [address]


@pytest.mark.parametrize("search", ["", "?q=no+row+has+this", "?sort=0-descending", "?q=linear&sort=5-ascending"])
@pytest.mark.parametrize("name", ["shown", "known", "exact", "model/unet/ptq"])
def test_the_address_of_a_claim_or_model_shows_it(
    opened: Any, in_sight: Any, report: Path, name: str, search: str
) -> None:
    page = opened(f"{report.as_uri()}{search}#{anchor(name)}")
    in_sight(page, anchor(name))
    assert name in page.inner_text(f"[id='{anchor(name)}']")


def test_a_claim_that_the_filter_hides_is_shown_and_the_filter_gone(opened: Any, report: Path) -> None:
    hidden = opened(f"{report.as_uri()}?q=no+row+has+this&sort=5-ascending#{anchor('exact')}")
    assert hidden.input_value("#filter") == ""
    assert query(hidden) == {"sort": ["5-ascending"]}
    kept = opened(f"{report.as_uri()}?q=linear&sort=5-ascending#{anchor('shown')}")
    assert kept.input_value("#filter") == "linear"


def test_a_folded_claim_is_unfolded_without_javascript_too(opened: Any, report: Path) -> None:
    page = opened(f"{report.as_uri()}#{anchor('known')}", java_script_enabled=False)
    assert page.locator(f"[id='{anchor('known')}']").is_visible()
    assert not opened(java_script_enabled=False).locator(f"[id='{anchor('known')}']").is_visible()


def test_a_link_to_a_filtered_row_shows_it(opened: Any, in_sight: Any) -> None:
    page = opened()
    link = page.locator(".matrix td a.VERIFIED").first
    name = link.get_attribute("href")[1:]
    for _ in range(2):  # the second time the address is there already
        page.fill("#filter", "no row has these words")
        assert not page.locator(f"tr[id='{name}']").is_visible()
        link.click()
        in_sight(page, name)
        assert page.input_value("#filter") == ""


def test_a_link_to_folded_evidence_unfolds_it(opened: Any, in_sight: Any) -> None:
    page = opened()
    link = page.locator("#all-claims tr", has_text="waived").locator("a").first
    name = link.get_attribute("href")[1:]
    assert not page.locator(f"article[id='{name}']").is_visible()
    link.click()
    in_sight(page, name)


def test_a_claim_has_one_anchor_in_every_run(opened: Any, runs: Any) -> None:
    name = "nn.Linear|in=quint8,w=qint8,out=quint8|ptq|per_tensor"
    pages: list[Any] = []
    other = [runs.check("another"), runs.claim("another", pattern="nn.Embedding")]
    for rows in (runs.refuted(name), [*other, runs.claim(name)]):
        path: Path = runs.directory / f"{len(pages)}.html"
        path.write_text(render_html(runs.results(rows)), encoding="utf-8")
        pages.append(opened(f"{path.as_uri()}#{anchor(name)}"))
    targets = [page.locator(":target") for page in pages]
    assert [target.evaluate("element => element.tagName") for target in targets] == ["ARTICLE", "TR"]
    assert all(name in target.inner_text() for target in targets)
    assert [page.locator(".matrix td a").last.get_attribute("href") for page in pages] == [f"#{anchor(name)}"] * 2


def test_slash_goes_to_the_filter_and_escape_clears_it(opened: Any) -> None:
    page = opened()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("lstm a/b")
    assert page.input_value("#filter") == "lstm a/b"
    assert cells(page, "claim") == []
    page.keyboard.press("Escape")
    assert page.input_value("#filter") == "" and query(page) == {}
    assert len(cells(page, "claim")) == 404


def test_escape_undoes_what_a_count_at_the_top_filters(opened: Any) -> None:
    page = opened()
    page.locator(".counts a").first.click()
    assert len(cells(page, "claim")) < 404
    page.keyboard.press("Escape")
    assert len(cells(page, "claim")) == 404


@pytest.mark.parametrize("key", ["Control+/", "Meta+/", "Alt+/"])
def test_the_browsers_own_keys_are_left_to_it(opened: Any, report: Path, key: str) -> None:
    page = opened()
    page.keyboard.press(key)
    assert page.url == report.as_uri()
    assert page.evaluate("document.activeElement.tagName") == "BODY"


def test_a_slash_in_the_filter_is_text(opened: Any) -> None:
    page = opened()
    page.focus("#filter")
    page.keyboard.type("jk/j")
    assert page.input_value("#filter") == "jk/j"


STOP = """() => {
  const element = document.activeElement, style = getComputedStyle(element);
  return [element.closest("nav, #all-claims, .counts")?.tagName || element.id, element.textContent.trim(),
          style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""


def test_the_tab_key_reaches_everything_from_the_top_down(opened: Any, report_of: Callable[[int], Path]) -> None:
    page = opened(report_of(25).as_uri())
    titles = page.locator("#all-claims thead button").all_inner_texts()
    links = [link.strip() for link in page.locator("nav a").all_text_contents()]
    chips = page.locator(".counts a").all_inner_texts()
    assert titles == COLUMNS and len(links) > 10 and len(chips) > 5
    found: list[Any] = []
    while not found or found[-1][:2] != ["TABLE", titles[-1]]:
        page.keyboard.press("Tab")
        found.append(page.evaluate(STOP))
        assert len(found) < 500
    assert [text for place, text, _ in found if place == "UL"] == chips
    assert [text for place, text, _ in found if place == "NAV"] == links
    assert [text for place, text, _ in found if place == "TABLE"] == titles
    order = [place for place, _, _ in found if place in ("UL", "NAV", "filter", "TABLE")]
    assert list(dict.fromkeys(order)) == ["UL", "NAV", "filter", "TABLE"]
    assert [stop for stop in found if not stop[2]] == []  # where the focus is can be seen


QUERIES: dict[str, Callable[[dict[str, str]], bool]] = {
    "verdict:refuted": lambda row: "REFUTED" in row["verdict"],
    "-verdict:verified": lambda row: "VERIFIED" not in row["verdict"],
    "op:conv2d verdict:REFUTED": lambda row: (
        "conv2d" in row["claim"].split("/")[0].lower() and "REFUTED" in row["verdict"]
    ),
    "lsb>1": lambda row: size(row["LSB"]) > 1,
    "lsb<=0.5 -per_channel": lambda row: size(row["LSB"]) <= 0.5 and "per_channel" not in " ".join(row.values()),
    'verdict:"waived"': lambda row: "WAIVED" in row["verdict"],
    "unknown:key": lambda row: False,
}


@pytest.mark.parametrize("text", QUERIES)
def test_a_query_shows_the_rows_that_it_asks_for(opened: Any, until: Any, text: str) -> None:
    page = opened()
    everything = [
        dict(zip(COLUMNS, row, strict=True)) for row in zip(*(cells(page, name) for name in COLUMNS), strict=True)
    ]
    page.fill("#filter", text)
    until(page, "text => new URLSearchParams(location.search).get('q') === text", text)
    wanted = [row["claim"] for row in everything if QUERIES[text](row)]
    assert cells(page, "claim") == wanted
    assert len(wanted) < len(everything)
    page.reload()
    assert page.input_value("#filter") == text and cells(page, "claim") == wanted


def test_a_waiver_leads_to_its_claims_and_its_reason_is_found(opened: Any, until: Any) -> None:
    page = opened()
    row = page.locator("#waivers ~ div tr[data-number]").first
    reason, count = row.locator("th").inner_text(), int(row.locator("td").first.inner_text())
    page.fill("#filter", f'waiver:"{reason}"')
    until(page, "() => new URLSearchParams(location.search).get('q')")
    by_reason = cells(page, "claim")
    row.locator("a.v").first.click()
    assert cells(page, "claim") == by_reason
    assert len(by_reason) == count - 1  # a model is covered, too
    assert all("WAIVED" in verdict for verdict in cells(page, "verdict"))
