"""The drawings of a page as the tests ask about them: marks with their words, and the axes that the ticks make."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

Attributes = dict[str, str | None]


@dataclass(kw_only=True)
class Mark:
    """A point or a bar: its attributes, its words, and the link that it is in."""

    attributes: Attributes
    link: str
    words: str = ""

    @property
    def place(self) -> tuple[float, float]:
        """Where a point stands."""
        found = re.match(r"M([\d.-]+) ([\d.-]+)m", self.attributes["d"] or "")
        assert found, self.attributes
        return float(found[1]), float(found[2])

    def number(self, name: str) -> float:
        return float(self.attributes[name] or "")


@dataclass(kw_only=True)
class Drawing:
    """A drawing: texts with their attributes, points, bars, and the names of the lines' looks."""

    attributes: Attributes
    title: str = ""
    description: str = ""
    texts: list[tuple[Attributes, str]] = field(default_factory=list)
    dots: list[Mark] = field(default_factory=list)
    bars: list[Mark] = field(default_factory=list)

    def ticks(self, name: str, at: float | None = None) -> dict[str, float]:
        """Text → place of the ticks along `name` ("x" or "y"): of those below each other, or in the row at `at`."""
        other = "y" if name == "x" else "x"
        found = [(attributes, text) for attributes, text in self.texts if attributes["class"] == "tick"]
        return {text: float(a[name] or "") for a, text in found if at is None or abs(float(a[other] or "") - at) < 1}


class Drawings(HTMLParser):
    """The drawings of a page, by the names of their titles' IDs: ``strips``, ``distances``, …"""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, Drawing] = {}
        self._now: Drawing | None = None
        self._open: list[str] = []
        self._link = ""
        self._words: Mark | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "svg" and "aria-labelledby" in attributes:
            self._now = Drawing(attributes=attributes)
            self.found[str(attributes["aria-labelledby"]).removesuffix("-title")] = self._now
        if self._now is None:
            return
        self._open.append(tag)
        if tag == "a":
            self._link = attributes["href"] or ""
        elif tag in ("path", "rect"):
            self._words = Mark(attributes=attributes, link=self._link)
            (self._now.dots if tag == "path" else self._now.bars).append(self._words)
        elif tag == "text":
            self._now.texts.append((attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        if self._now is None:
            return
        assert self._open.pop() == tag
        if tag == "a":
            self._link = ""
        elif tag in ("path", "rect"):
            self._words = None
        elif tag == "svg":
            self._now = None

    def handle_data(self, data: str) -> None:
        if self._now is None or not self._open:
            return
        if self._open[-1] == "title" and self._words:
            self._words.words += data
        elif self._open[-1] in ("title", "desc"):
            name = "title" if self._open[-1] == "title" else "description"
            setattr(self._now, name, getattr(self._now, name) + data)
        elif self._open[-1] == "text":
            attributes, words = self._now.texts[-1]
            self._now.texts[-1] = attributes, words + data
