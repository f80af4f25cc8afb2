"""For completion by the shell alone: argcomplete runs pytest without arguments, so that it reads no other conftest."""

from __future__ import annotations

import os

import pytest

if "_ARGCOMPLETE" in os.environ:
    from backends.discovery import list_names
    from conformance.run.options import register

    def pytest_addoption(parser: pytest.Parser) -> None:
        """Add the suite's options, and the names of backends to the one that takes them."""
        register(parser)
        (backend,) = (each for each in parser.optparser._actions if "--backend" in each.option_strings)
        backend.completer = lambda **given: list_names()  # type: ignore[attr-defined]
