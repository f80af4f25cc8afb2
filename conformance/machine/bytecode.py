"""The suite's modules in a run: compiled from their sources in each process, in half a second.

Python takes a cached file for the code of a source that has the time and size which the file names; it may hold
anything, and neither git nor a release's RECORD knows it. What is loaded before a door of the suite calls
`compile_sources` comes from the cache: `conformance.machine.release.FIRST`, whose cached files are compared with their
sources, so that the run is not one of a clean checkout if they differ.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import NoReturn

from fx_quant_conformance.conformance.machine.release import PACKAGE

_NAMES = (PACKAGE, "conformance")
"""The first names of the suite's modules: pytest imports two files of a checkout as modules of ``conformance``."""


class FromSource(SourceFileLoader):
    """Loads a module from its source; no cached file is read or written."""

    def path_stats(self, path: str) -> NoReturn:
        """Give no time and size, by which Python would look for a cached file."""
        raise OSError(f"{path}: cached code is not used")


class SuiteFinder(MetaPathFinder):
    """Finds the modules of the suite's packages, before pytest, which has a cache of its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of the suite is; None for others."""
        if fullname.partition(".")[0] not in _NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = FromSource(spec.loader.name, spec.loader.path)
        return spec


def compile_sources() -> None:
    """Have this process, and those forked from it, load the suite's modules from their sources from now on."""
    if not any(isinstance(finder, SuiteFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, SuiteFinder())
