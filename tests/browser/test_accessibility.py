"""No page breaks a rule of axe-core, in either theme, with everything unfolded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.html import render_html

pytestmark = pytest.mark.slow

PARTS = (
    "#baseline", "#failures", "#waived", "#quality", "#waivers", "#models", "#unexercised", "#matrix", "#claims",
    "#plots", "#rules", "#measurements", "#power", ".evidence", ".graphs", ".code", "svg", ".facts ul",
)  # fmt: skip


@pytest.fixture
def troubled(runs: Any) -> Path:
    """A shard of a run whose totals disagree with its rows."""
    path: Path = runs.directory / "troubled.html"
    results = runs.results([runs.check(), runs.claim()], claims=7, shard={"place": 2, "of": 8})
    path.write_text(render_html(results), encoding="utf-8")
    return path


@pytest.fixture
def pages(report_of: Callable[[int], Path], board_page: Path, troubled: Path) -> dict[str, Path]:
    return {"report": report_of(90), "scoreboard": board_page, "troubled": troubled}


def test_the_report_that_is_judged_has_every_part(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["report"].as_uri())
    assert [part for part in PARTS if not page.locator(part).count()] == []
    assert opened(pages["troubled"].as_uri()).locator(".banner").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["report", "scoreboard", "troubled"])
def test_axe_finds_nothing(opened: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = opened(pages[name].as_uri(), color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    found = axe.Axe().run(page, options={"rules": {"target-size": {"enabled": True}}})
    assert "target-size" in {rule["id"] for rule in found.response["passes"] + found.response["violations"]}
    assert len(found.response["passes"]) > 20
    assert found.response["violations"] == [], found.generate_report()
