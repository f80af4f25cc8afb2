"""A report of many claims in a browser, beside pytest-html's of as many tests: size, time, and the renderer's memory.

The claims are those of docs/results/qnnpack.jsonl.xz, as often as needed, each time with other names. The interpreter
that is given runs pytest-html, which would load itself into this one's pytest.

    python benchmarks/large_report.py [--claims 20000] [--pytest-html .venv-with-pytest-html/bin/python]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from tabulate import tabulate

from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.results import Results, read_results

RUN = Path(__file__).parents[1] / "docs" / "results" / "qnnpack.jsonl.xz"
TESTS = """
import pytest
@pytest.mark.parametrize("number", range({count}))
def test_claim(number):
    assert number % 14, "distance 18 LSB, allowed 0.5"
"""
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
OURS = """() => new Promise(done => {
  const input = document.getElementById("filter"), start = performance.now();
  input.value = "verdict:refuted conv lsb>1";
  input.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})"""
THEIRS = """() => new Promise(done => {
  const start = performance.now();
  document.querySelector("input.filter[data-test-result='passed']").click();
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})"""


def multiply(results: Results, claims: int) -> Results:
    """Return a run of so many claims: those of the given one, again and again under other names."""
    checks = results.checks_by_claim()
    names = islice(((claim, number) for number in count() for claim in results.claims), claims)
    copies = [
        (
            replace(claim, claim=f"{claim.pattern}.{number}/{claim.claim}", pattern=f"{claim.pattern}.{number}"),
            checks[claim.claim],
        )
        for claim, number in names
    ]
    return replace(
        results,
        claims=tuple(copy for copy, _ in copies),
        checks=tuple(replace(check, claim=copy.claim) for copy, each in copies for check in each),
    )


def write_peer(python: str, claims: int, folder: Path) -> Path:
    """Run as many tests with pytest-html, one in 14 failing, and return its report."""
    (folder / "test_claims.py").write_text(TESTS.format(count=claims), encoding="utf-8")
    page = folder / "peer.html"
    command = [python, "-m", "pytest", "-q", "--no-header", "--tb=short", f"--html={page}", "--self-contained-html"]
    subprocess.run([*command, "-p", "no:cacheprovider", "test_claims.py"], cwd=folder, stdout=subprocess.DEVNULL)
    return page


def find_memory() -> float:
    """Return the largest share of memory (PSS) of a renderer of Chromium that runs now, in MB."""
    return max(_read_shares(), default=0.0)


def _read_shares() -> Iterator[float]:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if b"--type=renderer" in (process / "cmdline").read_bytes():
                    found = re.search(r"^Pss:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
                    yield int(found[1]) / 1000 if found else 0.0
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended in between


def measure(page: Path, query: str, chromium: str) -> tuple[float, float, float, float]:
    """Return megabytes of the file, seconds until it is painted, of a query, and megabytes of the renderer."""
    with sync_playwright() as playwright:
        browser: Any = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1366, "height": 768})
        started = time.perf_counter()
        tab.goto(page.as_uri())
        tab.evaluate(PAINTED)
        opened = time.perf_counter() - started
        taken = tab.evaluate(query) / 1000
        memory = find_memory()
        browser.close()
    return page.stat().st_size / 1e6, opened, taken, memory


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", type=int, default=20_000)
    parser.add_argument("--pytest-html", metavar="PYTHON", help="an interpreter that has pytest-html")
    options = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = folder / "ours.html"
        ours.write_text(render_html(multiply(read_results(RUN), options.claims)), encoding="utf-8")
        rows = [("this suite", *measure(ours, OURS, chromium))]
        if options.pytest_html:
            peer = write_peer(options.pytest_html, options.claims, folder)
            rows.append(("pytest-html", *measure(peer, THEIRS, chromium)))
    headers = ("report", "MB", "seconds to open", "seconds of a query", "MB of the renderer")
    print(tabulate(rows, headers, floatfmt=".2f"))


if __name__ == "__main__":
    main()
