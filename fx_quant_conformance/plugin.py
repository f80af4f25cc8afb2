"""pytest's entry point: registers the suite's hooks when the suite is asked for by name, and otherwise does nothing.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import os

import pytest

PACKAGE = "fx_quant_conformance"


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Register the suite's hooks for ``--pyargs fx_quant_conformance``: its conftest.py comes too late for options.

    Where the shell asks about a line, pytest gets no arguments, and so reads no conftest.py of a folder either.
    """
    asked = early_config.known_args_namespace
    words, pyargs, folder = asked.file_or_dir, asked.pyargs, ""
    if "_ARGCOMPLETE" in os.environ and not words:
        words = os.environ.get("COMP_LINE", "").split()
        pyargs = "--pyargs" in words
        folder = os.path.realpath(os.path.join(os.path.dirname(__file__), "conformance"))
    names = [str(word).partition("::")[0] for word in words]
    is_named = pyargs and any(name.partition(".")[0] == PACKAGE for name in names)
    if is_named or folder in map(os.path.realpath, names):
        from fx_quant_conformance.conformance.machine.bytecode import compile_sources

        compile_sources()
        from fx_quant_conformance.conformance.machine.fork_server import start_server_early

        start_server_early()
        from fx_quant_conformance.conformance.run.hooks import register_hooks

        register_hooks(early_config.pluginmanager)
