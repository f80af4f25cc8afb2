"""Waivers in force, a row for each finding, or for each reason where none is named, with the findings' texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from fx_quant_conformance.reports.numbers import Number, rank_number
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.schema import Header, Judged, Waiver
from fx_quant_conformance.reports.text import cut, format_lsb, pluralize

LONGEST_FINDING = 4000
"""Largest number of characters of a finding's text, in a results file and on a page."""
MOST_NAMED = 4
"""Largest number of ops that a row names."""
_AS_WRITTEN = re.compile(r"\s*(?:[|>`~]|[-*+] |\d+[.)] )|    ")
"""Begin of a line of a table, a quotation, code or a list: its paragraph keeps the ends of its lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding beside a waiver: its heading, or its name without one, and its text where it is first named."""

    title: str
    anchor: str
    """The fragment of the text, "" without one."""
    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiverRow:
    """The waivers of one finding or reason, and what they cover."""

    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    urls: tuple[str, ...]
    expires: str | None
    """The first day on which one of them ends; None: none ends."""
    days: int | None
    """From the run to that day; None: none ends."""
    bound: str
    """The largest distance that is covered."""
    verdicts: Mapping[str, int]
    """The number of claims and models that are covered, by verdict."""
    first: str
    """The ID of the first of them."""
    ops: tuple[str, ...]
    """Their patterns, or the ID of a model."""

    @property
    def covered(self) -> int:
        """Number of claims and models that are covered."""
        return sum(self.verdicts.values())

    @property
    def title(self) -> str:
        """What the deviation is, in words."""
        return "; ".join(self.reasons)

    @property
    def what(self) -> str:
        """The ops, and how many more there are."""
        more = len(self.ops) - MOST_NAMED
        return ", ".join(self.ops[:MOST_NAMED]) + (f" and {pluralize(more, 'other')}" if more > 0 else "")


def find_waiver_key(waiver: Waiver) -> Hashable:
    """Return a key that is equal for waivers of one row."""
    return tuple(waiver.findings) or waiver.reason


def collect_waivers(results: Results) -> dict[Hashable, WaiverRow]:
    """Return the rows by their keys: the first to expire first, then the one that covers most."""
    groups: dict[Hashable, list[Judged]] = {}
    for row in results.judged:
        if row.waived and row.waiver is not None:
            groups.setdefault(find_waiver_key(row.waiver), []).append(row)
    seen: set[str] = set()
    rows = {key: _make_row(group, results.header, seen) for key, group in groups.items()}
    return dict(sorted(rows.items(), key=lambda item: (item[1].expires or "9999", -item[1].covered, item[1].title)))


def _make_row(rows: Sequence[Judged], header: Header, seen: set[str]) -> WaiverRow:
    """Sum up the waivers of some rows; a finding that is ``seen`` already has its text in another row."""
    waivers = list(dict.fromkeys(row.waiver for row in rows if row.waiver is not None))
    expires = min((waiver.expires for waiver in waivers if waiver.expires), default=None)
    names = dict.fromkeys(name for waiver in waivers for name in waiver.findings)
    return WaiverRow(
        reasons=tuple(dict.fromkeys(waiver.reason for waiver in waivers)),
        findings=tuple(_read(name, header.findings, seen) for name in names),
        urls=tuple(dict.fromkeys(waiver.url for waiver in waivers if waiver.url)),
        expires=expires,
        days=_count_days(header.started, expires),
        bound=_format_bound(waivers),
        verdicts=Counter(row.verdict.value for row in rows),
        first=rows[0].id,
        ops=tuple(dict.fromkeys(getattr(row, "pattern", row.id) for row in rows)),
    )


def _format_bound(waivers: Sequence[Waiver]) -> str:
    """Return the largest bound; "-" where none is stated, and so nothing beyond one step is covered."""
    bounds: list[Number] = [waiver.max_lsb for waiver in waivers if waiver.max_lsb is not None]
    if not bounds:
        return "-"
    largest: Number = max(bounds, key=rank_number)
    return format_lsb(largest)


def _count_days(started: str, expires: str | None) -> int | None:
    """Count the days left after the day of the run; None: it does not expire, or a date is not readable."""
    try:
        return None if expires is None else (date.fromisoformat(expires) - datetime.fromisoformat(started).date()).days
    except ValueError:
        return None


def _read(name: str, texts: Mapping[str, str], seen: set[str]) -> Finding:
    """Return a finding; its text only where it is not seen yet."""
    title, _, body = cut(texts.get(name, ""), LONGEST_FINDING).strip().partition("\n")
    paragraphs = tuple(_join(each) for each in re.split(r"\n\s*\n", body.strip("\n")) if each.strip())
    anchor = f"finding-{list(texts).index(name) + 1}" if paragraphs else ""
    shown = () if name in seen else paragraphs
    seen.add(name)
    return Finding(title=title or name, anchor=anchor, paragraphs=shown)


def _join(paragraph: str) -> str:
    """Return a paragraph as one line, unless its lines mean something."""
    lines = paragraph.strip("\n").splitlines()
    return "\n".join(lines) if any(map(_AS_WRITTEN.match, lines)) else " ".join(map(str.strip, lines))
