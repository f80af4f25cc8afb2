"""pytest's entry point: registers the suite's hooks when the suite is asked for, and otherwise does nothing.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = "conformance"
_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = frozenset({"backends", PACKAGE, "refimpl", "reports"})
"""The distribution's packages, whose names a project may use for its own."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Take back that pytest rewrites assertions in all packages of a distribution that has a plugin.

    A project's own ``reports`` would otherwise fail with other messages where the suite is installed.
    """
    marked = getattr(pluginmanager.rewrite_hook, "_must_rewrite", None)
    if isinstance(marked, set):  # else pytest has changed, and rewrites them
        marked -= _PACKAGES


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Register the suite's hooks for ``--pyargs conformance``, if that is the package beside this one; else go.

    pytest loads the conftest.py of such a package too late for options.
    """
    asked, manager = early_config.known_args_namespace, early_config.pluginmanager
    pyargs, arguments = asked.pyargs, asked.file_or_dir
    if "_ARGCOMPLETE" in os.environ and not arguments:  # the shell asks about a line, and pytest gets no arguments
        arguments = os.environ.get("COMP_LINE", "").split()
        pyargs = "--pyargs" in arguments
    if pyargs and _names_suite(arguments) and _is_beside():
        from conformance.machine.bytecode import compile_sources

        compile_sources()
        from conformance.machine.child import start_server_early

        start_server_early()
        from conformance.run.hooks import register_hooks  # imports torch

        register_hooks(manager)
        # A folder of this name, as in a checkout, is not meant: its conftest.py would be loaded as that of the package.
        asked.file_or_dir[:] = [str(_ROOT / PACKAGE) if each == PACKAGE else each for each in asked.file_or_dir]
    else:
        own = manager.unregister(sys.modules[__name__])
        listed = getattr(manager, "_plugin_distinfo", [])
        listed[:] = [each for each in listed if each[0] is not own]  # the header of every run would name it


def _names_suite(arguments: Iterable[object]) -> bool:
    """Tell whether an argument is the suite, one of its modules, or a test in it."""
    modules = (str(argument).partition("::")[0] for argument in arguments)
    return any(module == PACKAGE or module.startswith(f"{PACKAGE}.") for module in modules)


def _is_beside() -> bool:
    """Tell whether Python would import the ``conformance`` of this installation; nothing is imported."""
    spec = find_spec(PACKAGE)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parents[1] == _ROOT
