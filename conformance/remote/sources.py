"""The sources of a backend: which files its process runs code from, and one digest of all that they hold."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType

from fx_quant_conformance.conformance.machine.release import PACKAGE

_NO_SOURCES = frozenset({"__main__", "conftest", PACKAGE})
"""Modules that are pytest's, or tell it what to do, and the suite's."""


class SourcesError(Exception):
    """The sources of a module cannot be found, or not be read; one line."""


def list_sources(spec_module: str, backend_module: str, before: Collection[str] = ()) -> list[str]:
    """Return the files and folders that this process has imported code from, for a backend of these modules.

    ``before``: names of the modules that were imported before the backend's, for something else.

    Of a package that is its outermost folder. Left out are Python's own library, the suite, and what is installed, but
    for the backend's own package; beside a backend's single module lies what it may yet import. Raises SourcesError.
    """
    own = {name.partition(".")[0] for name in (spec_module, backend_module)}.difference({PACKAGE})
    places = {place for name in own for place in _list_own(name)}
    others = {name: module for name, module in sys.modules.items() if "." not in name}
    for name in others.keys() - own - _NO_SOURCES.union(before):
        places.update(place for place in _list_places(others[name]) if not _is_installed(place))
    return sorted(places)


def _list_own(name: str) -> Iterator[str]:
    """Yield where the backend's own package lies; of a single module all modules of its folder."""
    module = sys.modules.get(name)
    places = [] if module is None else _list_places(module)
    if module is None or not places or not all(map(os.path.exists, places)):
        raise SourcesError(f"the files of its module {name!r} cannot be found")
    yield from places
    if not hasattr(module, "__path__"):
        folder = Path(places[0]).parent
        yield from (str(path) for path in folder.iterdir() if path.name.endswith(tuple(all_suffixes())))


def _list_places(module: ModuleType) -> list[str]:
    """Return a package's folders, or a module's file; nothing for a module without any."""
    folders = getattr(module, "__path__", None)
    if folders is not None:
        return [os.path.abspath(folder) for folder in folders]
    file = getattr(module, "__file__", None)
    return [] if file is None else [os.path.abspath(file)]


def _is_installed(place: str) -> bool:
    """Tell whether a place is in Python's own library or among the installed packages, which their versions tell."""
    return place.startswith(_find_installed())


@functools.cache
def _find_installed() -> tuple[str, ...]:
    """Return how the paths of all that is installed begin."""
    return tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def digest_sources(places: Iterable[str | Path], left_out: Collection[Path] = ()) -> str:
    """Return one sha256 over names and bytes of all files at these places, and below them.

    Names are those below the folder that a place lies in, so that a copy elsewhere has the same digest. What Python
    compiled, hidden folders, and what is ``left_out`` do not count. Raises SourcesError for what cannot be read.
    """
    digest, skipped = hashlib.sha256(), {os.path.realpath(path) for path in left_out}
    try:
        for place in sorted(set(map(Path, places))):
            if any(Path(os.path.realpath(place)).is_relative_to(path) for path in skipped):
                raise SourcesError(f"{place} lies in a folder that the run writes to, with sources that cannot be told")
            for path in _list_files(place, skipped):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(
                    f"{content}  {path.relative_to(place.parent).as_posix()}\n".encode(errors="surrogatepass")
                )
    except OSError as error:
        raise SourcesError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _list_files(place: Path, skipped: Collection[str]) -> Iterator[Path]:
    """Yield the files at a place in order of name; an error of a folder is raised."""
    if os.path.realpath(place) in skipped:
        return
    if place.is_dir():
        for path in sorted(place.iterdir()):
            if not (path.is_dir() and (path.name == "__pycache__" or path.name.startswith("."))):
                yield from _list_files(path, skipped)
    elif place.suffix != ".pyc" and (place.is_file() or not place.exists()):  # what is neither holds no code
        yield place
