"""The names that release 0.2.0 had, whose four packages were installed side by side."""

from __future__ import annotations

import os
import sys

PACKAGE = "fx_quant_conformance"
_FORMER = frozenset({"backends", "conformance", "refimpl", "reports"})


def format_former(name: str) -> str:
    """Say what to import in the place of a module that is not found by the name that it had in release 0.2.0.

    "" for other modules, and where a vendor's package has such a name.
    """
    first = name.partition(".")[0]
    found = getattr(sys.modules.get(first), "__file__", None)
    if first not in _FORMER or (found is not None and not _is_of_checkout(found)):
        return ""
    public = f"Backend, Capabilities, Representation and register are in {PACKAGE} itself"
    return f"{name} is gone: its package is {PACKAGE}.{first} now; {public}"


def _is_of_checkout(file: str) -> bool:
    """Tell whether a module's file lies in one of the folders that the package's links lead to."""
    here = os.path.dirname(os.path.abspath(__file__))
    return any(os.path.realpath(file).startswith(os.path.realpath(f"{here}/{name}") + os.sep) for name in _FORMER)


def check_name(name: str) -> None:
    """Refuse to be imported by a former name, as from a checkout's folder. Raises ImportError."""
    if text := format_former(name):
        raise ImportError(text)
