"""The former place of ``Input``, which is now in `conformance.vendor`."""

import warnings
from typing import Any

from conformance import vendor


def __getattr__(name: str) -> Any:
    if name != "Input":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "conformance.cases.Input is deprecated: import it from conformance.vendor", DeprecationWarning, stacklevel=2
    )
    return vendor.Input
