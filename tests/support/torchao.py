"""Skipping the tests of PT2E where torchao cannot be used: it is not installed, or not for this torch."""

from __future__ import annotations

from importlib import import_module

import pytest


def _format_absence() -> str:
    try:
        import_module("torchao.quantization.pt2e.quantize_pt2e")
    except (ImportError, AttributeError) as error:  # what a torch before 2.10 lacks
        return f"torchao cannot be imported: {error}"
    return ""


ABSENCE = _format_absence()
"""Why torchao cannot be used; "" if it can be."""
needs_torchao = pytest.mark.skipif(bool(ABSENCE), reason=ABSENCE)


def require_torchao() -> None:
    """Skip what calls it, a test or a whole module, where torchao cannot be used."""
    if ABSENCE:
        pytest.skip(ABSENCE, allow_module_level=True)
