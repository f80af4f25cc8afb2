"""Answers of a backend's process, kept as files: one file for each piece of work, which JSON and bytes make up.

A file is a line with the sha256 of what follows. That is compressed: a line of JSON with the heads of the answers, and
their pieces, one after the other. It is written under another name and then renamed: it is whole, or it is not there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.machine.whole_files import write_whole
from conformance.remote.wire import Frame

_REFUSING = frozenset({"raised", "failed", "not_callable"})
"""What the head of an answer has if the backend's code did not do what was asked for."""
_NOT_KEPT = frozenset({"peak_mib"})
"""What the head of an answer says of the process that gave it."""
_SOURCES = "sources.json"
_QUICKLY = 1
"""Level of the compression: outputs lie on few values, and shrink to about a sixth."""


@dataclass(slots=True, kw_only=True)
class Book:
    """The answers of one piece of work, by the keys of their requests. ``path``: where they are kept.

    ``start``: the key that comes before the first request of a model. ``begun``: how often each first request was made.
    """

    path: Path
    start: str
    answers: dict[str, Frame] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    is_changed: bool = False

    def follow(self, key: str, request: Frame) -> str:
        """Return the key of a request that comes after the one of ``key``, to the same model.

        A model's answer may depend on all that it was asked before, and equal models of one piece of work are lowered
        again to see whether they answer alike: so a key tells all earlier requests, and the place among equal models.
        """
        digest = hashlib.sha256(f"{key}\0{json.dumps(request.head, sort_keys=True)}".encode())
        for piece in request.pieces:
            digest.update(f"\0{len(piece)}\0".encode())
            digest.update(piece)
        if key != self.start:
            return digest.hexdigest()
        first = digest.hexdigest()
        self.begun[first] += 1
        return f"{first}.{self.begun[first]}"

    def keep(self, key: str, answer: Frame) -> None:
        """Keep an answer, unless the backend's code raised or gave nothing that can be called."""
        if _REFUSING.isdisjoint(answer.head):
            self.answers[key] = Frame(head=_head_of(answer), pieces=[bytes(piece) for piece in answer.pieces])
            self.is_changed = True

    def write(self) -> None:
        """Write the file, if there is something new. Raises OSError if it cannot be written."""
        if self.is_changed:
            write_whole(self.path, pack_answers(self.answers))
            self.is_changed = False


def is_same(answer: Frame, kept: Frame) -> bool:
    """Tell whether an answer is the same as one that is kept, bit for bit."""
    return _head_of(answer) == _head_of(kept) and list(map(bytes, answer.pieces)) == list(map(bytes, kept.pieces))


def _head_of(answer: Frame) -> dict[str, Any]:
    return {name: value for name, value in answer.head.items() if name not in _NOT_KEPT}


def open_book(folder: Path, work: str) -> Book:
    """Return the book of a piece of work, in the folder whose name tells what all its answers depend on."""
    name = hashlib.sha256(work.encode(errors="surrogatepass")).hexdigest()
    path = folder / f"{name}.answers"
    return Book(path=path, start=f"{folder.name}.{name}", answers=read_answers(path))


def write_sources(folder: Path, places: Sequence[str]) -> None:
    """Note in the folder of answers which files and folders its name tells. Raises OSError if it cannot be written."""
    write_whole(folder / _SOURCES, json.dumps(list(places)).encode())


def read_sources(folder: Path) -> list[str]:
    """Return the files and folders that the name of a folder of answers tells; none if it does not say."""
    try:
        return [str(place) for place in json.loads((folder / _SOURCES).read_bytes())]
    except (OSError, ValueError):
        return []


def pack_answers(answers: Mapping[str, Frame]) -> bytes:
    """Return answers as the bytes of a file."""
    rows = [
        {"key": key, "head": answer.head, "sizes": [len(piece) for piece in answer.pieces]}
        for key, answer in answers.items()
    ]
    pieces = (piece for answer in answers.values() for piece in answer.pieces)
    content = zlib.compress(b"".join([json.dumps(rows).encode(), b"\n", *pieces]), _QUICKLY)
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read_answers(path: Path) -> dict[str, Frame]:
    """Return the answers of a file; none if it is not there, damaged, or cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    digest, _, content = data.partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        return {}
    text, _, rest = zlib.decompress(content).partition(b"\n")
    rows = json.loads(text)
    ends = [0, *itertools.accumulate(size for row in rows for size in row["sizes"])]
    pieces = iter([rest[start:end] for start, end in itertools.pairwise(ends)])
    return {
        row["key"]: Frame(head=row["head"], pieces=list(itertools.islice(pieces, len(row["sizes"])))) for row in rows
    }
