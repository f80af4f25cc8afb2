"""Find the backend that ``--backend`` names: a shipped one, an entry point, or ``module:attribute``.

Everything that goes wrong on the way ends in one ``BackendNotFound`` whose message tells what to change.
"""

from __future__ import annotations

import importlib
import os
import sys
from difflib import get_close_matches
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from backends.base import Backend, Representation

ENTRY_POINT_GROUP = "fx_quant_conformance.backends"
SHIPPED = {
    "reference": "backends.reference:ReferenceBackend",
    **{
        f"reference-{name}": f"backends.reference:Reference{name.capitalize()}"
        for name in ("native", "fbgemm", "x86", "onednn", "tensorrt", "executorch")
    },
    "qnnpack": "backends.qnnpack:QnnpackBackend",
    "fbgemm": "backends.fbgemm:FbgemmBackend",
    "x86": "backends.x86:X86Backend",
    "onednn": "backends.onednn:OnednnBackend",
    "onnxruntime": "backends.onnxruntime:OnnxRuntimeBackend",
    "openvino": "backends.openvino:OpenVinoBackend",
    "inductor": "backends.inductor:InductorBackend",
    "executorch": "backends.executorch:ExecuTorchBackend",
}
_FAULTS = (Exception, SystemExit)  # a vendor's module that calls sys.exit() must not end the run in silence


class BackendNotFound(Exception):
    """``--backend`` does not lead to a backend; the message is one line."""


def find_backend(spec: str) -> Backend:
    """Return a new instance of the backend that ``spec`` names. Raises BackendNotFound."""
    if spec in SHIPPED:
        return _backend_of(_load(SHIPPED[spec], f"shipped backend {spec!r}"), SHIPPED[spec])
    found = _entry_points(spec)
    if len({point.value for point in found}) > 1:
        values = ", ".join(sorted({point.value for point in found}))
        raise BackendNotFound(f"backend {spec!r}: several installed packages give it: {values}; name one of these")
    if found:
        return _backend_of(_load(found[0].value, f"entry point {spec!r}"), found[0].value)
    if ":" not in spec:
        raise BackendNotFound(_unknown(spec))
    _import_from_here()
    return _backend_of(_load(spec, f"backend {spec!r}"), spec)


def _entry_points(name: str | None = None) -> list[EntryPoint]:
    points = entry_points(group=ENTRY_POINT_GROUP)
    return [point for point in points if name is None or point.name == name]


def _unknown(spec: str) -> str:
    names = sorted({*SHIPPED, *(point.name for point in _entry_points())})
    near = get_close_matches(spec, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown backend {spec!r}; {hint}choose one of {', '.join(names)}, or give module:attribute"


def _import_from_here() -> None:
    """Make the working directory importable, as ``python -m`` does.

    The suite's own packages stay first: a vendor's folder may be called ``backends`` too.
    """
    first = [str(Path(__file__).resolve().parent.parent), os.getcwd()]
    sys.path[:] = [*first, *(entry for entry in sys.path if entry not in first)]


def _load(target: str, what: str) -> object:
    """Import ``module:attribute``; ``what`` begins the message when it fails."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise BackendNotFound(f"{what}: {target!r} is not of the form module:attribute")
    try:
        module = importlib.import_module(module_name)
    except _FAULTS as error:
        raise BackendNotFound(
            f"{what}: module {module_name!r} does not import: {describe_error(error)} (working directory {os.getcwd()})"
        ) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise BackendNotFound(f"{what}: {_missing_attribute(module_name, path, vars(module))}") from None


def _missing_attribute(module_name: str, path: str, names: dict[str, object]) -> str:
    backends = [name for name, value in names.items() if _is_backend_class(value) and value is not Backend]
    near = get_close_matches(path, [name for name in names if not name.startswith("__")], n=1)
    hint = f"its backends: {', '.join(backends)}" if backends else f"did you mean {near[0]!r}?" if near else ""
    return f"module {module_name!r} has no attribute {path!r}; {hint}".rstrip("; ")


def _backend_of(value: object, target: str) -> Backend:
    """Take an instance as it is, make one of a class, and check that it is a whole Backend."""
    if isinstance(value, type) and issubclass(value, Backend):
        if missing := sorted(value.__abstractmethods__):
            raise BackendNotFound(f"{target} does not implement {', '.join(missing)}; see backends.base.Backend")
        name = value.__name__
        try:
            value = value()
        except _FAULTS as error:
            raise BackendNotFound(f"{target}: {name}() raised {describe_error(error)}") from error
    if not isinstance(value, Backend):
        raise BackendNotFound(f"{target} is not a Backend: {_what_it_is(value)}")
    _check_attributes(value, target)
    return value


def _is_backend_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Backend)


def _what_it_is(value: object) -> str:
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
    needed = ("name", "representation", *sorted(Backend.__abstractmethods__))
    missing = [name for name in needed if not hasattr(value, name)]
    lacks = f", and without {', '.join(missing)}" if missing else ""
    return f"it is {kind}, not derived from backends.base.Backend{lacks}; give a subclass or an instance of one"


def _check_attributes(backend: Backend, target: str) -> None:
    name, representation = getattr(backend, "name", None), getattr(backend, "representation", None)
    if not isinstance(name, str) or not name:
        raise BackendNotFound(f"{target}: attribute 'name' is {name!r}; set it to a short name such as 'my_npu'")
    if not isinstance(representation, Representation):
        choices = " or ".join(str(member) for member in Representation)
        raise BackendNotFound(f"{target}: attribute 'representation' is {representation!r}; set it to {choices}")


def describe_error(error: BaseException) -> str:
    """Return an error's class and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
