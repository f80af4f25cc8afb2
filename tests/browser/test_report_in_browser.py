"""The HTML report in a real browser: filtered by its counts, printed, narrow, and whole without JavaScript."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.page import anchor
from tests.browser.conftest import COUNT

pytestmark = pytest.mark.slow


def test_all_is_there_without_javascript(opened: Any, report: Path) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("article.claim >> visible=true").count() > 5
    assert page.locator(".matrix td a").first.is_visible()
    assert page.locator("#all-claims tbody tr >> visible=true").count() == COUNT
    assert page.locator("button >> visible=true").count() == 0
    assert not page.locator("#filter").is_visible()
    assert not page.locator("kbd").first.is_visible()
    folded = page.locator(f"[id='{anchor('known')}']")
    assert not folded.is_visible()
    page.goto(f"{report.as_uri()}#{anchor('known')}")
    assert folded.is_visible()


def test_the_counts_at_the_top_filter_the_claims(opened: Any, in_sight: Any) -> None:
    page = opened()
    chips = page.locator(".counts a")
    assert chips.count() == 9
    rows = page.locator("#all-claims tbody tr >> visible=true")
    for chip in chips.all():
        text = chip.inner_text()
        word = "WAIVED" if text.endswith("waived") else text.split()[1]
        chip.click()
        in_sight(page, "claims")
        verdicts = rows.locator("td:nth-child(5)").all_inner_texts()
        assert page.inner_text("#shown") == f"{len(verdicts)} of {COUNT} claims"
        assert len(verdicts) == int(text.split()[0])
        assert all(word in verdict.split() for verdict in verdicts)
        assert page.input_value("#filter") == word
    page.keyboard.press("Escape")
    assert rows.count() == COUNT


def test_printed_it_is_white_whole_and_without_controls(opened: Any) -> None:
    page = opened(color_scheme="dark")
    controls = page.locator("nav, input, kbd, button:not(.sort)")
    titles = page.locator("#all-claims thead button")
    folded = page.locator("details:not([open]) article.claim").first
    shown = "element => element.checkVisibility()"
    assert controls.locator("visible=true").count() > 10
    assert not folded.evaluate(shown)
    page.emulate_media(media="print")
    assert controls.locator("visible=true").count() == 0
    assert folded.evaluate(shown)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert titles.locator("visible=true").all_inner_texts()[:2] == ["claim", "dtypes"]
    arrow = "button => getComputedStyle(button, '::after').content"
    assert {title.evaluate(arrow) for title in titles.all()} == {"none"}
    assert page.locator(".matrix").evaluate("element => getComputedStyle(element).page") == "wide"
    clipped = (
        """all => all.filter(e => getComputedStyle(e).overflowY !== "visible" && e.scrollHeight > e.clientHeight)"""
    )
    assert page.eval_on_selector_all("main *", f"elements => ({clipped})(elements).length") == 0


def test_the_heat_map_of_ten_configs_fits_a_laptop(opened: Any, runs: Any, tmp_path: Path) -> None:
    configs = [
        f"static:in=qint8[s>=2^-{n}],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12]" for n in range(10)
    ]
    claims = [
        runs.claim(f"{name} {n}", pattern=f"nn.ConvTranspose3d+nn.BatchNorm3d+{name}", dtype_config=config)
        for n, config in enumerate(configs)
        for name in ("nn.ReLU", "F.relu")
    ]
    (tmp_path / "ten.html").write_text(render_html(runs.results(claims)), encoding="utf-8")
    page = opened((tmp_path / "ten.html").as_uri(), viewport={"width": 1366, "height": 768})
    assert page.locator(".matrix").evaluate("element => element.scrollWidth - element.clientWidth") == 0
    marks = page.locator(".matrix a.mark").evaluate_all("all => all.map(a => a.getBoundingClientRect().toJSON())")
    assert len(marks) == 20 and all(mark["width"] >= 24 and mark["height"] >= 24 for mark in marks)


def test_the_copy_button_answers(opened: Any) -> None:
    page = opened()
    button = page.locator("article button").first
    button.click()
    page.locator("article button", has_text=re.compile("^(Copied|Selected)$")).wait_for()  # when the clipboard answers


@pytest.mark.parametrize("name", ["report", "board_page"])
def test_the_page_itself_never_scrolls_sideways(opened: Any, name: str, request: pytest.FixtureRequest) -> None:
    page = opened(request.getfixturevalue(name).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    for width in (360, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_scrolls_within_the_page_is_reached_by_keyboard(opened: Any) -> None:
    page = opened(viewport={"width": 800, "height": 600})
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    scrolled = """all => all.filter(e => !["visible", "clip"].includes(getComputedStyle(e).overflowX)
      && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight)).map(e => [e.tagName, e.tabIndex])"""
    found = page.eval_on_selector_all("body *", scrolled)
    assert len(found) > 2
    assert [each for each in found if each != ["NAV", -1] and each[1] != 0] == []
