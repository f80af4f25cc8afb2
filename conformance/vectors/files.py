"""Files of a bundle: their bytes, the same for the same content, and what is read back of those of others."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance.vectors.graph_data import Array

_EPOCH = (1980, 1, 1, 0, 0, 0)
MOST_BYTES = 1 << 30
"""Bytes that are read of one file at most."""


class FileFault(Exception):
    """A file is missing, or not what it should be; one line."""


def pack_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as the bytes of an ``.npz``: a zip file of ``.npy`` members, not compressed, in order of name."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            member = io.BytesIO()
            np.lib.format.write_array(member, arrays[name], version=(1, 0), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _EPOCH), member.getvalue())
    return buffer.getvalue()


def unpack_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an ``.npz``. Raises FileFault for anything else."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FileFault(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
        with np.load(path, allow_pickle=False) as held:
            if not isinstance(held, np.lib.npyio.NpzFile):
                raise FileFault(f"{path.name} is no .npz: a zip file of .npy members")
            return {name: held[name] for name in held.files}
    except FileFault:
        raise
    except FileNotFoundError as error:
        raise FileFault(f"{path.name} is missing") from error
    except Exception as error:  # NumPy and zipfile raise anything for bytes that are none of theirs
        raise FileFault(
            f"{path.name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def spell_json(data: Any) -> str:
    """Return data as JSON, the same text for the same data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises FileFault for anything else."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise FileFault(f"{path.name} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileFault(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FileFault(
            f"{path.name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def digest_of(data: bytes) -> str:
    """Return the sha256 of bytes, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a file. Raises OSError if it cannot be read."""
    return digest_of(path.read_bytes())


def digest_folder(folder: Path) -> tuple[str, int]:
    """Return one sha256 over the names and the bytes of all files below a folder, and their number."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{digest_file(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    return digest_of("".join(lines).encode()), len(paths)


def write_once(path: Path, data: bytes) -> None:
    """Write a file whose name tells its content, unless it is there; others may write the same one at the same time."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
