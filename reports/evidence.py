"""Evidence of a check as tables: outputs next to the expected ones, quantization parameters, and everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

OUTPUTS_SHOWN = 48
VALUE_WIDTH = 160
MOST_LISTED = 50
"""Largest number of entries of a list or mapping that are laid out."""
_SHOWN_ELSEWHERE = {"where", "expected", "found", "index", "qparams", "attribution", "float_ops", "worst", "shared"}

_LABELS = {
    "others": "Other cases that fail",
    "differing": "Comparisons that differ",
    "nondeterministic": "Varies by chance",
    "patterns": "Patterns in the model",
    "bound_lsb": "Bound of the whole model, in LSB",
    "node_lsb": "Distance at the node, in LSB",
    "alone": "Patterns that fail alone",
    "otherwise": "Verdict but for the execution",
    "printed": "Last output",
}
"""What evidence is called on a page, if not by its own name."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Evidence that is folded under its label: ``facts`` (a value by label), ``items`` of a list, or else a ``text``.

    ``more``: number of facts or items that are left out.
    """

    label: str
    facts: Mapping[str, str] = field(default_factory=dict)
    items: tuple[str, ...] = ()
    text: str = ""
    more: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Evidence that has no table of its own: short values by label, and what is folded."""

    facts: Mapping[str, str]
    folds: tuple[Fold, ...]


def select_details(evidence: Mapping[str, object]) -> Details:
    """Return the evidence that has no table of its own, whatever its kind, under labels for readers."""
    others = {key: value for key, value in evidence.items() if key not in _SHOWN_ELSEWHERE and _says_something(value)}
    short = {key: _spell_fact(value) for key, value in others.items() if _is_fact(value)}
    folds = tuple(_fold(_label(key), value) for key, value in others.items() if key not in short)
    return Details(facts={_label(key): text for key, text in short.items()}, folds=folds)


def _says_something(value: object) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _label(key: str) -> str:
    return _LABELS.get(key) or key[:1].upper() + key[1:].replace("_", " ")


def _is_fact(value: object) -> bool:
    """Tell whether a value is a number, a truth value or a short line of text."""
    if isinstance(value, str):
        return len(value) <= VALUE_WIDTH and value.isprintable()
    return isinstance(value, int | float) or value is None


def _spell_fact(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _fold(label: str, value: object) -> Fold:
    """Lay out a longer value: plain entries one by one, all else as text."""
    if isinstance(value, dict) and all(_is_line(each) for each in value.values()):
        facts = {str(key): _spell_fact(each) for key, each in list(value.items())[:MOST_LISTED]}
        return Fold(label=label, facts=facts, more=len(value) - len(facts))
    if isinstance(value, list) and all(_is_line(each) for each in value):
        items = tuple(_spell_fact(each) for each in value[:MOST_LISTED])
        return Fold(label=f"{label} ({len(value)})", items=items, more=len(value) - len(items))
    return Fold(label=label, text=value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False))


def _is_line(value: object) -> bool:
    return isinstance(value, str | int | float) or value is None
