"""Axes: values to places, linearly. An axis of distances is broken where small and large ones need other scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reports.numbers import Number

LIMIT = 0.5
"""The limit of correct rounding, in LSB. (NUM-03)"""
_FINE, _COARSE = 2.0, 256.0
"""Where the first and the second part of an axis of distances end, in LSB; an integer of 8 bits errs by at most 255."""
_PARTS = ((0.0, _FINE, (0.0, 0.5, 1.0, 1.5, 2.0)), (_FINE, _COARSE, (64.0, 128.0, 192.0, 256.0)))
"""Ends and ticks of the parts of an axis of distances."""
_FIRST, _SECOND, _LAST, _GAP = 0.6, 0.3, 0.1, 12.0
"""How large these parts are, and what is beyond them, if all are there; the gaps in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of an axis with one linear scale: from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Return where a value stands."""
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of distances in LSB. ``beyond``: the place of all that is above the last panel, or is no number."""

    panels: tuple[Panel, ...]
    beyond: float | None = None

    def place(self, value: Number) -> float:
        """Return where a distance stands."""
        if not isinstance(value, str):
            for panel in self.panels:
                if value <= panel.high:
                    return panel.place(value)
        assert self.beyond is not None, value
        return self.beyond

    @property
    def ticks(self) -> Iterator[tuple[float, str]]:
        """Place and text of each tick."""
        for panel in self.panels:
            yield from ((panel.place(value), f"{value:g}") for value in panel.ticks)
        if self.beyond is not None:
            yield self.beyond, f"> {_COARSE:g}"

    def describe(self) -> str:
        """Say how the axis is made, for the description of a plot."""
        parts = [f"linear to {_FINE:g} LSB"]
        parts += [f"after a break linear to {_COARSE:g}"] if len(self.panels) > 1 else []
        parts += ["then one place for what is above, infinite or undefined"] if self.beyond is not None else []
        return ", ".join(parts)


def make_distance_axis(values: Iterable[Number], start: float, end: float) -> Axis:
    """Make an axis for distances, with only the parts that these need."""
    known = list(values)
    shares = [_FIRST]
    if any(not isinstance(value, str) and _FINE < value <= _COARSE for value in known):
        shares.append(_SECOND)
    if has_beyond := any(isinstance(value, str) or value > _COARSE for value in known):
        shares.append(_LAST)
    gap = math.copysign(_GAP, end - start)
    scale, at = (end - start - gap * (len(shares) - 1)) / sum(shares), start
    ends = []
    for share in shares:
        ends.append((at, at + scale * share))
        at += scale * share + gap
    beyond = sum(ends.pop()) / 2 if has_beyond else None
    parts = zip(_PARTS, ends, strict=False)
    panels = (Panel(low=low, high=high, start=at, end=to, ticks=ticks) for (low, high, ticks), (at, to) in parts)
    return Axis(panels=tuple(panels), beyond=beyond)


def choose_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Return round numbers from `low` to `high`, at most `most` and one."""
    step = choose_step((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def choose_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
