"""The door for ``pytest PATH/TO/conformance``; the one for ``pytest --pyargs conformance`` is fx_quant_conformance.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

import pytest

from conformance.machine.bytecode import compile_sources


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the suite's hooks, which add its options; they, and what they import, come from their sources."""
    compile_sources()
    from conformance.machine.child import start_server_early

    start_server_early()
    from conformance.run.hooks import register_hooks

    register_hooks(pluginmanager)
