"""Rows of schema 1, as version 0.1.0 of the suite wrote them, as rows of schema 2."""

from __future__ import annotations

from collections.abc import Callable

from reports.codec import PlainRow

OLD = 1
"""The schema that is still read."""


def upgraded(row: PlainRow) -> PlainRow:
    """Return a row of schema 1 as one of schema 2; a row of an unknown kind as it is."""
    return _UPGRADES.get(str(row.get("kind")), dict)(row)


def _header(row: PlainRow) -> PlainRow:
    """The shard was a text such as 2/8."""
    row = {key: value for key, value in row.items() if key != "shard" or value}
    place, _, of = str(row.get("shard", "")).partition("/")
    shard = {"shard": {"place": int(place), "of": int(of)}} if place.isdecimal() and of.isdecimal() else {}
    return row | {"schema": 2} | shard


def _check(row: PlainRow) -> PlainRow:
    return _renamed(_with_where(row), {"measured": "statistics"})


def _model(row: PlainRow) -> PlainRow:
    """Rule and script were evidence, the reason was called message."""
    row = _renamed(_with_where(row), {"message": "reason"})
    evidence = dict(row.get("evidence", {}))
    moved = {key: evidence.pop(key) for key in ("rule", "script") if key in evidence}
    return row | moved | {"evidence": evidence}


def _fact(row: PlainRow) -> PlainRow:
    return row | {"kind": "measurement"}


def _footer(row: PlainRow) -> PlainRow:
    return _renamed(row, {"facts": "measurements"})


_UPGRADES: dict[str, Callable[[PlainRow], PlainRow]] = {
    "header": _header,
    "check": _check,
    "model": _model,
    "fact": _fact,
    "footer": _footer,
}


def _renamed(row: PlainRow, names: dict[str, str]) -> PlainRow:
    return {names.get(key, key): value for key, value in row.items()}


def _with_where(row: PlainRow) -> PlainRow:
    """The case, the input and the rest were one text."""
    evidence = row.get("evidence", {})
    if not isinstance(evidence, dict) or "case" not in evidence:
        return row
    where = {"where": {"case": evidence["case"]}}
    return row | {"evidence": where | {key: value for key, value in evidence.items() if key != "case"}}
