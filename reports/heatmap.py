"""The heat map of a run: one cell for each pair of a pattern and a dtype config that is claimed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from reports.page import anchor
from reports.results import counts_of
from reports.schema import ClaimResult
from reports.text import pluralize
from reports.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Of so many claims, so many are VERIFIED."""

    verified: int
    claims: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCell:
    """The claims of one pair.

    ``verdict``: the worst. ``waived``: whether a waiver covers each claim that does not pass by itself, and there is
    one. ``text``: the verdicts in words. ``anchor``: of the worst claim, one that is not waived first.
    """

    verdict: Verdict
    waived: bool
    text: str
    anchor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRow:
    """A pattern with its cell in each column; None: not claimed, or not run."""

    pattern: str
    cells: tuple[PairCell | None, ...]
    total: Total


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """All pairs of a run; ``columns``: dtype configs by their D numbers, ``totals``: one for each column."""

    columns: Mapping[str, str]
    rows: tuple[PatternRow, ...]
    totals: tuple[Total, ...]
    total: Total


def make_heat_map(claims: Sequence[ClaimResult], columns: Mapping[str, str]) -> HeatMap:
    """Arrange claims by pattern and dtype config, both in the order in which they first occur."""
    by_pattern: dict[str, dict[str, list[ClaimResult]]] = {}
    for claim in claims:
        by_pattern.setdefault(claim.pattern, {}).setdefault(claim.dtype_config, []).append(claim)
    by_config: dict[str, list[ClaimResult]] = {config: [] for config in columns.values()}
    for claim in claims:
        by_config[claim.dtype_config].append(claim)
    rows = tuple(
        PatternRow(
            pattern=pattern,
            cells=tuple(_make_cell(pairs[config]) if config in pairs else None for config in columns.values()),
            total=_add_up(claim for each in pairs.values() for claim in each),
        )
        for pattern, pairs in by_pattern.items()
    )
    return HeatMap(
        columns=columns, rows=rows, totals=tuple(map(_add_up, by_config.values())), total=_add_up(claims)
    )  # fmt: skip


def _make_cell(claims: Sequence[ClaimResult]) -> PairCell:
    verdict = Verdict.worst(claim.verdict for claim in claims)
    waived = sum(claim.waived for claim in claims)
    words = ", ".join(f"{count} {name}" for name, count in counts_of(claim.verdict for claim in claims).items())
    return PairCell(
        verdict=verdict,
        waived=waived > 0 and all(claim.passes for claim in claims),
        text=words + (f"; {pluralize(waived, 'claim')} waived" if waived else ""),
        anchor=anchor(min(claims, key=lambda claim: (claim.passes, claim.verdict.rank)).claim),
    )


def _add_up(claims: Iterable[ClaimResult]) -> Total:
    verdicts = [claim.verdict for claim in claims]
    return Total(verified=verdicts.count(Verdict.VERIFIED), claims=len(verdicts))
