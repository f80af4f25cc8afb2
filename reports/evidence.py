"""Evidence of a check as tables: outputs next to the expected ones, quantization parameters, and everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

OUTPUTS_SHOWN = 48
VALUE_WIDTH = 160
_SHOWN_ELSEWHERE = {"where", "expected", "found", "index", "qparams", "attribution", "float_ops", "worst", "shared"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns; a missing value is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def make_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """Make one table of rows with different keys: the subject of a row first, then keys as they first occur."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = tuple(sorted(keys, key=lambda key: key not in ("node", "tensor", "subject")))
    return Table(columns=columns, rows=tuple(tuple(spell_value(row.get(c, "")) for c in columns) for row in rows))


def spell_value(value: object) -> str:
    """Spell a value for a table cell; a long one is cut and says how long it was."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= VALUE_WIDTH:
        return text
    size = f"{len(value)} values" if isinstance(value, list) else f"{len(text)} characters"
    return f"{text[:VALUE_WIDTH]}… ({size})"


def tabulate_values(values: Mapping[str, object]) -> Table:
    """Make a table of measured values, a row for each."""
    return Table(
        columns=("property", "value"), rows=tuple((name, spell_value(value)) for name, value in values.items())
    )


GRAPHS = ("float model", "reference model", "lowered model")
"""Names of a pattern's graphs, in the order of the flow."""


def order_graphs(graphs: Mapping[str, str]) -> list[tuple[str, str]]:
    """Sort graphs in the order of the flow; unknown ones last."""
    return sorted(
        graphs.items(), key=lambda item: (GRAPHS.index(item[0]) if item[0] in GRAPHS else len(GRAPHS), item[0])
    )


def tabulate_outputs(evidence: Mapping[str, Sequence[object]]) -> Table:
    """Make a table of expected and found outputs, with the difference where both are numbers."""
    columns = [evidence.get(key, ()) for key in ("index", "expected", "found")]
    rows = []
    for index, expected, found in zip_longest(*(column[:OUTPUTS_SHOWN] for column in columns), fillvalue=""):
        numbers = isinstance(expected, (int, float)) and isinstance(found, (int, float))
        difference = f"{float(found) - float(expected):+.6g}" if numbers else ""  # type: ignore[arg-type]
        rows.append((spell_value(index), spell_value(expected), spell_value(found), difference))
    return Table(columns=("index", "expected", "found", "difference"), rows=tuple(rows))


def tabulate_qparams(parameters: Mapping[str, Mapping[str, object]]) -> Table:
    """Make a table of the quantization parameters of each tensor."""
    return make_table([{"tensor": name, **values} for name, values in parameters.items()])


def select_details(evidence: Mapping[str, object]) -> dict[str, str]:
    """Return the evidence that is long text, or of a kind unknown to this page, by name."""
    others = {key: value for key, value in evidence.items() if key not in _SHOWN_ELSEWHERE and value}
    return {k: v if isinstance(v, str) else json.dumps(v, indent=1, ensure_ascii=False) for k, v in others.items()}
