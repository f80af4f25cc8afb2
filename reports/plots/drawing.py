"""The parts of a drawing, in SVG's units. Text of a run is put in by the template alone, which escapes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from reports.verdicts import Verdict

WIDTH = 640
"""Width of a drawing."""
SHAPES: Mapping[Verdict, str] = {
    Verdict.CRASHED: "m-3.5-3.5h7v7h-7z",
    Verdict.TIMEOUT: "m-4-3h8l-4 7z",
    Verdict.REFUTED: "m-3.2-3.2 6.4 6.4m0-6.4-6.4 6.4",
    Verdict.FALLBACK: "m-4 3h8l-4-7z",
    Verdict.UNEXERCISED: "m-3-3h6v6h-6z",
    Verdict.UNSHOWN: "m-3.2 0a3.2 3.2 0 1 0 6.4 0 3.2 3.2 0 1 0-6.4 0z",
    Verdict.QUALITY: "m-4 0 4-4 4 4-4 4z",
    Verdict.VERIFIED: "m-3.2 0a3.2 3.2 0 1 0 6.4 0 3.2 3.2 0 1 0-6.4 0z",
}
"""The outline of a point, by verdict, from its place: colour is not all that tells verdicts apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Words that lead to a claim or model, by its ID."""

    text: str
    target: str


Cell: TypeAlias = str | Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Words at a place. ``kind``: the class of their look; ``turns``: they are read from below."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    kind: str = "tick"
    turns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stroke:
    """A straight line; ``kind``: the class of its look."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str = "rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar, from `y` down; ``label`` describes it, ``kind``: the class of its look."""

    x: float
    y: float
    width: float
    height: float
    label: str
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with the shape and colour of a verdict; it leads to a claim if it has a ``target``."""

    x: float
    y: float
    verdict: Verdict
    label: str
    target: str = ""

    @property
    def shape(self) -> str:
        """The outline, from the point's place."""
        return SHAPES[self.verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawing; ``columns`` and ``rows`` are its data table.

    ``legend``: how many claims or patterns are drawn, by verdict; ``is_wide``: it needs the width of the page.
    """

    name: str
    title: str
    description: str
    height: float
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: tuple[Text, ...]
    lines: tuple[Stroke, ...]
    bars: tuple[Bar, ...] = ()
    dots: tuple[Mark, ...] = ()
    legend: Mapping[Verdict, int] = field(default_factory=dict)
    is_wide: bool = False

    @property
    def has_links(self) -> bool:
        """Whether its points lead to claims."""
        return any(dot.target for dot in self.dots)

    @property
    def shapes(self) -> Mapping[Verdict, str]:
        """The outlines of points, for the legend."""
        return SHAPES


def shorten_count(number: int) -> str:
    """Return a number in at most six characters: ``1,234``, ``36.2k``, ``121.7M``."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= max(size, 10**4):
            return f"{number / size:.1f}".removesuffix(".0") + letter
    return f"{number:,}"
