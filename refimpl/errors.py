"""The errors that refimpl raises, by whose fault something is.

All of them are ``ValueError``: torch's front door raises that for bad arguments, and a vendor who swaps one import
keeps their ``except`` clauses.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches

_MACHINERY = ("fx_quant_conformance.refimpl.", "torch.", "torchao.", "contextlib.")
"""Packages whose lines say nothing to a user."""


class RefimplError(ValueError):
    """Base class of every error that refimpl raises on purpose."""


class ConfigError(RefimplError):
    """A BackendConfig, or a callable that it names, is wrong."""


class ModelError(RefimplError):
    """The model (or its example inputs) cannot be taken through the flow."""


class QConfigError(RefimplError):
    """A QConfig, an observer or a QConfigMapping is wrong."""


@contextmanager
def blame(kind: type[RefimplError], where: str, what: str = "", advice: str = "") -> Iterator[None]:
    """Turn any exception of a foreign class or function into an error that says where, and whose fault it is."""
    try:
        yield
    except RefimplError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        raise kind(f"{where}: {what} raised {type(error).__name__}: {error}{advice}") from error


def suggest_name(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``did you mean …?`` with the known name nearest to the one given, or else all the known names.

    `cutoff`: from 0, where any name is near, to 1, where only the same is.
    """
    allowed = list(known)
    near = get_close_matches(str(name), allowed, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(map(repr, allowed))}"


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the nearest caller that is neither refimpl nor torch, which may run it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(_MACHINERY):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_dict_form(expected: str) -> None:
    """Warn, as torch does, that a dict in the place of a config object goes out of use. (CUS-04)"""
    warn_user(f"a dict in the place of a {expected} is deprecated; pass {expected}.from_dict(…)", FutureWarning)


def reject_unknown_keys(what: str, form: object, known: Iterable[str]) -> None:
    """Raise ConfigError for a dict form that is no dict, or that holds a key that nothing reads; name the nearest."""
    if not isinstance(form, Mapping):  # rule: CFG-14
        raise ConfigError(f"{what}: expected a dict, found {form!r}")
    allowed = list(known)
    for key in form:
        if key not in allowed:  # rule: CFG-13
            raise ConfigError(f"{what}: unknown key {key!r}; {suggest_name(key, allowed)}")
