"""A headless browser, pages opened in it, and reports that show everything there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.html import render_html
from tests.conftest import Runs
from tests.support.reporting import main

Row = dict[str, Any]

COUNT = 75
"""Number of claims of the report."""
WAIVER = {
    "reason": "issue 12: saturates",
    "url": "https://example.org/12",
    "expires": "2027-01-31",
    "max_lsb": 18.0,
}
MODEL = {
    "kind": "model",
    "model": "model/unet/ptq",
    "verdict": "REFUTED",
    "waived": True,
    "max_lsb": 3.0,
    "cases": 4,
    "reason": "first to diverge: up1",
    "seconds": 1.0,
    "waiver": WAIVER | {"expires": None},
    "evidence": {"where": {"case": "batch"}, "expected": [1.5], "found": [9], "node": "up1"},
    "statistics": {
        "sqnr_db": 12.5,
        "layers": [
            {"node": "stem", "pattern": "nn.Conv2d", "verdict": "VERIFIED", "sqnr_db": "inf"},
            {"node": "up1", "pattern": "nn.ConvTranspose2d", "verdict": "REFUTED", "sqnr_db": 9.5},
            {"node": "up2", "pattern": "nn.ConvTranspose2d", "verdict": "CRASHED"},
        ],
    },
    "script": "import torch\n",
}
MEASUREMENTS = [
    {
        "kind": "measurement",
        "topic": "fingerprint",
        "subject": "linear",
        "values": {"ties": "half_even", "bits": 31},
        "claims": ["shown"],
    },
    {"kind": "measurement", "topic": "nonfinite", "subject": "linear", "values": {"nan": "becomes 0"}},
    {"kind": "measurement", "topic": "accuracy", "subject": "model/unet/ptq", "values": {"top1": 0.97}},
]
STATISTICS = {"distances": [90, 40, 20, 9, 3, 1, 0, 0, 1, 0, 2, 0, 1], "sqnr_db": 47.5}
HEADER = {
    "isa": "avx2",
    "limits": {"nn.Linear": {"bias": "True"}},
    "waivers": {"file": "npu.toml", "sha256": "cd" * 32},
    "detection": {"sums": {"faults": 3, "quick": 2, "full": 3}},
}


def address(page: Any) -> str:
    """The page's own address: the one that the driver keeps (`page.url`) follows a change by script later."""
    found: str = page.evaluate("location.href")
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium; install it or set CHROMIUM to its path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def _shown(runs: Runs) -> list[Row]:
    """Claims: one with all evidence, errors that are no numbers, three waived by a file, one exact, one of ties."""
    check, claim = runs.refuted("shown", op="nn.Conv2d(16, 16, 7, padding=3, groups=16)(x)")
    check["evidence"] |= {"shared": ["groups > 1"]}
    graphs = {"float model": "%x : placeholder", "reference model": "%q : quantize", "lowered model": "%l : linear"}
    known, waived = runs.refuted("known", waived=True, waiver=WAIVER)
    red = {"outcome": "fail", "verdict": "REFUTED"}
    days = {"issue 13": "2027-03-05", "issue 14": "2026-12-24"}
    return [
        check | {"statistics": STATISTICS},
        claim | {"graphs": graphs, "script": "import torch\n\nprint(torch.ones(1))\n"},
        runs.check("endless", outcome="fail", verdict="FALLBACK", message="ran in float", max_lsb="inf"),
        runs.claim("endless", verdict="FALLBACK", reason="ran in float", max_lsb="inf"),
        runs.check("undefined", **red, max_lsb="nan"),
        runs.claim("undefined", verdict="REFUTED", max_lsb="nan"),
        known | {"statistics": STATISTICS | {"sqnr_db": 12.5}},
        waived,
        *(
            row
            for issue, day in days.items()
            for row in runs.refuted(issue, waived=True, waiver=WAIVER | {"reason": issue, "expires": day})
        ),
        runs.check("exact", max_lsb=0.0, statistics=STATISTICS | {"sqnr_db": "inf"}),
        runs.claim("exact", max_lsb=0.0),
        runs.check("tied", max_lsb=0.5),
        runs.claim("tied", max_lsb=0.5),
        runs.claim("silent", verdict="UNSHOWN", execution="none", reason="execution not shown"),
    ]


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run whose claims show all that a claim can show, beside an earlier run."""
    runs = Runs(tmp_path_factory.mktemp("report"))
    shown = _shown(runs)
    others = COUNT - sum(row["kind"] == "claim" for row in shown)
    results = runs.results([*runs.large(others), *shown, MODEL, *MEASUREMENTS], **HEADER)
    before = runs.results([runs.claim("shown"), *runs.refuted("gone"), *runs.large(20)], torch="2.12.0")
    path = runs.directory / "report.html"
    path.write_text(render_html(results, before), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def board_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scoreboard of three backends."""
    runs = Runs(tmp_path_factory.mktemp("boards"))
    count = {"onednn": 120, "fbgemm": 30, "qnnpack": 90}
    files = [runs.lines(_vary(runs.large(count[name]), name), backend=name) for name in count]
    target = runs.directory / "board.html"
    assert main(["compare", *map(str, files), "-o", str(target)]) == 0
    return target


def _vary(rows: list[Row], backend: str) -> list[Row]:
    """Claims with dtypes; fbgemm has other verdicts than the others here and there, all of them waived."""
    worse = {"UNEXERCISED": "TOLERATED", "REFUTED": "CRASHED"} if backend == "fbgemm" else {}
    claims = [row for row in rows if row["kind"] == "claim"]
    for number, claim in enumerate(claims):
        claim["dtypes"] = f"in=quint8,w=qint8,out={('quint8', 'qint8', 'float32', 'float16')[number % 4]}"
        claim["verdict"] = worse.get(claim["verdict"], claim["verdict"])
        claim["waived"] = backend == "fbgemm"
    return claims


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Any]:
    """Opens an address, else the report, in a page with the given options; notes what it requests and complains of."""
    contexts = []

    def open_page(address: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.noted = []
        page.on("request", lambda request: page.noted.append(request.url))
        page.on("console", lambda message: page.noted.append(message.text))
        page.on("pageerror", lambda error: page.noted.append(str(error)))
        page.on("dialog", lambda dialog: (page.noted.append(dialog.message), dialog.dismiss()))
        page.goto(address or report.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


UNTIL = """arg => new Promise((done, fail) => {
  const end = performance.now() + 20_000;
  const drawn = () => requestAnimationFrame(() => setTimeout(() => done(performance.now())));
  const look = () => (CONDITION)(arg) ? drawn() : performance.now() > end ? fail("never") : requestAnimationFrame(look);
  look();
})"""


@pytest.fixture(scope="session")
def until() -> Callable[..., float]:
    """Waits until a function in the page gives true and a frame is drawn: the milliseconds since the page's start.

    Unlike playwright's own waiting it evaluates nothing in the page, which forbids it.
    """

    def wait(page: Any, condition: str, arg: object = None) -> float:
        milliseconds: float = page.evaluate(UNTIL.replace("CONDITION", condition), arg)
        return milliseconds

    return wait


@pytest.fixture(scope="session")
def in_sight(until: Callable[..., float]) -> Callable[[Any, str], None]:
    """Waits until the element with an ID is there, unfolded, its first corner on the screen with nothing over it."""
    condition = """id => {
      const element = document.getElementById(id), place = element?.getBoundingClientRect();
      return place && element.checkVisibility()
        && element.contains(document.elementFromPoint(place.left + 5, place.top + 5));
    }"""

    def wait(page: Any, name: str) -> None:
        until(page, condition, name)

    return wait
