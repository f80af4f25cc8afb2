"""A backend's config as plain data, and back: how the judge gets it without importing the vendor's code.

Classes and functions travel by name. Those of torch and of the suite are looked up again; in place of any other one the
judge gets a stand-in of the same name, which matches nothing and cannot be run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, partial, reduce
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from refimpl import BackendConfig, DTypeWithConstraints, ObservationType

TRUSTED = ("torch", "refimpl", "backends", "conformance", "operator", "_operator", "builtins", "math")
"""Packages whose classes and functions are looked up by name: torch, Python and the suite."""
CALLED = ("refimpl.", "backends.", "torch.ao.")
"""Packages whose functions may be given arguments by the vendor (``functools.partial``): the judge calls them."""


class ConfigDataError(Exception):
    """The data describe no config."""


def config_to_data(config: BackendConfig) -> Any:
    """Return a config as data that JSON holds."""
    return _encode(config.to_dict())


def config_from_data(data: Any) -> BackendConfig:
    """Return the config of data. Raises ConfigDataError for data that are none."""
    try:
        return BackendConfig.from_dict(_decode(data))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ImportError) as error:
        raise ConfigDataError(f"{type(error).__name__}: {error}") from error


def has_own_code(value: object) -> bool:
    """Tell whether a part of a config, or one inside of it, is a stand-in for the vendor's code."""
    return any(getattr(each, "is_own_code", False) for each in _walk(value))


def _walk(value: object) -> Iterator[object]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, partial):
        yield from _walk((value.func, *value.args, *value.keywords.values()))
    else:
        yield value


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, ObservationType):
        return {"observation": value.name}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__ if type(value) in (tuple, list) else "tuple": [_encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, partial):
        return {"partial": [_encode(value.func), _encode(list(value.args)), _encode(value.keywords)]}
    if isinstance(value, DTypeWithConstraints):
        return {"bounds": _encode({field.name: getattr(value, field.name) for field in fields(value)})}
    return _encode_name(value)


def _encode_name(value: Any) -> Any:
    """Name a class or function; anything else is the vendor's own, known by its type only."""
    module, name = str(getattr(value, "__module__", "") or ""), str(getattr(value, "__qualname__", "") or "")
    inside = (key for key, found in vars(F).items() if found is value)  # made by torch's boolean_dispatch
    places = ((module, name), ("torch", name.rpartition(".")[2]), ("torch.nn.functional", next(inside, "")))
    for home, path in places:
        if path and _is_trusted(home) and _is_found(home, path, value):
            return {"name": [home, path]}
    kind = "class" if isinstance(value, type) else "function" if name else "object"
    return {"own": [kind, module or type(value).__module__, name or type(value).__qualname__]}


def _is_trusted(module: str) -> bool:
    return module.partition(".")[0] in TRUSTED


def _is_found(module: str, path: str, value: Any) -> bool:
    try:
        return _find(module, path) is value
    except (ImportError, AttributeError):
        return False


def _find(module: str, path: str) -> Any:
    return reduce(getattr, path.split("."), importlib.import_module(module))


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in ("tuple", "list"):
        items = [_decode(item) for item in value]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in value}
    if kind == "dtype":
        return _expect(getattr(torch, value), torch.dtype)
    if kind == "observation":
        return ObservationType[value]
    if kind == "partial":
        function, args, keywords = map(_decode, value)
        if not has_own_code(function) and not function.__module__.startswith(CALLED):
            raise ValueError(f"{function.__module__}.{function.__qualname__} takes no arguments from a config")
        return partial(function, *args, **keywords)
    if kind == "bounds":
        return DTypeWithConstraints(**_decode(value))
    if kind == "name" and _is_trusted(value[0]):
        return _find(*value)
    if kind == "own":
        return _stand_in(*map(str, value))
    raise ValueError(f"unknown kind of data: {kind}")


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found {value!r}")
    return value


@cache
def _stand_in(kind: str, module: str, name: str) -> Any:
    """Return what stands for a class or function of the vendor's, the same for the same name."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{module}.{name} is the vendor's code, which this process has not imported")

    names = {"__module__": module, "__qualname__": name, "is_own_code": True}
    if kind == "class":
        return type(name.rpartition(".")[2], (nn.Module,), {**names, "__init__": refuse})
    for key, value in names.items():
        setattr(refuse, key, value)
    refuse.__name__ = name.rpartition(".")[2]
    return refuse
