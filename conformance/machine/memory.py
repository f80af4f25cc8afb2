"""Fill unwritten memory with a chosen byte, so that an output that depends on it changes.

The C library does it (``M_PERTURB`` of glibc's mallopt); with other C libraries memory stays as it is. glibc does not
fill what comes from its cache of small blocks (tcache): these blocks are taken from it, filled here and given back.
Then the cache is full as well, so that no block of the right size goes through it to the caller as it was.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_PERTURB = -6
_CACHED = [size for size in range(24, 1033, 16) for _ in range(7)]
"""Sizes in bytes of all blocks that glibc's cache holds when it is full: 7 of each of 64 sizes."""


def _find_functions() -> tuple[Any, Any, Any] | None:
    """Return glibc's mallopt, malloc and free. None: this is another C library."""
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    mallopt, malloc, free = library.mallopt, library.malloc, library.free
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    return mallopt, malloc, free


_functions = _find_functions()
_filling = 0


def current_filling() -> int:
    """Return the byte that memory is filled with now; 0 outside of `fill_memory`."""
    return _filling


@contextmanager
def fill_memory(byte: int) -> Iterator[None]:
    """Fill newly allocated memory with the complement of ``byte`` (1 to 255), and freed memory with the byte.

    It goes on afterwards: what is freed then may be what the next run gets, without being filled anew.
    """
    global _filling
    _filling = byte
    try:
        if _functions is not None:
            _fill(byte, *_functions)
        yield
    finally:
        _filling = 0


def _fill(byte: int, mallopt: Any, malloc: Any, free: Any) -> None:
    mallopt(_M_PERTURB, byte)
    blocks = [malloc(size) for size in _CACHED]
    for block, size in zip(blocks, _CACHED, strict=True):
        ctypes.memset(block, byte ^ 0xFF, size)
    for block in blocks:
        free(block)
