"""Evidence of a check as tables: outputs next to the expected ones, quantization parameters, and everything else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from fx_quant_conformance.reports.text import cut

OUTPUTS_SHOWN = 48
VALUE_WIDTH = 160
MOST_LISTED = 50
"""Largest number of entries of a list or mapping that are laid out."""
LONGEST_LINE = 1000
_SHOWN_ELSEWHERE = {"where", "expected", "found", "index", "qparams", "attribution", "float_ops", "worst", "shared"}

_LABELS = {
    "others": "Other cases that fail",
    "nondeterministic": "Varies by chance",
    "patterns": "Patterns in the model",
    "bound_lsb": "Bound of the whole model, in LSB",
    "decided": "Share of outputs that the bound decides, end to end",
    "decided_alone": "The same of its parts alone, on average",
    "decided_within": "The same of its parts in context",
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
    return Table(columns=columns, rows=tuple(tuple(format_value(row.get(c, "")) for c in columns) for row in rows))


def format_value(value: object) -> str:
    """Spell a value for a table cell; a long one is cut and says how long it was."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= VALUE_WIDTH:
        return text
    size = f"{len(value)} values" if isinstance(value, list) else f"{len(text)} characters"
    return f"{text[:VALUE_WIDTH]}… ({size})"


def tabulate_values(values: Mapping[str, object]) -> Table:
    """Make a table of measured values, a row for each."""
    return Table(
        columns=("property", "value"), rows=tuple((name, format_value(value)) for name, value in values.items())
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
        rows.append((format_value(index), format_value(expected), format_value(found), difference))
    return Table(columns=("index", "expected", "found", "difference"), rows=tuple(rows))


def tabulate_qparams(parameters: Mapping[str, Mapping[str, object]]) -> Table:
    """Make a table of the quantization parameters of each tensor."""
    return make_table([{"tensor": name, **values} for name, values in parameters.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """Evidence that has no table of its own, by label: short values, and texts that are folded."""

    facts: Mapping[str, str]
    folds: Mapping[str, str]


def format_decided(evidence: Mapping[str, object]) -> str:
    """Spell which shares of a model's outputs the bound decides: end to end, of its parts alone, of them in context."""
    shares = [evidence.get(key) for key in ("decided", "decided_alone", "decided_within")]
    spelled = [f"{math.floor(1000 * share) / 10:g}%" if isinstance(share, int | float) else "-" for share in shares]
    return " / ".join(spelled) if any(share is not None for share in shares) else "-"


def select_details(evidence: Mapping[str, object]) -> Details:
    """Return the evidence that has no table of its own, whatever its kind, under labels for readers."""
    facts, folds = {}, {}
    for key, value in evidence.items():
        label = _LABELS.get(key) or key[:1].upper() + key[1:].replace("_", " ")
        if key in _SHOWN_ELSEWHERE or value is None or value is False or value in ("", [], {}):
            continue
        if isinstance(value, int | float) or _is_line(value):
            facts[label] = _format_plain(value)
        elif isinstance(value, dict) and all(map(_is_plain, value.values())):
            folds[label] = _list_lines([f"{name}: {_format_plain(item)}" for name, item in value.items()])
        elif isinstance(value, list) and all(map(_is_plain, value)):
            folds[f"{label} ({len(value)})"] = _list_lines([_format_plain(item) for item in value])
        else:
            folds[label] = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)
    return Details(facts=facts, folds=folds)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and len(value) <= VALUE_WIDTH and value.isprintable()


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) or value is None


def _format_plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _list_lines(lines: Sequence[str]) -> str:
    """Return the first MOST_LISTED lines, each cut, and how many more there are."""
    more = [f"… and {len(lines) - MOST_LISTED} more, in results.jsonl"] if len(lines) > MOST_LISTED else []
    return "\n".join([*(cut(line, LONGEST_LINE) for line in lines[:MOST_LISTED]), *more])
