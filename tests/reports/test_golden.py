"""Golden files: what each report looks like for one small run that has all there is to show.

The run is made up, so that versions, dates and machine are fixed; ``UPDATE_GOLDEN=1`` writes the files anew, for a
reader to look through.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fx_quant_conformance.reports.diff import compare_runs, diff_text
from fx_quant_conformance.reports.html import render_html
from fx_quant_conformance.reports.markdown import markdown
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.terminal import summary

GOLDEN = Path(__file__).parent / "golden"
FILES: dict[str, Callable[[Results, Results], str]] = {
    "report.html": render_html,
    "summary.md": markdown,
    "summary.txt": lambda results, _: summary(results, "report.html", width=120),
    "diff.txt": lambda results, old: diff_text(compare_runs(old, results), 120),
}


@pytest.mark.parametrize("name", FILES)
def test_a_report_is_the_golden_one(made: Any, name: str) -> None:
    rows = made.everything()
    results = made.results(rows, problems=["a waiver matches nothing"], notes=["nothing compared"], peak_mib=311.6)
    before = [row | ({"seed": 6, "isa": "avx512"} if row["kind"] == "header" else {}) for row in rows]
    better = {"verdict": "VERIFIED", "max_lsb": 0.5}
    old = made.results(
        [row | (better if "nn.Linear" in row.get("claim", "") else {}) for row in before if row["kind"] != "model"]
    )
    text = FILES[name](results, old)
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{name} differs: look at it, then UPDATE_GOLDEN=1 pytest {__file__}"
    )
