"""The errors that refimpl raises, so that a caller can tell whose fault something is.

``ConfigError`` blames the BackendConfig (or one of its callables), ``ModelError`` the user's model or example
inputs, ``QConfigError`` a QConfig or QConfigMapping. All of them are ``ValueError``: torch's front door raises that
for bad arguments, and a vendor who swaps one import keeps their ``except`` clauses.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RefimplError(ValueError):
    """Base class of every error that refimpl raises on purpose."""


class ConfigError(RefimplError):
    """A BackendConfig, or a callable that it names, is wrong."""


class ModelError(RefimplError):
    """The model (or its example inputs) cannot be taken through the flow."""


class QConfigError(RefimplError):
    """A QConfig, an observer or a QConfigMapping is wrong."""


class NotBuiltError(RefimplError):
    """The rule is part of the specification, and refimpl does not execute it yet. Never a silent float fallback."""


def reject_unbuilt(where: str, **arguments: object) -> None:
    """Raise NotBuiltError for an argument of the front door that is given and would be ignored."""
    for name, value in arguments.items():
        if value is not None:
            raise NotBuiltError(f"{where}: {name} is not built yet; found {value!r}")


def reject_unknown_keys(what: str, found: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError when a dict form holds a key that nothing reads, and name the nearest known one.

    rule: CFG-13
    """
    allowed = list(known)
    for key in found:
        if key in allowed:
            continue
        near = get_close_matches(str(key), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(map(repr, allowed))}"
        raise ConfigError(f"{what}: unknown key {key!r}; {hint}")
