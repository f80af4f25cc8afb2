"""What two runs of one suite, seed and selection have in common."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from fx_quant_conformance.reports.codec import encode
from fx_quant_conformance.reports.results import Results
from fx_quant_conformance.reports.schema import Check, ClaimResult, Header, Measurement, ModelResult, Row

_VARYING = frozenset({"seconds", "started", "sha256", "peak_mib", "printed"})
"""Keys of values that each run measures again."""


def comparable(results: Results, *others: Results) -> list[dict[str, object]]:
    """Return the rows that are equal in all runs of one suite, seed and selection: sorted, without timings and counts.

    Of a claim with a check whose evidence says `nondeterministic`, here or in one of `others` (runs to compare with),
    only the verdict is left: its numbers, its measurements, and whether a run notices it depend on chance.
    """
    runs = (results, *others)
    varying = {check.claim for run in runs for check in run.checks if check.is_nondeterministic}
    rows: list[Row] = [results.header, *results.checks, *results.claims, *results.models, *results.measurements]
    plain = [
        encode(_forget_work(row))
        for row in rows
        if not (isinstance(row, Check | Measurement) and _get_subject(row) in varying)
    ]
    stable = [_drop_varying(row, only_verdict=row.get("claim") in varying) for row in plain]
    return sorted(stable, key=lambda row: json.dumps(row, sort_keys=True))


def _forget_work(row: Row) -> Row:
    """Return a row without what was done for it, how often, and in which run."""
    if isinstance(row, Header):
        return dataclasses.replace(row, resumed=0)
    if isinstance(row, ClaimResult | ModelResult):
        return dataclasses.replace(row, lowerings=0, runs=0)
    return row


def _get_subject(row: Check | Measurement) -> str:
    return row.claim if isinstance(row, Check) else row.subject


def _drop_varying(row: Mapping[str, object], only_verdict: bool) -> dict[str, object]:
    """Return a row, and its evidence, without the values that each run measures again."""
    if only_verdict:
        return {key: row[key] for key in ("kind", "claim", "verdict")}
    nested = {key: _drop_varying(value, False) for key, value in row.items() if isinstance(value, dict)}
    return {key: nested.get(key, value) for key, value in row.items() if key not in _VARYING}
