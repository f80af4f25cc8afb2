"""Fill unwritten memory with a chosen byte, so that an output that depends on it changes.

The C library does it (``M_PERTURB`` of glibc's mallopt); with other C libraries memory stays as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_M_PERTURB = -6
_mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None


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
        if _mallopt is not None:
            _mallopt(_M_PERTURB, byte)
        yield
    finally:
        _filling = 0
