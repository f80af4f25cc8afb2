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


@contextmanager
def fill_memory(byte: int) -> Iterator[None]:
    """Fill newly allocated memory with the complement of ``byte`` (1 to 255), and freed memory with the byte."""
    if _mallopt is None:
        yield
        return
    _mallopt(_M_PERTURB, byte)
    try:
        yield
    finally:
        _mallopt(_M_PERTURB, 0)
