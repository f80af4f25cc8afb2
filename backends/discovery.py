"""Find the backend that ``--backend`` names: a shipped one, an entry point, or ``module:attribute``.

Every failure raises one ``BackendNotFound`` whose message says what to change.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import reduce
from importlib.metadata import entry_points
from typing import Any, TypeGuard

from torch.fx import GraphModule

from fx_quant_conformance.backends.base import Backend, Representation, UnsupportedPattern
from fx_quant_conformance.backends.names import ENTRY_POINT_GROUP, SHIPPED, BackendNotFound, format_error, list_names
from fx_quant_conformance.former import format_former
from fx_quant_conformance.refimpl import BackendConfig

_FAULTS = (Exception, SystemExit)  # a vendor's module that calls sys.exit() must not end the run silently


def find_backend(spec: str, *, needs_lower: bool = True) -> Backend:
    """Return a new instance of the backend that ``spec`` names. Raises BackendNotFound.

    ``needs_lower``: False where no model is lowered here. Then a class without ``lower`` is a backend too, and so is a
    BackendConfig, or a function that returns one.
    """
    target, what = find_target(spec)
    return _load(target, what, needs_lower)


def find_target(spec: str) -> tuple[str, str]:
    """Return the ``module:attribute`` that ``spec`` names, and how messages call it. Raises BackendNotFound."""
    if spec in SHIPPED:
        return SHIPPED[spec], f"shipped backend {spec!r}"
    target = find_entry_point(ENTRY_POINT_GROUP, spec, f"backend {spec!r}")
    if target is not None:
        return target, f"entry point {spec!r}"
    if ":" not in spec:
        names = list_names()
        near = get_close_matches(spec, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        choices = ", ".join(names)
        raise BackendNotFound(f"unknown backend {spec!r}; {hint}choose one of {choices}, or give module:attribute")
    _import_from_here()
    return spec, f"backend {spec!r}"


def find_entry_point(group: str, name: str, what: str) -> str | None:
    """Return the ``module:attribute`` of an entry point; None: no package gives it. ``what`` begins messages.

    Raises BackendNotFound if several do.
    """
    targets = sorted({point.value for point in entry_points(group=group, name=name)})
    if len(targets) > 1:
        values = ", ".join(targets)
        raise BackendNotFound(f"{what}: several installed packages give it: {values}; name one of these")
    return targets[0] if targets else None


def _import_from_here() -> None:
    """Make the working directory importable, as ``python -m`` does."""
    here = os.getcwd()
    sys.path[:] = [here, *(entry for entry in sys.path if entry != here)]


def _load(target: str, what: str, needs_lower: bool) -> Backend:
    """Import ``module:attribute``; ``what`` begins the message when it fails."""
    value = _import_attribute(target, what)
    path = target.partition(":")[2]
    return _backend_of(value if needs_lower else _complete(value, path), target)


def find_attribute(spec: str, what: str) -> object:
    """Return what ``module:attribute`` names, from the working directory too. ``what`` begins messages.

    Raises BackendNotFound.
    """
    _import_from_here()
    return _import_attribute(spec, what)


def _import_attribute(target: str, what: str) -> object:
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise BackendNotFound(f"{what}: {target!r} is not of the form module:attribute")
    try:
        module = importlib.import_module(module_name)
    except _FAULTS as error:
        why = f"{format_error(error)} (working directory {os.getcwd()})"
        if isinstance(error, ModuleNotFoundError) and (former := format_former(error.name or "")):
            why += f"; {former}"
        raise BackendNotFound(f"{what}: module {module_name!r} does not import: {why}") from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise BackendNotFound(f"{what}: {_format_missing(module_name, path, vars(module))}") from None


class ConfigOnly(Backend):
    """A backend of which only the config is known: its models run elsewhere, in the decomposed form."""

    representation = Representation.DECOMPOSED

    def __init__(self, name: str, get_config: Callable[[], Any]) -> None:
        self.name = name
        self._get_config = get_config

    def backend_config(self) -> BackendConfig:
        """Return the config."""
        return self._get_config()  # type: ignore[no-any-return]  # whatever it is: it is checked as any backend's

    def lower(self, reference_model: GraphModule, example_inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """Raise UnsupportedPattern."""
        raise UnsupportedPattern("only the config of this backend is known")


def _complete(value: object, name: str) -> object:
    """Return a backend for what lacks only ``lower``: a class without it, a config, or a function that returns one."""
    if _is_backend_class(value):
        if value.__abstractmethods__ == {"lower"}:
            return type(value.__name__, (value,), {"lower": ConfigOnly.lower, "__module__": value.__module__})
        return value
    if isinstance(value, (Backend, type)):
        return value
    own_name = name.rpartition(".")[2].removesuffix("_config").removesuffix("_backend").removeprefix("get_")
    if callable(value):
        return ConfigOnly(own_name, value)
    return ConfigOnly(own_name, lambda: value) if hasattr(value, "configs") or isinstance(value, dict) else value


def _format_missing(module_name: str, path: str, names: dict[str, object]) -> str:
    backends = [name for name, value in names.items() if _is_backend_class(value) and value is not Backend]
    near = get_close_matches(path, [name for name in names if not name.startswith("__")], n=1)
    hint = f"its backends: {', '.join(backends)}" if backends else f"did you mean {near[0]!r}?" if near else ""
    return f"module {module_name!r} has no attribute {path!r}; {hint}".rstrip("; ")


def _backend_of(value: object, target: str) -> Backend:
    """Take an instance as it is, instantiate a class, and check that the backend is complete."""
    if _is_backend_class(value):
        if missing := sorted(value.__abstractmethods__):
            raise BackendNotFound(f"{target} does not implement {', '.join(missing)}; see fx_quant_conformance.Backend")
        name = value.__name__
        try:
            value = value()
        except _FAULTS as error:
            raise BackendNotFound(f"{target}: {name}() raised {format_error(error)}") from error
    if not isinstance(value, Backend):
        raise BackendNotFound(f"{target} is not a Backend: {_format_other(value)}")
    own_name, representation = getattr(value, "name", None), getattr(value, "representation", None)
    if not isinstance(own_name, str) or not own_name:
        raise BackendNotFound(f"{target}: attribute 'name' is {own_name!r}; set it to a short name such as 'my_npu'")
    if not isinstance(representation, Representation):
        choices = " or ".join(str(member) for member in Representation)
        raise BackendNotFound(f"{target}: attribute 'representation' is {representation!r}; set it to {choices}")
    return value


def _is_backend_class(value: object) -> TypeGuard[type[Backend]]:
    return isinstance(value, type) and issubclass(value, Backend)


def _format_other(value: object) -> str:
    """Say what an object that is no Backend is, and what it lacks."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
    needed = ("name", "representation", *sorted(Backend.__abstractmethods__))
    missing = [name for name in needed if not hasattr(value, name)]
    lacks = f", and without {', '.join(missing)}" if missing else ""
    return f"it is {kind}, not derived from fx_quant_conformance.Backend{lacks}; give a subclass or an instance of one"
