"""Files of a bundle: their bytes, the same for the same content, and what is read back of those of others."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fx_quant_conformance.conformance.machine.whole_files import write_whole
from fx_quant_conformance.reports.reading import FileFault, open_regular, read_bytes

LOST_CALLS = "lost-calls.jsonl"
"""The file, beside a chunk's bundle, of the calls of a command that did not end with status 0."""
MOST_LEVELS = 32
"""How deep a file that is handed in may lie."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
Array: TypeAlias = npt.NDArray[Any]
MOST_BYTES = 1 << 28
"""Bytes that are read of one file at most, and to which one unpacks."""


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as the bytes of an ``.npz``: a zip file of ``.npy`` members, not compressed, in order of name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, arrays[name], version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _EPOCH), member.getvalue())
    return buffer.getvalue()


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file that is no link. Raises FileFault, with its name, for anything else."""
    try:
        return read_bytes(path, MOST_BYTES, follows_links=False)
    except FileFault as fault:
        raise FileFault(f"{path.name} {fault}") from fault


def unpack_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an ``.npz``. Raises FileFault for anything else."""
    data = read_file(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if sum(member.file_size for member in archive.infolist()) > MOST_BYTES:
                raise FileFault(f"{path.name} unpacks to more than {MOST_BYTES} bytes")
            if len({*names}) < len(names):
                raise FileFault(f"{path.name} has two members of one name")
            return {name.removesuffix(".npy"): _read_member(archive.read(name)) for name in names}
    except FileFault:
        raise
    except Exception as error:  # NumPy and zipfile raise anything for bytes that are none of theirs
        text = " ".join(str(error).split())
        raise FileFault(f"{path.name} cannot be read: {type(error).__name__}: {text}") from error


def _read_member(data: bytes) -> Array:
    return np.asarray(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))


def format_json(data: Any) -> str:
    """Return data as JSON, the same text for the same data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises FileFault for anything else."""
    data = read_file(path)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        text = " ".join(str(error).split())
        raise FileFault(f"{path.name} cannot be read: {type(error).__name__}: {text}") from error


def digest_of(data: bytes) -> str:
    """Return the sha256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a regular file. Raises FileFault for anything else."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_folder(folder: Path) -> tuple[str, int]:
    """Return one sha256 over the names and the bytes of all files below a folder, and their number.

    Raises FileFault for a link, a pipe or a device below it, for a file of more than MOST_BYTES, and for what lies
    deeper than MOST_LEVELS.
    """
    lines = list[str]()
    for path in sorted(_list_below(folder, MOST_LEVELS)):
        mode, name = path.lstat(), path.relative_to(folder).as_posix()
        if not stat.S_ISREG(mode.st_mode):
            raise FileFault(f"{name} is a link, or no regular file")
        if mode.st_size > MOST_BYTES:
            raise FileFault(f"{name} has {mode.st_size} bytes; at most {MOST_BYTES} are read")
        lines.append(f"{digest_file(path)}  {name}\n")
    return digest_of("".join(lines).encode()), len(lines)


def _list_below(folder: Path, levels: int) -> Iterator[Path]:
    """Yield all below a folder that is no folder. Raises FileFault for folders that lie too deep."""
    for path in folder.iterdir():
        if not _is_folder(path):
            yield path
        elif levels:
            yield from _list_below(path, levels - 1)
        else:
            raise FileFault(f"{path} lies deeper than {MOST_LEVELS} folders")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that it has, if it is there. Raises OSError if it stays.

    Folders may lie deeper than a path can say: what a folder in it has is moved up first.
    """
    if not _is_folder(path):
        if os.path.lexists(path):
            path.unlink()
        return
    numbers = count()
    while entries := list(path.iterdir()):
        for entry in entries:
            if not _is_folder(entry):
                entry.unlink()
                continue
            for inner in list(entry.iterdir()):
                inner.rename(next(each for number in numbers if not os.path.lexists(each := path / f"{number}")))
            entry.rmdir()
    path.rmdir()


def write_once(path: Path, data: bytes) -> None:
    """Write a file whose name tells its content, unless it is there; others may write the same one at the same time."""
    if not path.exists():
        write_whole(path, data)
