"""The HTML report in a real browser: silent, offline, usable without JavaScript, dark on demand."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reports.html import render_html

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium; install it or set CHROMIUM to its path")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


MODEL = {
    "kind": "model", "model": "model/unet/ptq", "verdict": "REFUTED", "waived": True, "max_lsb": 3.0, "cases": 4,
    "message": "first to diverge: up1", "seconds": 1.0, "evidence": {"case": "batch", "expected": [1.5], "found": [9]},
    "waiver": {"reason": "issue 12", "url": "https://example.org/12", "expires": None, "max_lsb": 3.0},
}  # fmt: skip
FACT = {"kind": "fact", "topic": "fingerprint", "subject": "linear", "values": {"ties": "half_even", "bits": 31}}


@pytest.fixture
def report(runs: Any) -> Path:
    path: Path = runs.directory / "report.html"
    path.write_text(render_html(runs.results([*runs.large(), MODEL, FACT])), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    """Opens the report in a page with the given options, noting what it requests and complains about."""
    contexts = []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.noted = []
        page.on("request", lambda request: page.noted.append(request.url))
        page.on("console", lambda message: page.noted.append(message.text))
        page.on("pageerror", lambda error: page.noted.append(str(error)))
        page.goto(report.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def test_one_request_and_no_complaint(opened: Any, report: Path) -> None:
    page = opened()
    page.wait_for_timeout(200)
    assert page.noted == [report.as_uri()]


def test_all_is_there_without_javascript(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator("article.claim >> visible=true").count() > 20
    assert page.locator(".matrix td a").first.is_visible()
    assert page.locator("#all-claims tbody tr >> visible=true").count() == 404
    assert page.locator("button >> visible=true").count() == 0
    assert not page.locator("#filter").is_visible()


def test_models_and_measurements_are_shown(opened: Any) -> None:
    page = opened()
    assert page.locator("#models ~ .scroll tr", has_text="model/unet/ptq").first.is_visible()
    page.click("summary:has-text('Fingerprint')")
    assert page.locator("td", has_text="half_even").is_visible()


def test_the_filter_keeps_rows_with_every_word(opened: Any) -> None:
    page = opened()
    page.fill("#filter", "conv2d REFUTED")
    rows = page.locator("#all-claims tbody tr >> visible=true").all_inner_texts()
    assert 0 < len(rows) < 30
    assert all("conv2d" in row.lower() and "REFUTED" in row for row in rows)
    assert page.inner_text("#shown") == f"{len(rows)} of 404 claims"
    page.fill("#filter", "")
    assert page.locator("#all-claims tbody tr >> visible=true").count() == 404


def test_every_cell_of_the_matrix_leads_to_its_claim(opened: Any) -> None:
    page = opened()
    missing = "links => links.filter(a => !document.getElementById(a.hash.slice(1))).map(a => a.hash)"
    assert page.locator(".matrix td a").count() == 404
    assert page.eval_on_selector_all("a[href^='#']", missing) == []
    for label in ("REFUTED", "VERIFIED"):
        link = page.locator(".matrix td a", has_text=label).last
        link.click()
        target = page.locator(f"[id='{link.get_attribute('href')[1:]}']")
        target.wait_for(state="visible")
        assert page.evaluate("location.hash") == link.get_attribute("href")
        page.wait_for_function(  # scrolled to, and not under the bar
            """hash => {
                const top = document.getElementById(hash.slice(1)).getBoundingClientRect().top;
                return document.querySelector("nav").getBoundingClientRect().height <= top && top < innerHeight;
            }""",
            arg=link.get_attribute("href"),
        )


def test_a_link_to_a_filtered_row_shows_it(opened: Any) -> None:
    page = opened()
    page.fill("#filter", "no row has these words")
    link = page.locator(".matrix td a.VERIFIED").first
    row = page.locator(f"tr[id='{link.get_attribute('href')[1:]}']")
    assert not row.is_visible()
    link.click()
    row.wait_for(state="visible")
    assert page.input_value("#filter") == ""


def test_a_link_to_folded_evidence_unfolds_it(opened: Any) -> None:
    page = opened()
    link = page.locator("#all-claims tr", has_text="waived").locator("a").first
    section = page.locator(f"article[id='{link.get_attribute('href')[1:]}']")
    assert not section.is_visible()
    link.click()
    section.wait_for(state="visible")


def test_the_copy_button_answers(opened: Any) -> None:
    page = opened()
    button = page.locator("article button").first
    button.click()
    page.locator("article button", has_text=re.compile("^(Copied|Selected)$")).wait_for()  # when the clipboard answers


def test_dark_mode_is_dark(opened: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (opened(color_scheme=scheme) for scheme in ("light", "dark"))
    assert light.evaluate(colour) == "rgb(255, 255, 255)"
    assert dark.evaluate(colour) != light.evaluate(colour)
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
    const pair = [luminance(numbers(getComputedStyle(e).color)), luminance(ground(e))];
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
