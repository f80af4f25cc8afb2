"""The report as Markdown, for the summary of a CI job: verdict, totals, the worst claims; at most 1 MiB.

Every text is escaped character by character, so that nothing in it is markup, a link, a cell's end or HTML.
"""

from __future__ import annotations

import os
import string
from pathlib import Path

from fx_quant_conformance.reports.digest import Listing, digest, verdict_line
from fx_quant_conformance.reports.reading import FileFault, open_to_append
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.text import join_lines

LONGEST = 300
"""Largest number of characters of a text, before it is escaped."""
VARIABLE = "GITHUB_STEP_SUMMARY"
_ESCAPED = str.maketrans({c: f"&#{ord(c)};" for c in string.punctuation if c not in ".,-+/ ="})


def markdown(results: Results, baseline: Results | None = None) -> str:
    """Return the report of a run as Markdown, at most 1 MiB.

    `baseline`: an earlier run, whose differences it shows.
    """
    header = results.header
    title = f"## {results.outcome}: {_escape(header.backend)} against {_escape(header.config_name)}"
    said = (_escape(each) if isinstance(each, str) else _draw(each) for each in digest(results, baseline))
    return "\n\n".join([title, f"**{_escape(verdict_line(results))}**", *said]) + "\n"


def write_job_summary(results: Results, baseline: Results | None = None) -> str:
    """Append the Markdown to the file that $GITHUB_STEP_SUMMARY names, if it is set; return a line about it."""
    path = os.environ.get(VARIABLE)
    if not path:
        return ""
    try:
        with open_to_append(Path(path)) as file:
            file.write(markdown(results, baseline).encode(errors="backslashreplace"))
    except FileFault as fault:
        return join_lines(f"job summary: {path} {fault}") + "\n"
    except OSError as error:
        return join_lines(f"job summary: {path} cannot be written: {error.strerror}") + "\n"
    return join_lines(f"job summary: {path}") + "\n"


def _draw(listing: Listing) -> str:
    columns = [f"| {' | '.join(listing.columns)} |", f"|{' --- |' * len(listing.columns)}"]
    rows = [f"| {' | '.join(map(_escape, row))} |" for row in listing.rows]
    more = ["", f"{listing.more} more are in the report."] if listing.more else []
    return "\n".join([f"### {_escape(listing.title)}", "", *columns, *rows, *more])


def _escape(text: str) -> str:
    """Return a text in one line, cut, with everything escaped that Markdown or HTML could interpret."""
    line = join_lines(text[: 4 * LONGEST])
    shown = line if len(line) <= LONGEST else f"{line[:LONGEST]}… ({len(text)} characters)"
    return shown.translate(_ESCAPED)
