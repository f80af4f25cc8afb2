"""Memory that nobody has written to: filled with a byte of choice, so that an output which depends on it shows it.

The C library does it (``M_PERTURB`` of glibc's mallopt); where there is none that can, memory is as it happens to be.
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
def memory_filled_with(byte: int) -> Iterator[None]:
    """Fill what is allocated meanwhile with the complement of ``byte``, and what is freed with the byte (1 to 255)."""
    if _mallopt is None:
        yield
        return
    _mallopt(_M_PERTURB, byte)
    try:
        yield
    finally:
        _mallopt(_M_PERTURB, 0)
