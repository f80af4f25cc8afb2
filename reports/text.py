"""Spelling of values for readers, in every report; text from a backend controls neither page nor terminal."""

from __future__ import annotations

import re

from fx_quant_conformance.reports.numbers import Number

_LONGEST_RULE = 60


def format_number(value: Number | None, form: str) -> str:
    """Spell a number in a form as Python's format has it; `-` if there is none."""
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def format_lsb(value: Number | None) -> str:
    """Spell a distance in LSB, short but never rounded onto a bound it exceeds by a visible amount."""
    return format_number(value, ".6g")


def format_db(value: Number | None) -> str:
    """Spell a ratio in dB; without any error it is exact."""
    return "exact" if value == "inf" else format_number(value, ".1f")


def format_duration(seconds: float) -> str:
    """Spell a time for readers: `4.2 s`, `3 min 7 s`, `1 h 5 min`."""
    minutes, remainder = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {remainder} s" if minutes else f"{seconds:.1f} s"


def shorten_commit(name: str) -> str:
    """Shorten a commit to its first characters; a mark that files differ from it stays."""
    return name[:12] + ("-dirty" if name.endswith("-dirty") else "")


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun: `1 claim`, `36,218 claims`."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def format_count(count: int) -> str:
    """Spell how many there are, with its thousands apart."""
    return f"{count:,}"


def tame(text: str) -> str:
    """Spell out each character that controls a page or terminal: control characters, and marks of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


_COMMAND = re.compile(r"^[ \t]*(?=::)|#(?=#\w*\[)", re.MULTILINE)
"""Where a line would be a command to the service that runs a job: ``::error::``, ``##[error]``, ``##vso[…]``."""


def show(text: str) -> str:
    """Return foreign text as terminals and logs may show it: tame, and no line of it a command to the CI's service."""
    return _COMMAND.sub(lambda match: f"{match[0]}\\", tame(text))


LONGEST_LINE = 2000


def join_lines(text: str) -> str:
    """Return foreign text in one line, as `show` has it, and at most LONGEST_LINE long."""
    line = show(" ".join(text[: 4 * LONGEST_LINE].split()))
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}… ({len(text)} characters)"


def cut(text: str, width: int) -> str:
    """Cut the end of `text` beyond `width`, and say how long it was."""
    return text if len(text) <= width else f"{text[:width]}… ({len(text)} characters)"


def cut_end(text: str, width: int) -> str:
    """Cut the end of `text` to fit `width`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def cut_middle(text: str, width: int) -> str:
    """Cut the middle of `text` to fit `width`: claims differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def shorten_rule(table: str) -> str:
    """Cut the dashes below a table's heads, which are as long as the longest cell of its last column."""
    head, rule, *rows = table.split("\n")
    return "\n".join([head, re.sub(r"-+$", lambda found: found[0][:_LONGEST_RULE], rule), *rows])
