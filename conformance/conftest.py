"""The door for ``pytest PATH/TO/conformance``; the one for ``pytest --pyargs conformance`` is fx_quant_conformance."""

from __future__ import annotations

import pytest

from conformance.run.hooks import register_hooks


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the suite's hooks, which add its options."""
    register_hooks(pluginmanager)
