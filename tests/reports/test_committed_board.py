"""The scoreboard of the committed results, held to their rows: glyphs, order, differences and shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reports.compare import render_board
from reports.families import OTHER, find_family
from reports.results import Results, read_results
from reports.schema import ClaimResult
from reports.verdicts import VERDICT_TEXTS, VERDICTS, Verdict
from tests.reports.pages import Page

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
GLYPHS = {text.glyph: verdict for verdict, text in VERDICT_TEXTS.items()}


@pytest.fixture(scope="module")
def runs() -> list[Results]:
    return [read_results(path) for path in sorted((DOCS / "results").glob("*.xz"))]


@pytest.fixture(scope="module")
def claims(runs: list[Results]) -> dict[str, tuple[ClaimResult, ...]]:
    """The claims of each committed run, by backend."""
    return {run.header.backend: run.claims for run in runs}


@pytest.fixture(scope="module")
def text(runs: list[Results]) -> str:
    return render_board(runs)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def lines(page: Page) -> Iterator[tuple[str, str, list[str]]]:
    """Op, dtypes, and the glyph of each backend."""
    titles, *rows = page.tables["Op × dtypes × backend"]
    assert titles[:3] == ["op", "dtypes", "worst"]
    for op, dtypes, _, *cells in rows:
        yield op, dtypes, cells


def test_every_cell_has_the_worst_verdict_of_its_claims(page: Page, claims: dict[str, tuple[ClaimResult, ...]]) -> None:
    found = {
        (op, dtypes, backend): GLYPHS[glyph]
        for op, dtypes, cells in lines(page)
        for backend, glyph in zip(claims, cells, strict=True)
        if glyph != "-"
    }
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for backend, rows in claims.items():
        for row in rows:
            groups.setdefault((row.pattern, row.dtypes, backend), []).append(row.verdict)
    assert found == {key: min(verdicts, key=VERDICTS.index) for key, verdicts in groups.items()}
    assert len(found) > 1000


def test_rows_stand_in_order_and_say_whether_they_differ(page: Page) -> None:
    marked = [attrs for tag, attrs in page.tags if tag == "tr" and "data-family" in attrs]
    keys, differing = [], []
    for op, dtypes, cells in lines(page):
        verdicts = [GLYPHS[glyph] for glyph in cells if glyph != "-"]
        keys.append((min(VERDICTS.index(verdict) for verdict in verdicts), op, dtypes))
        differing.append(len(set(verdicts)) > 1)
    assert keys == sorted(keys)
    assert ["data-differs" in attrs for attrs in marked] == differing
    assert [attrs["data-family"] for attrs in marked] == [find_family(op) for _, op, _ in keys]
    assert 50 < sum(differing) < len(keys) - 50


def test_shares_are_those_of_the_rows(page: Page, claims: dict[str, tuple[ClaimResult, ...]]) -> None:
    titles, *rows = page.tables["Share of the claims that is VERIFIED; a dash: nothing is claimed"]
    assert titles[1:] == list(claims)
    shares = {(row[0], backend): cell for row in rows for backend, cell in zip(claims, row[1:], strict=True)}
    for (family, backend), share in shares.items():
        verdicts = [row.verdict for row in claims[backend] if family in ("all families", find_family(row.pattern))]
        exact = 100 * verdicts.count(Verdict.VERIFIED) / len(verdicts) if verdicts else None
        assert (share == "-") == (exact is None)
        if exact is not None:
            assert abs(float(share.removesuffix(" %")) - exact) <= (0.5 if 0.5 <= exact <= 99.5 else 1)
    claimed = {row[0]: any(cell != "-" for cell in row[1:]) for row in rows}
    assert all(claimed.values()) and len(claimed) == 11


def test_every_committed_pattern_has_a_family(claims: dict[str, tuple[ClaimResult, ...]]) -> None:
    patterns = {row.pattern for rows in claims.values() for row in rows}
    assert len(patterns) > 200
    assert sorted(pattern for pattern in patterns if find_family(pattern) == OTHER) == []


def test_the_page_stays_small(text: str, claims: dict[str, tuple[ClaimResult, ...]]) -> None:
    assert len(text.encode()) < 65_000 * len(claims)
