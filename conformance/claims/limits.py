"""Limits: the argument values that a backend declares to take, checked against the ops and arguments that are varied.

A limit that names no op or argument of the tables would be without effect, and a report would say all the same that
other values were not tried.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Mapping
from difflib import SequenceMatcher
from fnmatch import fnmatchcase

from fx_quant_conformance.backends.base import Capabilities, Taken
from fx_quant_conformance.conformance.claims.case import OF_CASES
from fx_quant_conformance.conformance.machine.conditions import ConditionError, read_condition
from fx_quant_conformance.conformance.ops.table import RECORDS
from fx_quant_conformance.conformance.ops.variants import Fixed, OpRecord
from fx_quant_conformance.refimpl import BackendConfig
from fx_quant_conformance.refimpl.config.patterns import leaf_name, leaves

OWN_ARGUMENTS: Mapping[str, str] = {
    "shape": "sizes of the input, all axes; of several inputs, a tuple of these; of linear layers and convolutions "
    "`LayerShape(c_in, c_out, groups, batch)`; of `.reshape` its own argument",
    "_as_tuple": "numbers are given as one tuple, not one by one",
    "_axes": "over how many axes is normalized",
    "_axis": "the axis whose size is read",
    "_bags": "number of bags",
    "_batch": "size of the batch",
    "_by_name": "the bounds, or the slope, are given by name",
    "_index": "the index, as it is written",
    "_input": "sizes of the input, all axes",
    "_int32": "indices are int32, not int64",
    "_leading": "sizes of all axes of the input but the last",
    "_network": "a layer of a known network; its arguments are held to the limits of these",
    "_number_first": "the number is the first operand",
    "_positional": "options are given by position, not by name",
    "_steps": "number of steps of the sequence",
    "_unbatched": "the input has no axis for a batch",
    "_uneven": "one end is padded more than the other",
    "bias": "for a function: there is one",
    "embedding_dim": "columns of the table",
    "hx": "states are given",
    "num_embeddings": "rows of the table",
    "offsets": "bags are cut by offsets, not one for each row",
    "other": '`"tensor"`, `"itself"` (the same tensor again), or a number',
    "output_size": 'for a transposed convolution `"largest"` or None; for `repeat_interleave` True: given',
    "per_sample_weights": "weights are given",
    "weight": "for a function: there is one",
}
"""Arguments of the tables that are not torch's, or not with these values; True or False where nothing is said."""


class LimitsError(Exception):
    """A limit that is without effect; the message says which, and what to do."""


def check_limits(limits: Mapping[str, Mapping[str, Taken]]) -> None:
    """Raise LimitsError for an op or argument that the suite does not vary, or for values that are no collection."""
    samples = {leaf_name(op): each for op, each in RECORDS.items()}
    for op, arguments in limits.items():
        if op not in samples:
            raise LimitsError(
                f"Capabilities.limits: {op!r} is no op whose arguments the suite varies; "
                f"did you mean {_find_nearest(op, samples)!r}? docs/limits.md lists all"
            )
        known = list(list_arguments(samples[op]))
        for name, taken in arguments.items():
            where = f"Capabilities.limits[{op!r}]"
            if name not in known:
                fixed = samples[op].arguments.get(name)
                reason = f" ({fixed.reason})" if isinstance(fixed, Fixed) else ""
                raise LimitsError(
                    f"{where}: {name!r} is not varied{reason}, so that a limit of it is without effect; "
                    f"did you mean {_find_nearest(name, known)!r}? of this op are varied: {', '.join(known)}"
                )
            if not callable(taken) and not isinstance(taken, (tuple, list, set, frozenset, range)):
                raise LimitsError(
                    f"{where}[{name!r}]: found {taken!r}; give a tuple of the values that are taken, "
                    "or a function that tells whether one is"
                )


def check_globs(capabilities: Capabilities, config: BackendConfig) -> None:
    """Raise LimitsError for a glob of ``requantize_of``, ``tolerance`` or ``where`` that no op has, or a bad condition.

    Either would be without effect. A name in a condition is an argument of an op that its glob fits, or of any case.
    """
    own = (leaf for entry in config.configs for leaf in leaves(entry.normal_pattern))
    names = sorted({leaf_name(op) for op in (*RECORDS, *own)})
    for field, glob in [
        (name, glob) for name in ("requantize_of", "tolerance", "where") for glob in getattr(capabilities, name)
    ]:
        if not fnmatch.filter(names, glob):
            raise LimitsError(
                f"Capabilities.{field}: {glob!r} fits no op that a pattern names; "
                f"did you mean {_find_nearest(glob, names)!r}?"
            )

    for glob, text in capabilities.where.items():
        given = (name for op in RECORDS if fnmatchcase(leaf_name(op), glob) for name in list_arguments(RECORDS[op]))
        try:
            read_condition(text).check_names({*OF_CASES, *(name.lstrip("_") for name in given)})
        except ConditionError as error:
            raise LimitsError(f"Capabilities.where[{glob!r}]: {error}") from error


def list_arguments(samples: OpRecord) -> Iterator[str]:
    """Yield the names of an op's arguments that limits may have: those that are varied, or follow from these."""
    derived = samples.derived(samples.base())
    for name, values in samples.arguments.items():
        if not isinstance(values, Fixed) or name in derived:
            yield name


def _find_nearest(text: str, names: Collection[str]) -> str:
    """Return the name that is most like a text, above all in its last part."""

    def likeness(name: str) -> tuple[float, float]:
        pairs = ((text.rpartition(".")[2], name.rpartition(".")[2]), (text, name))
        last, whole = (SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs)
        return last, whole

    return max(names, key=likeness)
