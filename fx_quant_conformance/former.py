"""What release 0.2.0 called otherwise: its packages were no part of one."""

from __future__ import annotations

PACKAGE = "fx_quant_conformance"
_FORMER = frozenset({"backends", "conformance", "refimpl", "reports"})


def format_former(name: str) -> str:
    """Say what to import in the place of a module by the name that it had in release 0.2.0; "" for other modules."""
    if name.partition(".")[0] not in _FORMER:
        return ""
    public = f"Backend, Capabilities, Representation and register are in {PACKAGE} itself"
    return f"{name} is gone: its package is {PACKAGE}.{name.partition('.')[0]} now; {public}"


def check_name(name: str) -> None:
    """Refuse to be imported by a former name, as from a checkout's folder. Raises ImportError."""
    if text := format_former(name):
        raise ImportError(text)
