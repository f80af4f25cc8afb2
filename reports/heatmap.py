"""The heat map of a run: one cell for each pair of a pattern and a dtype config that is claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fx_quant_conformance.reports.decision import VerifiedShare, count_verified, pass_by_waiver
from fx_quant_conformance.reports.page import anchor
from fx_quant_conformance.reports.results import counts_of
from fx_quant_conformance.reports.schema import ClaimResult
from fx_quant_conformance.reports.text import pluralize
from fx_quant_conformance.reports.verdicts import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCell:
    """The claims of one pair."""

    verdict: Verdict
    """The worst verdict."""
    waived: bool
    """Whether a waiver covers each claim that does not pass by itself, and there is one."""
    text: str
    """The verdicts in words."""
    anchor: str
    """The anchor of the worst claim, one that is not waived first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternRow:
    """A pattern with its cell in each column; None: not claimed, or not run."""

    pattern: str
    cells: tuple[PairCell | None, ...]
    total: VerifiedShare


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """All pairs of a run."""

    rows: tuple[PatternRow, ...]
    totals: tuple[VerifiedShare, ...]
    """One for each dtype config."""
    total: VerifiedShare


def make_heat_map(claims: Sequence[ClaimResult], configs: Sequence[str]) -> HeatMap:
    """Arrange claims by pattern, in the order in which these first occur, and dtype config."""
    by_pattern: dict[str, dict[str, list[ClaimResult]]] = {}
    for claim in claims:
        by_pattern.setdefault(claim.pattern, {}).setdefault(claim.dtype_config, []).append(claim)
    rows = tuple(
        PatternRow(
            pattern=pattern,
            cells=tuple(_make_cell(pairs[config]) if config in pairs else None for config in configs),
            total=count_verified(claim for each in pairs.values() for claim in each),
        )
        for pattern, pairs in by_pattern.items()
    )
    totals = tuple(count_verified(claim for claim in claims if claim.dtype_config == config) for config in configs)
    return HeatMap(rows=rows, totals=totals, total=count_verified(claims))


def _make_cell(claims: Sequence[ClaimResult]) -> PairCell:
    verdict = Verdict.worst(claim.verdict for claim in claims)
    waived = sum(claim.waived for claim in claims)
    words = ", ".join(f"{count} {name}" for name, count in counts_of(claim.verdict for claim in claims).items())
    return PairCell(
        verdict=verdict,
        waived=pass_by_waiver(claims),
        text=words + (f"; {pluralize(waived, 'claim')} waived" if waived else ""),
        anchor=anchor(min(claims, key=lambda claim: (claim.passes, claim.verdict.rank)).claim),
    )
