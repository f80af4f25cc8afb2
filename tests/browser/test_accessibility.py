"""No page breaks a rule of axe-core, in either theme, with everything unfolded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reports.html import render_html
from tests.reports.conftest import Made

pytestmark = pytest.mark.slow

PARTS = (
    "#baseline", "#failures", "#waived", "#quality", "#waivers", "#models", "#unexercised", "#matrix", "#claims",
    "#plots", "#rules", "#measurements", "#power", ".evidence", ".graphs", ".code", "svg", ".facts ul",
    ".banner.FAIL", ".banner.INCOMPLETE",
)  # fmt: skip


@pytest.fixture
def small_report(tmp_path: Path) -> Path:
    """The report of a small run that has all there is to show; it is a shard, and has a problem."""
    made = Made(tmp_path)
    header, *rows = made.everything()
    results = made.results([header | {"shard": {"place": 2, "of": 8}}, *rows], problems=["a waiver matches nothing"])
    path = tmp_path / "small.html"
    path.write_text(render_html(results, made.results([header, *rows[:6]])), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "parts"), [("small_report", PARTS), ("board_page", ("#board",))])
def test_axe_finds_nothing(opened: Any, name: str, parts: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    page = opened(request.getfixturevalue(name).as_uri(), color_scheme="light")
    assert [part for part in parts if not page.locator(part).count()] == []
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    light = axe.run(page, options={"rules": {"target-size": {"enabled": True}}})
    assert "target-size" in {rule["id"] for rule in light.response["passes"]}
    assert len(light.response["passes"]) > 20
    assert light.response["violations"] == [], light.generate_report()
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) != "rgb(255, 255, 255)"
    dark = axe.run(page, options={"runOnly": ["color-contrast"]})
    assert [rule["id"] for rule in dark.response["passes"]] == ["color-contrast"]
    assert dark.response["violations"] == [], dark.generate_report()
