"""The suite's package, and what a vendor's own code imports from it: the contract, and `register`.

Nothing is imported before it is asked for: pytest loads the plugin in every project of an environment, and Python the
command in a folder whose modules nobody knows (`fx_quant_conformance.__main__`). PYTEST_DONT_REWRITE: the command is
imported before pytest, which would warn that it is too late to rewrite assertions.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fx_quant_conformance.backends.base import (
        Backend,
        Capabilities,
        Execution,
        Lowered,
        QuantizerRequest,
        Representation,
        Requantize,
        RoundingMode,
        Tolerance,
        UnsupportedPattern,
    )
    from fx_quant_conformance.conformance.claims.registry import register
    from fx_quant_conformance.conformance.ops.op_model import Input, Role
    from fx_quant_conformance.conformance.own_models.given import GivenModel

__all__ = [
    "Backend",
    "Capabilities",
    "Execution",
    "GivenModel",
    "Input",
    "Lowered",
    "QuantizerRequest",
    "Representation",
    "Requantize",
    "Role",
    "RoundingMode",
    "Tolerance",
    "UnsupportedPattern",
    "register",
]
_HOMES = {
    "GivenModel": "conformance.own_models.given",
    "Input": "conformance.ops.op_model",
    "Role": "conformance.ops.op_model",
    "register": "conformance.claims.registry",
}
"""The modules that names come from, if not from the contract."""


def __getattr__(name: str) -> "Any":
    """Import what a vendor's code asks for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'backends.base')}"), name)
