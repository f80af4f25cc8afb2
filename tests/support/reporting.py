"""The commands about results files, as tests give them."""

from __future__ import annotations

from collections.abc import Sequence

from fx_quant_conformance import door


def main(words: Sequence[str]) -> int:
    """Run ``fx-quant-conformance report`` with some words; return the exit status."""
    return door.main(["report", *words])
