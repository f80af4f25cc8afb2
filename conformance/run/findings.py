"""Texts of findings that waivers name: sections of Markdown files, read at the start of a run for its report.

A name is ``FILE.md#ANCHOR``, the file relative to the waivers' file. The anchor is that of a heading, as GitHub makes
it, or its first words: ``#6`` is ``## 6. A heading``. Without an anchor the whole file is the text. A file that is not
there is no error, because a certificate holds the waivers alone: the report then has the name without a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fx_quant_conformance.conformance.run.waivers import MOST_NAMED, WaiverEntry, WaiverError
from fx_quant_conformance.reports.findings import LONGEST_FINDING
from fx_quant_conformance.reports.reading import FileFault, read_text
from fx_quant_conformance.reports.text import cut, tame

_LARGEST_FILE = 4_000_000
"""Largest size of a file of findings, in bytes."""
_HEADING = re.compile(r"(#{1,6})[ \t]+(.*?)[ \t#]*")
_FENCE = re.compile(r" {0,3}(```|~~~)")


@dataclass(frozen=True, slots=True)
class _Heading:
    line: int
    level: int
    title: str

    @property
    def anchor(self) -> str:
        """The anchor that GitHub gives the heading."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


def read_findings(waivers: Iterable[WaiverEntry]) -> dict[str, str]:
    """Return the texts of the findings that waivers name, by name; of a file that is not there none.

    The first line of a text is its heading. Raises WaiverError for a file that cannot be read, or has no such heading.
    """
    files: dict[Path, str] = {}
    texts: dict[str, str] = {}
    for waiver in waivers:
        for name in waiver.findings:
            path = _locate(waiver, name)
            if name in texts or not path.is_file():
                continue
            if path not in files:
                files[path] = _read_file(path, waiver)
            texts[name] = _find_section(files[path], name.partition("#")[2], f"{waiver}: the finding {name}")
    return texts


def list_files(waivers: Iterable[WaiverEntry]) -> list[Path]:
    """Return the files of the findings that waivers name, as far as they are there."""
    paths = dict.fromkeys(_locate(waiver, name) for waiver in waivers for name in waiver.findings)
    return [path for path in paths if path.is_file()]


def format_missing(waivers: Iterable[WaiverEntry], texts: Mapping[str, str]) -> str:
    """Return a note about the findings without a text; "" if each has one."""
    missing = list(dict.fromkeys(name for waiver in waivers for name in waiver.findings if name not in texts))
    if not missing:
        return ""
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return f"the report lacks the texts of findings whose files are not here: {', '.join(missing[:MOST_NAMED])}{more}"


def _locate(waiver: WaiverEntry, name: str) -> Path:
    """Return the file that a name leads to; if it is not there, the one beside the waivers, as a release has it."""
    path = waiver.file.parent / name.partition("#")[0]
    return path if path.is_file() else waiver.file.with_name(path.name)


def _read_file(path: Path, waiver: WaiverEntry) -> str:
    try:
        return read_text(path, _LARGEST_FILE)
    except FileFault as fault:
        raise WaiverError(f"{waiver}: {path} {fault}") from fault


def _find_section(text: str, anchor: str, what: str) -> str:
    """Return the section under a heading, the heading's own words first. ``what`` begins the message of an error."""
    lines = text.splitlines()
    headings = list(_list_headings(lines))
    if not anchor:
        first = headings[0] if headings and not "".join(lines[: headings[0].line]).strip() else None
        return _finish([first.title, *lines[first.line + 1 :]] if first else lines, what)
    exact = [heading for heading in headings if heading.anchor == anchor]
    matches = exact or [heading for heading in headings if heading.anchor.startswith(f"{anchor}-")]
    if len(matches) != 1:
        told = f"{len(matches)} headings begin so" if matches else "no heading begins so"
        raise WaiverError(f"{what}: {told}; give the anchor of one heading")
    own = matches[0]
    ends = (each.line for each in headings if each.line > own.line and each.level <= own.level)
    return _finish([own.title, *lines[own.line + 1 : next(ends, len(lines))]], what)


def _list_headings(lines: Iterable[str]) -> Iterator[_Heading]:
    """Yield the headings that begin with ``#``; a fenced block of code has none."""
    fence = ""
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and fence in ("", mark[1]):
            fence = "" if fence else mark[1]
        elif not fence and (match := _HEADING.fullmatch(line)):
            yield _Heading(number, len(match[1]), match[2])


def _finish(lines: list[str], what: str) -> str:
    text = tame("\n".join(line.rstrip() for line in lines).strip())
    if not text:
        raise WaiverError(f"{what}: there is no text; write what was found")
    return cut(text, LONGEST_FINDING)
