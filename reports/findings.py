"""Findings as a page shows them: the text of each once, with the first waiver that names it; the others link to it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from reports.text import cut

LONGEST_FINDING = 4000
"""Largest number of characters of a finding's text, in a results file and on a page."""
MOST_TEXT = 150_000
"""Largest number of characters of all findings on a page; beyond it they have no text."""
_AS_WRITTEN = re.compile(r"\s*(?:[|>`~]|[-*+] |\d+[.)] )|    ")
"""Begin of a line of a table, a quotation, code or a list: its paragraph keeps the ends of its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding beside a waiver.

    ``title`` is the heading, or the name where there is no text. ``anchor`` is the fragment of the text, "" without
    one. ``paragraphs`` are those of the text, at the first waiver only.
    """

    title: str
    anchor: str
    paragraphs: tuple[str, ...] = ()


def lay_out_findings(names: Iterable[Sequence[str]], texts: Mapping[str, str]) -> list[tuple[Finding, ...]]:
    """Return the findings of each waiver in turn. ``names``: what each waiver names. ``texts``: by name."""
    shown: dict[str, Finding] = {}
    room = MOST_TEXT
    rows = []
    for each in names:
        row = []
        for name in dict.fromkeys(each):
            first = name not in shown
            if first:
                text = cut(texts.get(name, ""), LONGEST_FINDING)
                shown[name] = _read(name, text if len(text) <= room else "", len(shown) + 1)
                room -= len(text)
            row.append(shown[name] if first else replace(shown[name], paragraphs=()))
        rows.append(tuple(row))
    return rows


def _read(name: str, text: str, number: int) -> Finding:
    title, _, body = text.strip().partition("\n")
    paragraphs = tuple(_join(each) for each in re.split(r"\n\s*\n", body.strip("\n")) if each.strip())
    return Finding(title=title or name, anchor=f"finding-{number}" if paragraphs else "", paragraphs=paragraphs)


def _join(paragraph: str) -> str:
    """Return a paragraph as one line, unless its lines mean something."""
    lines = paragraph.strip("\n").splitlines()
    return "\n".join(lines) if any(map(_AS_WRITTEN.match, lines)) else " ".join(map(str.strip, lines))
