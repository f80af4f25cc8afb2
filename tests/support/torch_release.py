"""Tests of what some releases of torch lack (refimpl.releases)."""

from __future__ import annotations

import pytest

from fx_quant_conformance.refimpl.releases import format_lack, has


def need(name: str) -> None:
    """Skip the test that calls this, with the reason, if the torch that runs lacks what the row names."""
    if not has(name):
        pytest.skip(format_lack(name))
