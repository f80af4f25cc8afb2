"""Files that users, vendors and devices name: regular ones are read, up to a size; nothing else is waited for.

Of a pipe nothing may ever come, and ``/dev/zero`` has no end.
"""

from __future__ import annotations

import os
import stat
from lzma import LZMAFile
from pathlib import Path
from typing import BinaryIO, cast

MOST_BYTES = 1 << 30
"""Bytes that are read of one results file at most, and to which one unpacks."""
MOST_TEXT = 1 << 24
"""Bytes that are read of a file that people write."""
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


class FileFault(Exception):
    """A file cannot be used; the message is one line that follows its name: ``is no regular file``."""


def open_regular(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Open a regular file to read its bytes. Raises FileFault for anything else."""
    return _open(path, os.O_RDONLY, "rb", follows_links)


def open_to_append(path: Path, *, follows_links: bool = True) -> BinaryIO:
    """Open a regular file to add bytes at its end; make it if it is not there. Raises FileFault for anything else."""
    return _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab", follows_links)


def _open(path: Path, flags: int, mode: str, follows_links: bool) -> BinaryIO:
    try:
        number = os.open(path, flags | _NO_WAITING | _BINARY | (0 if follows_links else _NO_LINKS), 0o666)
    except OSError as error:
        if not follows_links and path.is_symlink():
            raise FileFault("is a symbolic link") from error
        raise FileFault(f"cannot be {'read' if mode == 'rb' else 'written'}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise FileFault("is no regular file")
    return cast("BinaryIO", open(number, mode))


def read_bytes(path: Path, most: int = MOST_BYTES, *, follows_links: bool = True) -> bytes:
    """Return the bytes of a regular file. Raises FileFault for anything else, or a larger one."""
    with open_regular(path, follows_links=follows_links) as file:
        try:
            return read_most(file, most)
        except OSError as error:
            raise FileFault(f"cannot be read: {error.strerror}") from error


def read_most(file: BinaryIO | LZMAFile, most: int = MOST_BYTES) -> bytes:
    """Return what is left of a file. Raises FileFault for more than ``most`` bytes."""
    pieces, size = list[bytes](), 0
    while piece := file.read(min(1 << 20, most + 1 - size)):  # Python reserves as many bytes as are asked for
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise FileFault(f"has more than {most} bytes")
    return b"".join(pieces)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Return the text of a regular file. Raises FileFault for anything else, a larger one, or no UTF-8."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise FileFault(f"is not UTF-8: {error}") from error
