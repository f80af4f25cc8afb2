"""The reports beside a scoreboard: where each run's own report is, and the URL that leads there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from reports.compare import name_runs
from reports.results import Results

_LONGEST_NAME = 80
_PLAIN = frozenset("-_.")


def find_report(file: Path, run: Results) -> Path | None:
    """Return the report that lies beside a results file, if it is of this run: it states the digest of its results.

    ``report.html`` is what a run writes, the other name what ``python -m reports render`` does.
    """
    if run.footer is None:
        return None
    digest = run.footer.sha256.encode()
    for path in (file.with_name("report.html"), file.with_suffix(".html")):
        try:
            if digest in path.read_bytes():
                return path
        except OSError:
            continue
    return None


def name_reports(board: Path, runs: Sequence[Results]) -> list[Path]:
    """Return paths for the reports of runs, next to a scoreboard: ``board.qnnpack.html``, each of them once."""
    paths: list[Path] = []
    taken: set[str] = set()
    for number, name in enumerate(name_runs(runs), start=1):
        text = _spell_file_name(name)
        text = f"{text}-{number}" if text.lower() in taken else text
        taken.add(text.lower())
        paths.append(board.with_name(f"{board.stem}.{text}.html"))
    return paths


def spell_url(page: Path, target: Path) -> str:
    """Return the relative URL that leads from a page to another, percent-encoded."""
    return quote(os.fsencode(Path(os.path.relpath(target, page.parent)).as_posix()))


def _spell_file_name(name: str) -> str:
    """Return any name as one that is valid in every file system."""
    return "".join(c if c.isascii() and (c.isalnum() or c in _PLAIN) else "_" for c in name)[:_LONGEST_NAME]
