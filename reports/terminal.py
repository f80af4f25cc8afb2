"""The summary that a run prints when it ends: counts, worst claims, unexercised claims; the verdict is last."""

from __future__ import annotations

import os
import shutil
import sys
from itertools import groupby

from tabulate import MIN_PADDING, tabulate

from fx_quant_conformance.reports.digest import Listing, digest
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.text import cut_end, cut_middle, join_lines, shorten_rule

_RIGHT = ("LSB", "dB", "claims", "covers")
"""Columns of numbers."""
UNCUT = 10_000
"""Columns where the output is no terminal: a log is searched, and its lines are cut nowhere."""


def summary(results: Results, html_path: str | os.PathLike[str], *, width: int | None = None) -> str:
    """Return the summary that a run ends with, but for its last line, which is `verdict_line`.

    ``width``: columns that it is fitted to (None: the terminal's; nothing is cut where there is none).
    """
    width = width or (shutil.get_terminal_size().columns if sys.stdout.isatty() else UNCUT)
    blocks = []
    for is_text, group in groupby(digest(results), key=lambda each: isinstance(each, str)):
        said = [join_lines(each) if isinstance(each, str) else _draw(each, width) for each in group]
        blocks.append(("\n" if is_text else "\n\n").join(said))
    failures = results.failures()
    if failures and failures[0].repro:
        blocks.append(f"reproduce the first: {join_lines(failures[0].repro)}")
    return "\n\n".join([*blocks, f"report: {os.fspath(html_path)}"]) + "\n"


def _draw(listing: Listing, width: int) -> str:
    """Return a table; its last column has what is left of the width, and of many columns the last two on two lines."""
    more = f" ({listing.more} more in the report)" if listing.more else ""
    rows = [tuple(map(join_lines, row)) for row in listing.rows]
    columns = listing.columns
    stacked = len(columns) > 3
    if stacked:
        columns = (*columns[:-2], ", and ".join(columns[-2:]))
    *narrow, last = (name + " " * MIN_PADDING for name in columns)
    first = len(narrow)
    used = sum(max(map(len, column)) + 2 for column in zip(narrow, *(row[:first] for row in rows), strict=True))
    room = max(width - used, len(last))
    fitted = [
        (
            *row[:first],
            f"{cut_middle(row[first], room)}\n{cut_end(row[-1], room)}" if stacked else cut_end(row[first], room),
        )
        for row in rows
    ]
    align = ["right" if name in _RIGHT else "left" for name in columns]
    table = tabulate(fitted, headers=columns, tablefmt="simple", disable_numparse=True, colalign=align)
    return f"{listing.title}{more}:\n{shorten_rule(table)}"
