"""The dtypes of quantized values: torch's, and where it has them no more, names of the same meaning and spelling."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch


class QuantizedDType:
    """A dtype of integers with a scale and a zero point that torch had.

    It is spelled as torch spelled it, so that claims, files and digests of both compare.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    is_floating_point = False
    is_complex = False
    is_signed = True

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> Any:
        return find_dtype, (self.name,)

    def __copy__(self) -> QuantizedDType:
        return self

    def __deepcopy__(self, memo: object) -> QuantizedDType:
        return self


DTYPES = (torch.dtype, QuantizedDType)
"""The classes of dtypes."""
_NAMES = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4")
QUANTIZED_DTYPES: dict[str, Any] = {name: getattr(torch, name, None) or QuantizedDType(name) for name in _NAMES}
"""The dtypes by name."""

RANGES: dict[Any, tuple[int, int]] = {
    **dict.fromkeys((QUANTIZED_DTYPES["quint8"], torch.uint8), (0, 255)),
    **dict.fromkeys((QUANTIZED_DTYPES["qint8"], torch.int8), (-128, 127)),
    **dict.fromkeys((QUANTIZED_DTYPES["qint32"], torch.int32), (-(2**31), 2**31 - 1)),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.uint16: (0, 2**16 - 1),
    QUANTIZED_DTYPES["quint4x2"]: (0, 15),
}
"""The smallest and the largest integer of each dtype whose values are held as integers."""
PLAIN_DTYPE: dict[Any, torch.dtype] = {
    QUANTIZED_DTYPES["quint8"]: torch.uint8,
    QUANTIZED_DTYPES["qint8"]: torch.int8,
    QUANTIZED_DTYPES["qint32"]: torch.int32,
    **{plain: plain for plain in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32)},
}
"""The plain integer dtype that holds a quantized dtype's integers in the decomposed form. (CVT-07)"""


def find_dtype(name: str) -> Any:
    """Return the dtype of a name, such as ``int8`` or ``quint8``. Raises TypeError for what is none."""
    found = QUANTIZED_DTYPES.get(name) or getattr(torch, name, None)
    if not is_dtype(found):
        raise TypeError(f"expected the name of a dtype, such as 'int8', found {name!r}")
    return found


def count_bits(dtype: Any) -> int:
    """Return the bits that a number of an integer dtype takes in memory, by itself."""
    if isinstance(dtype, QuantizedDType):
        return 32 if dtype.name == "qint32" else 8
    return torch.iinfo(dtype).bits


def is_dtype(value: object) -> TypeGuard[torch.dtype]:
    """Tell whether a value is a dtype, one that torch no longer has too."""
    return isinstance(value, DTYPES)
