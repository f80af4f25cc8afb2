"""pytest's entry point: registers the suite's hooks when the suite is asked for by name, and otherwise does nothing.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import os

import pytest

PACKAGE = "fx_quant_conformance"


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Register the suite's hooks for ``--pyargs fx_quant_conformance``: its conftest.py comes too late for options."""
    asked = early_config.known_args_namespace
    words, pyargs = asked.file_or_dir, asked.pyargs
    if "_ARGCOMPLETE" in os.environ and not words:  # the shell asks about a line, and pytest gets no arguments
        words = os.environ.get("COMP_LINE", "").split()
        pyargs = "--pyargs" in words
    if pyargs and any(str(word).partition("::")[0].partition(".")[0] == PACKAGE for word in words):
        from fx_quant_conformance.conformance.machine.bytecode import compile_sources

        compile_sources()
        from fx_quant_conformance.conformance.machine.child import start_server_early

        start_server_early()
        from fx_quant_conformance.conformance.run.hooks import register_hooks

        register_hooks(early_config.pluginmanager)
