"""`python -m reports render results.jsonl`: writes the HTML report and prints the summary.

Exit status: 0 if the run passed, 1 if it did not, 2 if there is nothing to read or nowhere to write.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.html import render_html
from reports.results import Outcome, ResultsError, read_results
from reports.terminal import summary


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return render(options.file, options.output or options.file.with_suffix(".html"))
    except ResultsError as error:
        print(f"reports: {error}", file=sys.stderr)
        return 2


def render(source: Path, target: Path) -> int:
    """Write the report of `source` to `target`; the exit status says whether the run passed."""
    if source.resolve() == target.resolve():
        raise ResultsError(f"{target}: the report would replace the results file; choose another with -o")
    results = read_results(source)
    try:
        target.write_text(render_html(results), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written: {error.strerror}") from error
    print(summary(results, target), end="")
    return 0 if results.outcome is Outcome.PASS else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m reports", description="Reports from a results file.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("render", help="write the HTML report and print the summary")
    command.add_argument("file", type=Path, metavar="FILE", help="a results.jsonl")
    command.add_argument("-o", dest="output", type=Path, metavar="OUT.html", help="default: FILE as .html")
    return parser


if __name__ == "__main__":
    sys.exit(main())
