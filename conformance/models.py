"""The former place of ``register``, which is now in `conformance.vendor`."""

import warnings
from typing import Any

from conformance import vendor


def __getattr__(name: str) -> Any:
    if name != "register":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "conformance.models.register is deprecated: import it from conformance.vendor", DeprecationWarning, stacklevel=2
    )
    return vendor.register
