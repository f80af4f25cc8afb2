"""Rows of schema 1, as version 0.1.0 of the suite wrote them, as rows of schema 2."""

from __future__ import annotations

import re
from collections.abc import Callable

from reports.codec import PlainRow

OLD = 1
"""The older schema that can be read."""


def upgrade(row: PlainRow) -> PlainRow:
    """Return a row of schema 1 as one of schema 2; a row of an unknown kind as it is."""
    return _UPGRADES.get(str(row.get("kind")), dict)(row)


def _upgrade_header(row: PlainRow) -> PlainRow:
    """Replace the shard, a text such as 2/8, by its numbers."""
    row = {key: value for key, value in row.items() if key != "shard" or value}
    place, _, of = str(row.get("shard", "")).partition("/")
    shard = {"shard": {"place": int(place), "of": int(of)}} if place.isdecimal() and of.isdecimal() else {}
    return row | {"schema": 2} | shard


def _upgrade_claim(row: PlainRow) -> PlainRow:
    """Derive the dtypes from the dtype config, which has their constraints."""
    return row | {"dtypes": re.sub(r"\[[^]]*\]", "", str(row.get("dtype_config", "")))}


def _upgrade_model(row: PlainRow) -> PlainRow:
    """Move rule and script out of the evidence; rename the message to reason."""
    row = _rename(_gather_where(row), {"message": "reason"})
    evidence = dict(row.get("evidence", {}))
    moved = {key: evidence.pop(key) for key in ("rule", "script") if key in evidence}
    return row | moved | {"evidence": evidence}


_UPGRADES: dict[str, Callable[[PlainRow], PlainRow]] = {
    "header": _upgrade_header,
    "claim": _upgrade_claim,
    "check": lambda row: _rename(_gather_where(row), {"measured": "statistics"}),
    "model": _upgrade_model,
    "fact": lambda row: row | {"kind": "measurement"},
    "footer": lambda row: _rename(row, {"facts": "measurements"}),
}


def _rename(row: PlainRow, names: dict[str, str]) -> PlainRow:
    return {names.get(key, key): value for key, value in row.items()}


def _gather_where(row: PlainRow) -> PlainRow:
    """Move the text of case, input and change to the place (`Where`)."""
    evidence = row.get("evidence", {})
    if not isinstance(evidence, dict) or "case" not in evidence:
        return row
    where = {"where": {"case": evidence["case"]}}
    return row | {"evidence": where | {key: value for key, value in evidence.items() if key != "case"}}
