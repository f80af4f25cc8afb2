"""The scoreboard in a real browser: order, differences and families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.verdicts import VERDICTS, Verdict
from tests.browser.conftest import address
from tests.browser.test_navigation import query, title

pytestmark = pytest.mark.slow

ROWS = """rows => rows.map(row => [...row.cells].map(
  cell => cell.querySelector(".mark")?.getAttribute("aria-label") ?? cell.textContent.trim()))"""


def rows(page: Any) -> list[list[str]]:
    """What the cells of each row that is shown say: op, dtypes, worst verdict, and a name for each backend."""
    found: list[list[str]] = page.eval_on_selector_all("#all-rows tbody tr:not([hidden])", ROWS)
    return found


def severity(text: str) -> int:
    return len(VERDICTS) if text == "-" else VERDICTS.index(Verdict(text.split(",")[0].split()[0]))


def differs(row: list[str]) -> bool:
    return len({severity(cell) for cell in row[3:] if cell != "-"}) > 1


@pytest.fixture
def board(opened: Any, board_page: Path) -> Any:
    return opened(board_page.as_uri(), viewport={"width": 1000, "height": 600})


def test_without_javascript_it_is_whole_and_promises_nothing_that_it_cannot_do(
    opened: Any, board_page: Path, board: Any
) -> None:
    page = opened(board_page.as_uri(), java_script_enabled=False)
    assert rows(page) == rows(board)
    assert board.locator("#all-rows [aria-sort=ascending]").all_inner_texts() == ["worst"]
    assert not page.get_by_label("differs only").is_visible() and not page.locator("#filter").is_visible()
    assert page.locator("button >> visible=true").count() == 0
    assert page.locator("#all-rows .mark").first.is_visible()


def test_a_column_is_filtered_by_words_of_the_names_and_sorted_by_severity(opened: Any, board: Any) -> None:
    total = len(rows(board))
    board.fill("#filter", "conv -crashed")
    title(board, "onednn", "#all-rows").click()
    found = rows(board)
    assert board.inner_text("#shown") == f"{len(found)} of {total} rows"
    assert all("conv" in row[0].lower() and "CRASHED" not in " ".join(row) for row in found)
    ranks = [severity(row[4]) for row in found]
    assert ranks == sorted(ranks) and len(set(ranks)) > 1
    again = opened(address(board))
    assert rows(again) == found
    board.fill("#filter", "")
    title(board, "fbgemm", "#all-rows").click()
    unclaimed = [row[3] == "-" for row in rows(board)]
    assert any(unclaimed) and unclaimed == sorted(unclaimed)
    title(board, "worst", "#all-rows").click()
    ranks = [severity(row[2]) for row in rows(board)]
    assert ranks == sorted(ranks)


def test_differs_only_leaves_the_rows_in_which_backends_differ(opened: Any, board: Any) -> None:
    everything = rows(board)
    wanted = [row for row in everything if differs(row)]
    assert 2 < len(wanted) < len(everything)
    board.get_by_label("differs only").check()
    assert rows(board) == wanted and board.inner_text("#shown") == f"{len(wanted)} of {len(everything)} rows"
    assert query(board) == {"differs": ["only"]}
    board.fill("#filter", "linear")
    both = [row for row in wanted if "linear" in " ".join(row).lower()]
    assert 0 < len(both) < len(wanted) and rows(board) == both
    assert query(board) == {"differs": ["only"], "q": ["linear"]}
    again = opened(address(board))
    assert rows(again) == both and again.get_by_label("differs only").is_checked()
    board.keyboard.press("Escape")
    assert rows(board) == wanted and query(board) == {"differs": ["only"]}
    board.get_by_label("differs only").uncheck()
    assert rows(board) == everything and query(board) == {}


def test_ops_and_backends_stay_in_sight_where_the_table_is_scrolled(board: Any) -> None:
    board.set_viewport_size({"width": 390, "height": 500})
    frame = board.locator(".scroll:has(> #all-rows)")
    frame.evaluate("frame => { frame.style.width = '380px'; frame.scrollTo(300, 400); }")
    assert frame.evaluate("frame => frame.scrollLeft > 100 && frame.scrollTop === 400")
    edges = """frame => {
      const box = frame.getBoundingClientRect();
      const left = (cell) => cell.getBoundingClientRect().left - box.left;
      const top = (cell) => cell.getBoundingClientRect().top - box.top;
      const corner = frame.querySelector("thead th"), last = frame.querySelector("thead th:last-child");
      const row = frame.querySelector("tbody tr:nth-child(30)");
      return [left(row.cells[0]), top(last), left(corner), top(corner), left(row.cells[3])];
    }"""
    op, head, left, top, other = frame.evaluate(edges)
    assert all(0 <= place <= 2 for place in (op, head, left, top)) and other < 290


def test_targets_are_large_enough(board: Any) -> None:
    sizes = "all => all.map(e => { const box = e.getBoundingClientRect(); return Math.min(box.width, box.height); })"
    found = board.eval_on_selector_all("#all-rows .mark, #differs", sizes)
    assert len(found) > 100 and min(found) >= 24


def test_a_family_shows_its_ops(board: Any, in_sight: Any) -> None:
    families = board.locator("table:has(caption:text('Share of the claims')) tbody a")
    assert families.count() >= 3
    total = 0
    for link in families.all():
        link.click()
        in_sight(board, "board")
        assert board.input_value("#filter") == f'family:"{link.inner_text()}"'
        shown = board.eval_on_selector_all("#all-rows tbody tr:not([hidden])", "all => all.map(e => e.dataset.family)")
        assert set(shown) == {link.inner_text()}
        total += len(shown)
    board.fill("#filter", "")
    assert total == len(rows(board))


def test_printed_the_table_is_whole_and_its_rows_are_low(board: Any) -> None:
    board.emulate_media(media="print")
    assert board.locator("nav, input, .sort:not(th *)").locator("visible=true").count() == 0
    frame = board.locator(".scroll:has(> #all-rows)")
    assert frame.evaluate("frame => frame.scrollHeight <= frame.clientHeight")
    heights = board.eval_on_selector_all("#all-rows tbody tr", "all => all.map(e => e.getBoundingClientRect().height)")
    assert len(heights) > 40 and max(heights) < 60
