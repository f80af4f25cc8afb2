"""Evidence of a check as tables: outputs beside what was expected, quantization parameters, and whatever else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

OUTPUTS_SHOWN = 48
VALUE_WIDTH = 160
_OWN_PLACE = {"where", "expected", "found", "index", "qparams", "attribution", "float_ops", "worst"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns; what a row lacks is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Rows of unlike keys as one table: what a row is about first, then keys as they first occur."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = tuple(sorted(keys, key=lambda key: key not in ("node", "tensor", "subject")))
    return Table(columns=columns, rows=tuple(tuple(spelled(row.get(c, "")) for c in columns) for row in rows))


def spelled(value: object) -> str:
    """A value for a table cell; a long one is cut and says how long it was."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= VALUE_WIDTH:
        return text
    size = f"{len(value)} values" if isinstance(value, list) else f"{len(text)} characters"
    return f"{text[:VALUE_WIDTH]}… ({size})"


GRAPHS = ("float model", "reference model", "lowered model")
"""A pattern's graphs, as one becomes the other."""


def in_order(graphs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Graphs by name, as one becomes the other; unknown ones last."""
    return sorted(
        graphs.items(), key=lambda item: (GRAPHS.index(item[0]) if item[0] in GRAPHS else len(GRAPHS), item[0])
    )


def outputs(evidence: Mapping[str, Sequence[object]]) -> Table:
    """Expected beside found, with the difference where both are numbers."""
    columns = [evidence.get(key, ()) for key in ("index", "expected", "found")]
    rows = []
    for index, expected, found in zip_longest(*(column[:OUTPUTS_SHOWN] for column in columns), fillvalue=""):
        numbers = isinstance(expected, (int, float)) and isinstance(found, (int, float))
        difference = f"{float(found) - float(expected):+.6g}" if numbers else ""  # type: ignore[arg-type]
        rows.append((spelled(index), spelled(expected), spelled(found), difference))
    return Table(columns=("index", "expected", "found", "difference"), rows=tuple(rows))


def qparams(found: Mapping[str, Mapping[str, object]]) -> Table:
    """The quantization parameters of each tensor."""
    return table([{"tensor": name, **values} for name, values in found.items()])


def details(evidence: Mapping[str, object]) -> dict[str, str]:
    """The evidence that is long text, or of a kind this page does not know, by its name."""
    rest = {key: value for key, value in evidence.items() if key not in _OWN_PLACE and value}
    return {k: v if isinstance(v, str) else json.dumps(v, indent=1, ensure_ascii=False) for k, v in rest.items()}
