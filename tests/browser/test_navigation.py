"""Finding one's way in a report: order, the address, links to claims, and the keyboard alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fx_quant_conformance.reports.page import anchor
from fx_quant_conformance.reports.verdicts import VERDICTS
from tests.browser.conftest import COUNT, address

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


def query(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(address(page)).query)


def severity(text: str) -> int:
    return len(VERDICTS) if text == "-" else VERDICTS.index(text.removeprefix("WAIVED · ").split()[0])


def size(text: str) -> float:
    return -math.inf if text == "-" else math.inf if text in ("inf", "nan") else float(text)


# -- order ------------------------------------------------------------------------------------------------------------

KEYS: dict[str, Callable[[str], float]] = {
    "claim": lambda text: ord(text[0].casefold()),
    "dtypes": lambda text: int(text.removeprefix("D")),
    "verdict": severity,
    "LSB": size,
}


def test_a_column_is_sorted_both_ways_and_says_so(opened: Any) -> None:
    page = opened()
    columns = {name: cells(page, name) for name in KEYS}
    assert {text.removeprefix("WAIVED · ") for text in columns["verdict"]} == set(VERDICTS)
    assert {"-", "0", "0.5", "18", "inf", "nan"} <= set(columns["LSB"])
    for name, before in columns.items():
        key = KEYS[name]
        ranks = sorted(map(key, before))
        assert [key(text) for text in before] not in (ranks, ranks[::-1])
        for direction, expected in (("ascending", ranks), ("descending", ranks[::-1])):
            title(page, name).click()
            found = cells(page, name)
            assert [key(text) for text in found] == expected
            assert sorted(found) == sorted(before)
            marks = [head.get_attribute("aria-sort") for head in page.locator("#all-claims thead th").all()]
            assert dict(zip(COLUMNS, marks, strict=True)) == dict.fromkeys(COLUMNS) | {name: direction}


def test_a_table_that_has_dates_is_sorted_by_day(opened: Any) -> None:
    page, table = opened(), "table:has(caption:text('Accepted deviations'))"
    title(page, "covers", table).click()
    days = cells(page, "expires", table)
    for expected in (sorted(days), sorted(days, reverse=True)):
        assert days != expected
        title(page, "expires", table).click()
        assert cells(page, "expires", table) == expected


# -- the filter -------------------------------------------------------------------------------------------------------

QUERIES: dict[str, Callable[[dict[str, str]], bool]] = {
    "conv2d REFUTED": lambda row: "conv2d" in row["claim"].lower() and "REFUTED" in row["verdict"],
    "-verdict:verified": lambda row: "VERIFIED" not in row["verdict"],
    "op:conv2d verdict:REFUTED": lambda row: (
        "conv2d" in row["claim"].split("/")[0].lower() and "REFUTED" in row["verdict"]
    ),
    "lsb>1": lambda row: size(row["LSB"]) > 1,
    "lsb<=0.5 -per_channel": lambda row: size(row["LSB"]) <= 0.5 and "per_channel" not in " ".join(row.values()),
    'verdict:"waived"': lambda row: "WAIVED" in row["verdict"],
    "unknown:key": lambda row: False,
}


def test_a_query_shows_the_rows_that_it_asks_for(opened: Any) -> None:
    page = opened()
    everything = [
        dict(zip(COLUMNS, row, strict=True)) for row in zip(*(cells(page, name) for name in COLUMNS), strict=True)
    ]
    for text, accepts in QUERIES.items():
        page.fill("#filter", text)
        wanted = [row["claim"] for row in everything if accepts(row)]
        assert cells(page, "claim") == wanted
        assert page.inner_text("#shown") == f"{len(wanted)} of {COUNT} claims"
        assert len(wanted) < COUNT and bool(wanted) == (text != "unknown:key")


def test_a_waiver_leads_to_its_claims_and_its_reason_is_found(opened: Any) -> None:
    page = opened()
    row = page.locator("#waivers ~ div tr[data-number]", has_text="issue 12")
    reason, count = row.locator("th").inner_text(), int(row.locator("td").first.inner_text())
    page.fill("#filter", f'waiver:"{reason}"')
    by_reason = cells(page, "claim")
    row.locator("a.v").first.click()
    assert cells(page, "claim") == by_reason
    assert len(by_reason) == count - 1  # a model is covered, too
    assert all("WAIVED" in verdict for verdict in cells(page, "verdict"))


# -- the address ------------------------------------------------------------------------------------------------------


def test_filter_and_order_stand_in_the_address(opened: Any, report: Path) -> None:
    page = opened(f"{report.as_uri()}#{anchor('shown')}")
    steps = page.evaluate("history.length")
    page.fill("#filter", "conv2d + relu & 2^")
    page.fill("#filter", "conv2d + relu 2^")
    for _ in range(2):
        title(page, "verdict").click()
    assert query(page) == {"q": ["conv2d + relu 2^"], "sort": ["4-descending"]}
    assert urlsplit(address(page)).fragment == anchor("shown")
    assert page.evaluate("history.length") == steps  # going back leads out, not through all letters
    found = cells(page, "claim")
    assert 5 < len(found) < COUNT

    again = opened(address(page))
    assert cells(again, "claim") == found
    assert again.input_value("#filter") == "conv2d + relu 2^"
    assert again.inner_text("#shown") == f"{len(found)} of {COUNT} claims"
    assert again.locator("#all-claims [aria-sort=descending]").all_inner_texts() == ["verdict"]

    again.fill("#filter", "")
    assert query(again) == {"sort": ["4-descending"]}
    assert urlsplit(address(again)).fragment == anchor("shown")
    assert len(cells(again, "claim")) == COUNT


def test_an_address_that_makes_no_sense_leaves_the_order(opened: Any, report: Path) -> None:
    page = opened()
    order = cells(page, "claim")
    addresses = [f"{report.as_uri()}?sort={sort}" for sort in ("99-ascending", "4-sideways", "-1-ascending", "x")]
    for one in addresses:
        page.goto(f"{one}#nothing")
        assert page.locator("[aria-sort]").count() == 0
        assert cells(page, "claim") == order
    assert page.noted == [report.as_uri(), *addresses]


@pytest.mark.parametrize(
    ("name", "search", "kept"),
    [
        ("shown", "", {}),
        ("shown", "?q=linear&sort=5-ascending", {"q": ["linear"], "sort": ["5-ascending"]}),
        ("known", "?q=no+row+has+this", {"q": ["no row has this"]}),
        ("exact", "?q=no+row+has+this&sort=5-ascending", {"sort": ["5-ascending"]}),
        ("model/unet/ptq", "?q=linear&sort=0-descending", {"q": ["linear"], "sort": ["0-descending"]}),
    ],
)
def test_the_address_of_a_claim_or_model_shows_it(
    opened: Any, in_sight: Any, report: Path, name: str, search: str, kept: dict[str, list[str]]
) -> None:
    """Where the filter hides a row, the filter goes; the order stays. Evidence is hidden by no filter."""
    page = opened(f"{report.as_uri()}{search}#{anchor(name)}")
    in_sight(page, anchor(name))
    assert name in page.inner_text(f"[id='{anchor(name)}']")
    assert query(page) == kept and page.input_value("#filter") == "".join(kept.get("q", []))


def test_a_link_shows_what_is_filtered_or_folded(opened: Any, in_sight: Any) -> None:
    page = opened()
    filtered = page.locator(".matrix td a.VERIFIED").last
    for _ in range(2):  # the second time the address is there already
        page.fill("#filter", "no row has these words")
        name = filtered.get_attribute("href")[1:]
        assert not page.locator(f"tr[id='{name}']").is_visible()
        filtered.click()
        in_sight(page, name)
        assert page.input_value("#filter") == "" and page.evaluate("location.hash") == f"#{name}"
    folded = page.locator("#all-claims tr", has_text="waived").locator("a").first
    name = folded.get_attribute("href")[1:]
    assert not page.locator(f"article[id='{name}']").is_visible()
    folded.click()
    in_sight(page, name)


# -- the keyboard -----------------------------------------------------------------------------------------------------


def test_slash_goes_to_the_filter_and_escape_clears_it(opened: Any, report: Path) -> None:
    page = opened()
    for key in ("Control+/", "Meta+/", "Alt+/"):  # the browser's own
        page.keyboard.press(key)
        assert address(page) == report.as_uri()
        assert page.evaluate("document.activeElement.tagName") == "BODY"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("lstm a/b")
    assert page.input_value("#filter") == "lstm a/b"
    assert cells(page, "claim") == []
    page.keyboard.press("Escape")
    assert page.input_value("#filter") == "" and query(page) == {}
    assert len(cells(page, "claim")) == COUNT


STOP = """() => {
  const element = document.activeElement, style = getComputedStyle(element);
  return [element.closest("nav, #all-claims, .counts")?.tagName || element.id, element.textContent.trim(),
          style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
}"""


def test_the_tab_key_reaches_everything_from_the_top_down(opened: Any) -> None:
    page = opened()
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
    page.keyboard.press("Enter")
    assert page.locator("#all-claims [aria-sort=ascending]").all_inner_texts() == [titles[-1]]
