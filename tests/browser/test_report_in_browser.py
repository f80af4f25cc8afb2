"""The HTML report in a real browser: filtered, unfolded, dark on demand, printed, and whole without JavaScript."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from reports.html import render_html

pytestmark = pytest.mark.slow


def test_all_is_there_without_javascript(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("article.claim >> visible=true").count() > 20
    assert page.locator(".matrix td a").first.is_visible()
    assert page.locator("#all-claims tbody tr >> visible=true").count() == 404
    assert page.locator("button >> visible=true").count() == 0
    assert not page.locator("#filter").is_visible()
    assert not page.locator("kbd").first.is_visible()


def test_plots_have_words_and_a_table_without_javascript(opened: Any) -> None:
    figures = opened(java_script_enabled=False).locator("figure:has(svg)")
    assert figures.count() == 3
    for figure in figures.all():
        drawing = figure.locator("svg[aria-labelledby]")
        title, description = (drawing.get_attribute(f"aria-{name}") for name in ("labelledby", "describedby"))
        assert drawing.get_attribute("role") == "img"
        assert drawing.is_visible()
        assert drawing.locator(f"title[id='{title}']").text_content()
        assert drawing.locator(f"desc[id='{description}']").text_content()
        assert drawing.locator("rect >> visible=true").count() + drawing.locator("path >> visible=true").count()
        rows = figure.locator("tbody tr")
        assert not rows.first.is_visible()
        figure.locator("summary").click()
        assert rows.first.is_visible()
        assert rows.count() >= drawing.locator(".bar, .dot").count()


def test_models_and_measurements_are_shown(opened: Any) -> None:
    page = opened()
    assert page.locator("#models ~ .scroll tr", has_text="model/unet/ptq").first.is_visible()
    assert page.locator("#measurements ~ details td", has_text="half_even").is_visible()


def test_a_claims_fingerprint_is_beside_it(opened: Any) -> None:
    page = opened()
    row = page.locator("article.claim td", has_text="half_even")
    assert row.count() == 1 and not row.is_visible()
    page.locator("article.claim summary", has_text="Fingerprint: linear").click()
    assert row.is_visible()
    assert page.locator("article.claim code", has_text="nn.Conv2d(16, 16, 7, padding=3, groups=16)(x)").is_visible()


def test_the_filter_keeps_rows_with_every_word(opened: Any) -> None:
    page = opened()
    page.fill("#filter", "conv2d REFUTED")
    rows = page.locator("#all-claims tbody tr >> visible=true").all_inner_texts()
    assert 0 < len(rows) < 30
    assert all("conv2d" in row.lower() and "REFUTED" in row for row in rows)
    assert page.inner_text("#shown") == f"{len(rows)} of 404 claims"
    page.fill("#filter", "")
    assert page.locator("#all-claims tbody tr >> visible=true").count() == 404


def test_the_counts_at_the_top_filter_the_claims(opened: Any, in_sight: Any) -> None:
    page = opened()
    chips = page.locator(".counts a")
    assert chips.count() == 9
    for chip in chips.all():
        text = chip.inner_text()
        word = "WAIVED" if text.endswith("waived") else text.split()[1]
        chip.click()
        in_sight(page, "claims")
        rows = page.locator("#all-claims tbody tr >> visible=true")
        verdicts = rows.locator("td:nth-child(5)").all_inner_texts()
        assert page.inner_text("#shown") == f"{len(verdicts)} of 404 claims"
        assert len(verdicts) == int(text.split()[0])
        assert all(word in verdict.split() for verdict in verdicts)
        assert page.input_value("#filter") == word


def test_every_cell_of_the_heat_map_leads_to_its_claim(opened: Any, in_sight: Any) -> None:
    page = opened()
    missing = """links => links.map(a => a.getAttribute("href").slice(1)).filter(id => !document.getElementById(id))"""
    pairs = page.locator("dd", has_text="in the config").inner_text().split(", ")[-1]
    assert page.locator(".matrix td a").count() == int(pairs.split()[0])
    assert page.eval_on_selector_all("a[href^='#']", missing) == []
    for verdict in ("REFUTED", "VERIFIED"):
        link = page.locator(f".matrix td a.{verdict}").last
        link.click()
        in_sight(page, link.get_attribute("href")[1:])
        assert page.evaluate("location.hash") == link.get_attribute("href")


def test_a_print_has_what_is_folded_and_a_wide_heat_map(opened: Any) -> None:
    page = opened()
    folded = page.locator("details:not([open]) article.claim").first
    shown = "element => element.checkVisibility()"
    assert not folded.evaluate(shown)
    page.emulate_media(media="print")
    assert folded.evaluate(shown)
    assert page.locator(".matrix").evaluate("element => getComputedStyle(element).page") == "wide"
    assert page.locator(".matrix").evaluate("element => element.scrollHeight - element.clientHeight") < 2
    assert not page.locator("nav").is_visible() and not page.locator("#filter").is_visible()


def test_the_heat_map_of_ten_configs_fits_a_laptop(opened: Any, runs: Any, tmp_path: Path) -> None:
    configs = [
        f"static:in=qint8[s>=2^-{n}],w=qint8[-127..127,s>=2^-12],b=float32,out=qint8[s>=2^-12]" for n in range(10)
    ]
    claims = [runs.claim(f"{name} {n}", pattern=f"nn.ConvTranspose3d+nn.BatchNorm3d+{name}", dtype_config=config)
              for n, config in enumerate(configs) for name in ("nn.ReLU", "F.relu")]  # fmt: skip
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


GROUND = "getComputedStyle(document.body).backgroundColor"


def test_dark_mode_is_dark(opened: Any) -> None:
    light, dark = (opened(color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(GROUND) == "rgb(255, 255, 255)"
    assert dark.evaluate(GROUND) != light.evaluate(GROUND)
    assert dark.screenshot() != light.screenshot()


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(opened: Any, scheme: str) -> None:
    assert opened(color_scheme=scheme).evaluate(CONTRASTS) >= 4.5


@pytest.mark.parametrize("width", [360, 800, 1920])
def test_the_page_itself_never_scrolls_sideways(opened: Any, width: int) -> None:
    page = opened(viewport={"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_printed_it_is_white_whole_and_without_controls(opened: Any) -> None:
    page = opened(color_scheme="dark")
    controls = page.locator("nav, input, kbd, button:not(.sort)")
    titles = page.locator("#all-claims thead button")
    assert controls.locator("visible=true").count() > 20
    page.emulate_media(media="print")
    assert controls.locator("visible=true").count() == 0
    assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
    assert titles.locator("visible=true").all_inner_texts()[:2] == ["claim", "dtypes"]
    arrow = "button => getComputedStyle(button, '::after').content"
    assert {title.evaluate(arrow) for title in titles.all()} == {"none"}
    clipped = (
        """all => all.filter(e => getComputedStyle(e).overflowY !== "visible" && e.scrollHeight > e.clientHeight)"""
    )
    assert page.eval_on_selector_all("main *", f"elements => ({clipped})(elements).length") == 0


def test_what_scrolls_within_the_page_is_reached_by_keyboard(opened: Any) -> None:
    page = opened(viewport={"width": 800, "height": 600})
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    scrolled = """all => all.filter(e => !["visible", "clip"].includes(getComputedStyle(e).overflowX)
      && (e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight)).map(e => [e.tagName, e.tabIndex])"""
    found = page.eval_on_selector_all("body *", scrolled)
    assert len(found) > 2
    assert [each for each in found if each != ["NAV", -1] and each[1] != 0] == []
