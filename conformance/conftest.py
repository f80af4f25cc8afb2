"""The door for ``pytest PATH/TO/conformance``; that for ``pytest --pyargs fx_quant_conformance`` is the plugin.

PYTEST_DONT_REWRITE: what pytest caches of it is its own code, and can be compared with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fx_quant_conformance.conformance.machine.bytecode import compile_sources
from fx_quant_conformance.conformance.machine.release import ROOT

_HERE = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the suite's hooks, which add its options; they, and what they import, come from their sources.

    Raises UsageError if the suite that Python imports is not the one that is asked for.
    """
    if _HERE != ROOT:
        advice = f"install it (pip install -e {_HERE}), or run pytest --pyargs fx_quant_conformance"
        raise pytest.UsageError(f"{_HERE} is a checkout, and Python imports the suite of {ROOT}: {advice}")
    compile_sources()
    from fx_quant_conformance.conformance.machine.fork_server import start_server_early

    start_server_early()
    from fx_quant_conformance.conformance.run.hooks import register_hooks

    register_hooks(pluginmanager)
