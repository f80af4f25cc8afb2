"""Selection: which claims, models and measurements a text names, on the command line or in a waiver.

A text is an exact ID or a glob. IDs have brackets, which a glob reads as a set of characters: they may also stand for
themselves, so that the beginning of an ID and ``*`` is a glob for it.
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from fx_quant_conformance.reports.schema import Header

OWN = "model/own/"
"""How the IDs of models begin that are handed in."""


def matches_glob(name: str, glob: str) -> bool:
    """Tell whether a glob matches an ID, its brackets read as a set of characters or as themselves."""
    return fnmatchcase(name, glob) or fnmatchcase(name, glob.replace("[", "[[]"))


def find_matches(text: str, names: Collection[str]) -> list[str]:
    """Return the IDs that a text names: the one that it is, else those that it matches as a glob."""
    return [text] if text in names else [name for name in names if matches_glob(name, text)]


def select_of_run(header: Header, names: Collection[str]) -> frozenset[str]:
    """Return those of some IDs that a run with this header was to run: by its ``--claim`` and its shard."""
    texts = header.options.get("claim")
    chosen = set(names)
    if isinstance(texts, list) and texts:
        chosen = {name for text in texts for name in find_matches(str(text), names)}
    return frozenset(name for name in chosen if header.shard is None or header.shard.has(name))
