"""QAT modules of layers whose input is quantized dynamically."""

from __future__ import annotations

from fx_quant_conformance.refimpl.legacy import qat

__all__ = ["Linear"]


class Linear(qat.Linear):
    """A linear layer, which takes float inputs."""
