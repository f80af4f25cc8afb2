"""For completion by the shell alone: argcomplete runs pytest without arguments, so that it reads no other conftest.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import os

import pytest

if "_ARGCOMPLETE" in os.environ:
    from fx_quant_conformance.conformance.run.hooks import register_hooks

    def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
        """Register the suite's hooks, which add its options."""
        register_hooks(pluginmanager)
