"""No page breaks a rule of axe-core, with everything unfolded, and every text can be read in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.html import render_html
from tests.reports.conftest import Made

pytestmark = pytest.mark.slow

PARTS = (
    "#baseline",
    "#failures",
    "#waived",
    "#tolerated",
    "#waivers",
    "#models",
    "#unexercised",
    "#matrix",
    "#claims",
    "#plots",
    "#rules",
    "#measurements",
    "#power",
    ".evidence",
    ".graphs",
    ".code",
    "svg",
    ".facts ul",
    ".banner.FAIL",
    ".banner.INCOMPLETE",
)


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
    page = opened(request.getfixturevalue(name).as_uri())
    assert [part for part in parts if not page.locator(part).count()] == []
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    found = axe.run(page, options={"rules": {"target-size": {"enabled": True}}})
    assert "target-size" in {rule["id"] for rule in found.response["passes"]}
    assert len(found.response["passes"]) > 20
    assert found.response["violations"] == [], found.generate_report()


GROUND = "getComputedStyle(document.body).backgroundColor"
CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const all = [...document.querySelectorAll("body *")];
  const seen = all.filter((e) => e.textContent.trim() && e.getClientRects().length);
  return Math.min(...seen.map((e) => {
    const style = getComputedStyle(e);
    const pair = [luminance(numbers(e.matches("text") ? style.fill : style.color)), luminance(ground(e))];
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  }));
}"""


@pytest.mark.parametrize("name", ["small_report", "board_page"])
def test_every_text_has_enough_contrast_in_both_themes(opened: Any, name: str, request: pytest.FixtureRequest) -> None:
    """That of drawings too, which axe does not look at."""
    page = opened(request.getfixturevalue(name).as_uri(), color_scheme="light")
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
    assert page.evaluate(CONTRASTS) >= 4.5
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(GROUND) != "rgb(255, 255, 255)"
    assert page.evaluate(CONTRASTS) >= 4.5
