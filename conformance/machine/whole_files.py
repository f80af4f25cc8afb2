"""Files that other processes may read or write at the same time: at any time their name has all of one of them."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

UNFINISHED = ".unfinished-"
"""How the name of a file begins that is being written."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, so that at any time its name has the old one or the new one, whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
        try:
            file.write(data)
            file.flush()
        except OSError:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
