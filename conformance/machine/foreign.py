"""Foreign code: what a process holds that is neither Python's, nor the suite's, nor of what the suite needs.

Plugins and conftest.py files of pytest, and what site-packages loads into every process, can change what judges. They
are told by the files of their modules: what leaves no module behind is not seen.
"""

from __future__ import annotations

import csv
import functools
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement

from fx_quant_conformance.conformance.machine.release import DISTRIBUTION, FOLDERS, ROOT, find_package
from fx_quant_conformance.reports.schema import OF_VENDOR

NEEDED = (f"{DISTRIBUTION}[digits]", "setuptools")
"""Distributions that are not foreign, nor what they depend on; setuptools puts a module into every process."""
_NOT_OF_PYTHON = frozenset({"site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"})
"""Names in the folder of Python's own library of what others put there."""
_OF_INSTALLERS = ("_virtualenv.py", "__editable__")
"""How the names of modules begin that virtualenv puts into an environment, and setuptools for what is editable."""


def list_foreign_code(names: Iterable[str], plugins: Collection[object] = (), vendors: Sequence[str] = ()) -> list[str]:
    """Return the foreign code among modules of this process, by their names, and among pytest's plugins: a line each.

    Of a package that is its outermost module, of what is installed its distribution. ``vendors``: the files and folders
    that the backend's code comes from; a line about them begins with `OF_VENDOR`.
    """
    hooked = [each if isinstance(each, ModuleType) else sys.modules.get(type(each).__module__) for each in plugins]
    loaded = [(name, sys.modules.get(name)) for name in names]
    loaded += [(module.__name__, module) for module in hooked if module is not None]
    foreign = {path: name for name, module in loaded if (path := _find_file(module)) and not _is_known(path)}
    of_plugins, packages = set(map(_find_file, hooked)), set(foreign.values())
    return sorted(
        {
            (OF_VENDOR if any(path == place or path.startswith(place + os.sep) for place in vendors) else "")
            + _describe(name, path, of_plugins)
            for path, name in foreign.items()
            if path in of_plugins or name.rpartition(".")[0] not in packages
        }
    )


def _find_file(module: object) -> str:
    """Return the file of a module; "" if it has none, as what is compiled into Python has, or made while it runs."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


def _describe(name: str, path: str, of_plugins: Collection[str]) -> str:
    """Say what a foreign module is. ``of_plugins``: the files of pytest's plugins."""
    if os.path.basename(path) == "conftest.py":
        return f"conftest.py of {os.path.dirname(path)}"
    for installed, places in _list_installed():
        if path.startswith(places):
            plugin = "pytest plugin " if any(each.startswith(places) for each in of_plugins) else ""
            return f"{plugin}{installed.name} {installed.version}"
    here = Path.cwd()
    shown = os.path.relpath(path, here) if Path(path).is_relative_to(here) else path
    return f"{'pytest plugin' if path in of_plugins else 'module'} {name} ({shown})"


@functools.cache
def _is_known(path: str) -> bool:
    """Tell whether a file is not foreign; asked anew of all that a judge has imported, after each claim."""
    return path.startswith(_list_known()) or os.path.realpath(path).startswith(_list_known())


@functools.cache
def _list_known() -> tuple[str, ...]:
    """Return how the paths of all that is not foreign begin."""
    places = {
        *(str(ROOT / name) + os.sep for name in FOLDERS),
        f"{find_package(ROOT)}{os.sep}",
    }
    places.update(os.path.join(sysconfig.get_path("purelib"), name) for name in _OF_INSTALLERS)
    places.add(os.path.join(sys.base_prefix, "DLLs") + os.sep)  # Python's own, on Windows
    for library in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        entries = list(os.scandir(library)) if os.path.isdir(library) else []
        places.update(_spell(entry) for entry in entries if entry.name not in _NOT_OF_PYTHON)
    places.update(place for each in _list_needed() for place in _list_places(each))
    real = (os.path.realpath(place) + (os.sep if place.endswith(os.sep) else "") for place in places)
    return (*places, *real)


def _spell(entry: os.DirEntry[str]) -> str:
    return entry.path + os.sep if entry.is_dir() else entry.path


def _list_needed() -> Iterator[Distribution]:
    """Yield the distributions of NEEDED that are installed, and those that they depend on, directly or indirectly."""
    waiting, seen = [Requirement(text) for text in NEEDED], set[tuple[str, frozenset[str]]]()
    while waiting:
        wanted = waiting.pop()
        key = wanted.name.lower(), frozenset(wanted.extras)
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        yield found
        for need in map(Requirement, found.requires or ()):
            marker = need.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(need)


@functools.cache
def _list_installed() -> tuple[tuple[Distribution, tuple[str, ...]], ...]:
    """Return all distributions, with how the paths of their files begin."""
    return tuple((each, tuple(_list_places(each))) for each in distributions())


def _list_places(of: Distribution) -> set[str]:
    """Return how the paths of a distribution's files begin, as its RECORD names them: folders, and files alone."""
    base = os.path.abspath(str(of.locate_file("")))
    names = [row[0] for row in csv.reader((of.read_text("RECORD") or "").splitlines()) if row]
    outside = {os.path.normpath(os.path.join(base, name)) for name in names if name.startswith("../")}
    inside = {"".join(name.partition("/")[:2]) for name in names}  # such as torch/ and typing_extensions.py
    return outside | {os.path.join(base, name.replace("/", os.sep)) for name in inside - {"../"}}
