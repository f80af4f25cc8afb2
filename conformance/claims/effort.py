"""Effort: how much a profile tries."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a profile tries."""

    cases: int | None
    """Cases of each op, which the claims on it share; None: all cases of each claim."""
    directed: int | None
    """Directed inputs of a claim's first case; None: all."""
    further: int | None
    """Directed inputs of its other cases, which are about arguments more than about values; None: all."""
    random: int
    """Random inputs of each case."""
    every: int = 1
    """The invariance checks run on every n-th case."""
    graphs: int = 0
    """Graphs that a fuzz job draws; 0: no fuzz jobs."""

    def with_examples(self, count: int) -> Effort:
        """Return an effort with this many random inputs of each case, all directed ones, and as many graphs."""
        return replace(self, directed=None, further=None, random=count, graphs=count)


PROFILES: dict[str, Effort] = {
    "quick": Effort(cases=9, directed=3, further=3, random=0, every=3),
    "full": Effort(cases=None, directed=None, further=5, random=1, every=3),
    "stress": Effort(cases=None, directed=None, further=None, random=24, graphs=200),
}
