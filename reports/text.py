"""How values are spelled for readers, in every report; what a backend says steers neither page nor terminal."""

from __future__ import annotations

from reports.schema import Number


def lsb(value: Number | None) -> str:
    """A distance in LSB, short but never rounded onto a bound it exceeds by a visible amount."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def duration(seconds: float) -> str:
    """A time as people say it: `4.2 s`, `3 min 7 s`, `1 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def commit(name: str) -> str:
    """A commit by its first characters, and that files differ from it if they do."""
    return name[:12] + ("-dirty" if name.endswith("-dirty") else "")


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 claim`, `2 claims`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def tame(text: str) -> str:
    """`text` with a mark in place of each character that steers what shows it: controls, and marks of direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


LONGEST_LINE = 2000


def one_line(text: str) -> str:
    """`text` in one line, tame, and no longer than a line can be."""
    line = tame(" ".join(text[: 4 * LONGEST_LINE].split()))
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}… ({len(text)} characters)"


def cut(text: str, width: int) -> str:
    """`text` with its end left out where it is longer than `width`, and how long it was."""
    return text if len(text) <= width else f"{text[:width]}… ({len(text)} characters)"


def end(text: str, width: int) -> str:
    """`text` fitted to `width`, its end left out."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def middle(text: str, width: int) -> str:
    """`text` fitted to `width`, its middle left out: claims differ at their ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
